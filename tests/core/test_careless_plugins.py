"""A plugin's mistakes are named: which plugin, which call, what it gave, what it should have given."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from core import (
    Architecture,
    Checkpoint,
    CheckpointFormat,
    DType,
    FileInfo,
    Planner,
    Quantizer,
    Source,
    StoredForm,
    StoredWeight,
    TensorInfo,
    Values,
)
from core import hookimpl as hook
from core.blocks import DecoderArchitecture, DecoderShape, PlainLinear
from core.errors import ConfigError, PlanError, PluginError
from core.plugins import PluginHost

CPU = torch.device("cpu")


def host_with(**hooks: type) -> PluginHost:
    """With one plugin named "careless", of one class for each hook."""
    host = PluginHost()
    host.register(SimpleNamespace(**{name: hook(lambda cls=cls: [cls]) for name, cls in hooks.items()}), "careless")
    return host


def mistake(call: Callable[[], Any]) -> str:
    with pytest.raises(PluginError) as caught:
        call()
    assert caught.value.title == "the plugin 'careless' of unpackaged failed"
    return caught.value.message


class Quiet(Quantizer):
    """As careful as can be: what the careless begin with."""

    name = "quiet"

    def packed_bytes(self, shape: tuple[int, int], dtype: DType) -> int:
        return math.prod(shape) * 4

    def pack(self, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Any:
        return Packed(weight.float())


class Packed:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Any:
        return x @ self.weight.to(x.dtype).T


def packing(result: Callable[[Tensor], Any], **more: Any) -> type[Quantizer]:
    def pack(self: object, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Any:
        return result(weight)

    return type("Careless", (Quiet,), {"pack": pack, **more})


class Failing(Packed):
    def __call__(self, x: Tensor) -> Any:
        return x @ self.weight


class Transposed(Packed):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x).T


class Wide(Packed):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x).double()


class Silent(Packed):
    def __call__(self, x: Tensor) -> Any:
        return None


class OneRow(Packed):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x[:1])


def half_as_much(weight: Tensor) -> Packed:
    packed = Packed(weight)
    packed.nbytes = weight.nbytes // 2
    return packed


def raising(weight: Tensor) -> Packed:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("careless", "said"),
    [
        (packing(raising), "raised ZeroDivisionError: division by zero"),
        (packing(lambda weight: None), "gave None, and it must give what multiplies, and has an int `nbytes`"),
        (packing(lambda weight: weight), "gave float32 [8, 16], and it must give what multiplies"),
        (
            packing(half_as_much),
            "gave what holds 256 bytes, and it must give what holds the 512 that packed_bytes",
        ),
        (packing(Failing), "gave what, given float32 [1, 16], raised RuntimeError: mat1 and mat2 shapes"),
        (packing(Transposed), "gave what makes float32 [8, 1] of float32 [1, 16], and it must give what makes float32"),
        (packing(OneRow), "gave what makes float32 [1, 8] of float32 [2, 16]"),
        (packing(Wide), "gave what makes float64 [1, 8] of float32 [1, 16]"),
        (packing(Silent), "gave what makes None of float32 [1, 16]"),
    ],
)
def test_what_a_quantizer_packs_is_tried(careless: type[Quantizer], said: str) -> None:
    quantizer = host_with(core_quantizers=careless).quantizers.get("quiet")
    message = mistake(lambda: quantizer.pack(torch.ones(8, 16), None, dtype=torch.float32, device=CPU))
    assert message.startswith(f"pack(float32 [8, 16], None) of its quantizer 'quiet' {said}")


def test_a_careful_quantizer_is_left_in_peace() -> None:
    quantizer = host_with(core_quantizers=Quiet).quantizers.get("quiet")
    for bias in (None, torch.ones(8)):
        packed = quantizer.pack(torch.ones(8, 16), bias, dtype=torch.bfloat16, device=CPU)
        assert packed(torch.ones(3, 16)).shape == (3, 8)


@pytest.mark.parametrize("given", [12.5, "12", None, -1, True])
def test_a_size_that_is_no_number_of_bytes_is_refused(given: object) -> None:
    careless = packing(Packed, packed_bytes=lambda self, shape, dtype: given)
    quantizer = host_with(core_quantizers=careless).quantizers.get("quiet")
    message = mistake(lambda: quantizer.packed_bytes((8, 16), DType.FP32))
    assert message == (
        f"packed_bytes((8, 16), fp32) of its quantizer 'quiet' gave {given!r}, and it must give a whole number of bytes"
    )


def test_a_refusal_in_words_and_a_lack_of_memory_are_no_mistakes() -> None:
    for error in (ConfigError("rows of 7 can't be packed"), MemoryError()):

        def refuse(*_: object, error: Exception = error) -> int:
            raise error

        quantizer = host_with(core_quantizers=packing(Packed, packed_bytes=refuse)).quantizers.get("quiet")
        with pytest.raises(type(error)):
            quantizer.packed_bytes((8, 16), DType.FP32)


def test_embeddings_that_look_up_no_rows_are_refused() -> None:
    quantizer = host_with(core_quantizers=packing(Packed, packs_embeddings=True)).quantizers.get("quiet")
    message = mistake(lambda: quantizer.pack_embedding(torch.ones(8, 16), dtype=torch.float32, device=CPU))
    assert "gave a Packed, and it must give what looks up `rows` too" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"packed_bytes": lambda self, shape: 0},
            "Careless.packed_bytes can't be called: too many positional",
        ),
        ({"pack": lambda self, weight, bias, dtype: 0}, "it must take (weight, bias, dtype=..., device=...)"),
        ({"compute": "bf16"}, "the compute of Careless is 'bf16': it must be a DType of core's, or None"),
        ({"packs_embeddings": 1}, "the packs_embeddings of Careless is 1"),
        ({"name": "auto"}, "the name of Careless is 'auto': it must be another one"),
    ],
)
def test_a_quantizer_that_can_be_seen_to_be_wrong_is_set_aside(changes: dict[str, Any], said: str) -> None:
    (broken,) = host_with(core_quantizers=packing(Packed, **changes)).broken
    assert said in broken.cause


class Family(DecoderArchitecture):
    name = "family"
    model_types = ("family",)

    def shape(self, config: Any) -> DecoderShape:
        return DecoderShape(16, 32, heads=2, kv_heads=1, head_dim=8, norm_eps=1e-6)


CONFIG = {"num_hidden_layers": 2, "vocab_size": 24, "max_position_embeddings": 64, "tie_word_embeddings": True}


class Given:
    """Weights of any shape, whatever is asked for."""

    dtype, device = torch.float32, CPU

    def embedding(self, name: str) -> PlainLinear:
        return PlainLinear(torch.ones(24, 16), None)

    def tensor(self, name: str) -> Tensor:
        return torch.ones(16)


class Halves:
    def embed(self, tokens: Tensor) -> Tensor:
        return torch.ones(len(tokens), 16)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.ones(len(hidden), 24).half()


@pytest.mark.parametrize(
    ("method", "given", "args", "said"),
    [
        ("read_config", None, (CONFIG,), "read_config(a dict) of its architecture 'family' gave None"),
        ("layer_tensors", ["a.weight"], ("spec", 0), "gave ['a.weight'], and it must give a tuple of TensorSpecs"),
        ("build_layers", None, ("spec", range(2), Given()), "gave None, and it must give what computes the layers"),
        ("recognises", "yes", (CONFIG,), "gave 'yes', and it must give True or False"),
        (
            "build_embed_and_head",
            Halves(),
            (SimpleNamespace(hidden_size=16, vocab_size=24), Given()),
            "gave what makes float16 [2, 24] of 2 tokens, and it must give what embeds 16 values in the compute dtype, "
            "and makes 24 logits in float32",
        ),
        (
            "build_embed_and_head",
            object(),
            (SimpleNamespace(hidden_size=16, vocab_size=24), Given()),
            "gave what raised AttributeError: 'object' object has no attribute 'embed'",
        ),
    ],
)
def test_what_an_architecture_gives_is_looked_at(method: str, given: Any, args: tuple[Any, ...], said: str) -> None:
    careless = type("Careless", (Family,), {method: lambda self, *_: given})
    architecture = host_with(core_architectures=careless).architectures.get("family")
    assert said in mistake(lambda: getattr(architecture, method)(*args))


def test_an_architecture_that_fails_to_build_is_named() -> None:
    def build(self: object, *_: object) -> Any:
        raise RuntimeError("shape '[3]' is invalid")

    careless = type("Careless", (Family,), {"build_layers": build})
    architecture = host_with(core_architectures=careless).architectures.get("family")
    message = mistake(lambda: architecture.build_layers(cast(Any, "spec"), range(2), cast(Any, Given())))
    assert message.startswith(
        "build_layers('spec', range(0, 2), a Given) of its architecture 'family' raised RuntimeError"
    )


def test_a_careful_architecture_is_left_in_peace() -> None:
    architecture = host_with(core_architectures=Family).architectures.get("family")
    spec = architecture.read_config(CONFIG)
    head = architecture.build_embed_and_head(spec, cast(Any, Given()))
    assert head.logits(head.embed(torch.tensor([1]))).shape == (1, 24)


class Opened(Checkpoint):
    def __init__(self, given: object = None) -> None:
        self.config, self.generation_config = {}, {}
        self.tensors = {"w": TensorInfo((2, 3), "F32", 24, "file", 0)}
        self.given = given

    def files(self) -> Any:
        return {"file": FileInfo(24)}

    def path(self, file: str) -> Path | None:
        return None

    def fetch(self, names: Any, progress: Any = None) -> None:
        return

    def read(self, name: str) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def tokenizer(self) -> Any:
        return self.given

    def close(self) -> None:
        return


class Format(CheckpointFormat):
    name = "format"
    opened: Any = Opened()

    def recognises(self, source: Source) -> bool:
        return True

    def open(self, source: Source) -> Checkpoint:
        opened: Checkpoint = self.opened
        return opened


def opening(opened: Any, **more: Any) -> PluginHost:
    return host_with(core_checkpoint_formats=type("Careless", (Format,), {"opened": opened, **more}))


def test_a_format_that_opens_no_checkpoint_is_named() -> None:
    untold = Opened()
    untold.tensors = {"w": (2, 3)}  # type: ignore[dict-item]
    for opened, said in (
        ("a path", "gave 'a path', and it must give a Checkpoint"),
        (untold, "gave a Checkpoint with (2, 3) for the tensor 'w', and it must give a TensorInfo there"),
    ):
        assert said in mistake(lambda opened=opened: opening(opened).open_checkpoint(Source("model")))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "read('w') of its checkpoint format 'format' gave None, and it must give one of shape [2, 3]"),
        (torch.ones(3, 2), "gave float32 [3, 2], and it must give one of shape [2, 3], as its index says,"),
        (torch.ones(2, 3).int(), "gave int32 [2, 3]"),
        (KeyError("w"), "raised KeyError: 'w'"),
    ],
)
def test_what_a_checkpoint_reads_is_looked_at(given: object, said: str) -> None:
    checkpoint = opening(Opened(given)).open_checkpoint(Source("model"))
    assert said in mistake(lambda: checkpoint.read("w"))
    assert said in mistake(lambda: list(checkpoint.slices("w")))


class Planless(Planner):
    name = "planless"

    def plan(self, request: Any) -> Any:
        return request["nodes"]


def test_a_planner_that_fails_is_named_by_its_plugin() -> None:
    from core.coordinator.planning import planned

    planner = host_with(core_planners=Planless).planners.get("planless")
    with pytest.raises(PlanError, match=r"the plugin 'careless' of unpackaged failed.*raised TypeError"):
        planned(planner, cast(Any, "request"))


class Lonely(Architecture):
    name = "lonely"
    model_types = ("lonely",)
    read_config = layer_tensors = non_layer_tensors = build_layers = lambda *_: None  # type: ignore[assignment]

    def build_embed_and_head(self, spec: Any) -> Any:  # type: ignore[override]
        return None


def test_a_method_with_other_arguments_is_seen_before_it_is_called() -> None:
    (broken,) = host_with(core_architectures=Lonely).broken
    assert broken.cause == (
        "PluginError: Lonely.build_embed_and_head can't be called: "
        "too many positional arguments: it must take (spec, weights)"
    )


FORM = StoredForm(Values.INT4, columns=16)
STORED = StoredWeight(FORM, torch.zeros(8, 8, dtype=torch.uint8), torch.ones(8, 1))


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "gave None, and it must give what multiplies"),
        (
            Packed(torch.ones(8, 8)),
            "gave what holds 256 bytes, and it must give what holds the 512 that kept_bytes says",
        ),
    ],
)
def test_what_a_quantizer_keeps_is_what_it_said(kept: object, said: str) -> None:
    def keep(self: object, weight: StoredWeight, bias: Tensor | None, **how: Any) -> Any:
        return kept

    careless = packing(
        Packed, keep=keep, keeps=lambda self, form: "yes", kept_bytes=lambda self, shape, form, dtype: 512
    )
    quantizer = host_with(core_quantizers=careless).quantizers.get("quiet")
    assert "keeps(a StoredForm) of its quantizer 'quiet' gave 'yes'" in mistake(lambda: quantizer.keeps(FORM))
    assert said in mistake(lambda: quantizer.keep(STORED, None, dtype=torch.float32, device=CPU))
