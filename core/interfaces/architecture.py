"""The seam for model families: how a config reads, which tensors a layer needs, how a layer computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from core.interfaces.checkpoint import TensorInfo
    from core.interfaces.quantizer import Embedding, GroupedLinear, Linear

T = TypeVar("T")

SNAPSHOT_TOKENS = 64
"""See `ModelSpec.snapshots`. Layers with a window have such snapshots too."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the rest of the system needs to know of a model's config.

    `kv_width` is the number of values that one token leaves in one layer's KV cache (keys and values together), unless
    `Architecture.layer_cache` says otherwise.
    `config` is the checkpoint's own config, in the words of a Hugging Face config.json. `can_truncate` says that
    what is cached for a session can be cut back to any earlier position; recurrent families can't. If it `snapshots`,
    such a family keeps what is behind a prompt's chunk that ends at a multiple of SNAPSHOT_TOKENS: the last of those
    that a session has had is where it can be cut back to.
    """

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    kv_width: int
    tied_head: bool
    config: Mapping[str, Any]
    can_truncate: bool = True
    snapshots: bool = False


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What one layer keeps for a session, in values of the compute dtype unless it says otherwise.

    Each token leaves `token_values` with `Batch.attend` or `Batch.extend`, in `token_rows` rows: one for each head of
    keys, and of values. Only those of the last `window` tokens are of use (None: all). `state_values`, and
    `state_fp32_values` in float32, are what `BatchSegment.state` holds, whatever the number of tokens.
    """

    token_values: int
    window: int | None = None
    state_values: int = 0
    state_fp32_values: int = 0
    token_rows: int = 2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that must be in the checkpoint; `packed` says that it is a linear weight, the quantizer's to pack.

    One of three dimensions has a weight for each expert: [experts, out_features, in_features]. `transposed` says of
    experts' weights that they are stored as [..., in_features, out_features].
    `embedding` says that rows of it are looked up by token, and that it multiplies where the head is tied to it.
    `fp32` says that it is held in float32 whatever the compute dtype.
    """

    name: str
    shape: tuple[int, ...]
    packed: bool = False
    fp32: bool = False
    embedding: bool = False
    transposed: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[..., out_features, in_features], whichever way it is stored."""
        *experts, rows, columns = self.shape
        return (*experts, columns, rows) if self.transposed else self.shape


class Weights(Protocol):
    """Where an architecture gets its tensors from while it builds: read, checked, packed and placed one by one.

    What is given may be held, and given to other stacks of the same layers as well: an architecture never changes it
    in place, and asks for a layer's tensors in the same way whatever the range that it builds.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""

    @property
    def device(self) -> torch.device: ...

    def tensor(self, name: str) -> Tensor:
        """The named tensor on the stage's device in the compute dtype, or in float32 where its spec says so."""

    def linear(self, *modules: str) -> Linear:
        """The packed weight (and bias, where one is declared) of `modules`, fused along the output dimension."""

    def experts(self, *weights: Sequence[str], bias: str | Sequence[str] | None = None) -> GroupedLinear:
        """The packed weights of experts, each fused of `weights` along the output dimension.

        Each of `weights` names one tensor for every expert, in order, or one tensor that has them all. `bias` names a
        tensor [experts, out_features], or several that are fused likewise.
        """

    def embedding(self, name: str) -> Embedding:
        """The named embedding, packed where the quantizer can look up rows: it serves as a tied head as well."""

    def made(self, names: Sequence[str], make: Callable[[Mapping[str, Tensor]], T]) -> T:
        """What `make` makes of the named tensors, given as by `tensor`: for what takes as much memory as they do.

        It is held in place of them, and `make` is called once for all stacks: it depends on nothing but the tensors
        and the model's config.
        """


class SessionState(Protocol):
    """Something that an architecture keeps for a session."""

    @property
    def nbytes(self) -> int:
        """Bytes held; they count as the session's cache."""

    def prefix(self, length: int) -> Self:
        """The same for another session whose first `length` tokens are this one's, with memory of its own.

        Raises StageError where it can't be cut back to them.
        """


class BatchSegment(Protocol):
    """Consecutive rows of one session in a batch."""

    @property
    def rows(self) -> slice:
        """Where in the batch they are."""

    @property
    def start(self) -> int:
        """The position of the first one. What the session cached from there on is no longer true."""

    @property
    def state(self) -> dict[str, SessionState]:
        """What the architecture keeps for this session on this stage: it lives and dies with the session's cache."""


class Batch(Protocol):
    """The rows of one pass through a stage: segments of one or more sessions, with their KV caches."""

    @property
    def segments(self) -> Sequence[BatchSegment]:
        """For an architecture that has caches of its own. Others use `attend`."""

    @property
    def positions(self) -> Tensor:
        """int64 [rows]: each row's position in its own session."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Appends k and v to the sessions' caches of `layer`, and returns causal attention over them.

        A layer has the same `window` each time: what slid out of it is forgotten.

        q: [rows, heads, head_dim]; k, v: [rows, kv_heads, head_dim]; returns [rows, heads, head_dim]. Each row attends
        to the last `window` positions up to its own, or to all of them. `softcap` bounds the scaled products of q and
        k: softcap * tanh(product / softcap). `sinks` [heads] are scores of one more position each, whose value is 0.
        """

    def extend(self, layer: int, k: Tensor, v: Tensor, window: int | None = None) -> Sequence[tuple[Tensor, Tensor]]:
        """Appends k and v to the sessions' caches of `layer`; returns what each segment's rows may attend to.

        For attention of another kind. k and v: [rows, kv_heads, width], each of a width of its own, together
        `CacheSize.token_values` a row; returned for each segment: [kv_heads, tokens, width], up to its end, from the
        first token that its first row sees within `window`, or (None) from the session's first.
        """

    def part(self, rows: Sequence[slice]) -> Batch:
        """A batch of these rows alone, in this order: each slice is of one segment, and is a segment there."""


class LayerStack(Protocol):
    """A loaded layer range."""

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        """[rows, hidden_size] in, the same shape and dtype out: the residual stream after the range's last layer."""


class PiecewiseLayer(Protocol):
    """A layer in two pieces around attention, each a function of tensors alone: so they can be compiled."""

    def before(self, hidden: Tensor, encoded: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, hidden_size] -> q, k and v, as `Batch.attend` wants them. `encoded` is the layer's of `encode`."""

    def attend(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What `after` wants of attention: contiguous, [rows, any width]."""

    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The residual stream `hidden` [rows, hidden_size] after the layer, in memory of its own."""


@runtime_checkable
class PiecewiseStack(LayerStack, Protocol):
    """A loaded layer range that can be compiled: its layers one after another are all that it computes.

    They are alike: of one type, with tensors of the same shapes.
    """

    @property
    def layers(self) -> Sequence[PiecewiseLayer]: ...

    def encode(self, positions: Tensor) -> Sequence[Sequence[Tensor]]:
        """Each layer's position encoding of int64 [rows]: tensors [rows, ...]."""


class EmbedAndHead(Protocol):
    """The coordinator's share of a model: what comes before the first layer and after the last."""

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [rows] -> [rows, hidden_size] in the compute dtype."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> float32 [rows, vocab_size]: final norm and LM head."""


class Architecture(ABC):
    """A model family. Layers are numbered as in the whole model, everywhere; ranges are half-open."""

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    """The values of a config's `model_type` that this family reads."""

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether it takes a config whose `model_type` no architecture names; cheap, and never an error."""
        return False

    def read_model(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> ModelSpec:
        """What `read_config` gives. An architecture that goes by the checkpoint's `tensors` too looks at them here."""
        return self.read_config(config)

    @abstractmethod
    def read_config(self, config: Mapping[str, Any]) -> ModelSpec:
        """Raises ConfigError where the config asks for something that this family does not compute."""

    @abstractmethod
    def layer_tensors(self, spec: ModelSpec, layer: int) -> tuple[TensorSpec, ...]:
        """The tensors of one decoder layer, by their names in the checkpoint."""

    def layer_cache(self, spec: ModelSpec, layer: int) -> CacheSize:
        """What one decoder layer keeps for a session; unless a family says otherwise, `kv_width` values a token."""
        return CacheSize(spec.kv_width)

    @abstractmethod
    def non_layer_tensors(self, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Embedding, final norm and LM head (which a tied model does not have)."""

    @abstractmethod
    def build_layers(self, spec: ModelSpec, layers: range, weights: Weights) -> LayerStack:
        """Reads each tensor of `layers` once, in order, and returns the stack that computes them."""

    @abstractmethod
    def build_embed_and_head(self, spec: ModelSpec, weights: Weights) -> EmbedAndHead:
        """Reads the end tensors and returns the embedding and the head."""
