"""A whole model in this process, timed: its prefill, its decode, and where a decoded token's time goes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, autograd

from core.errors import ConfigError
from core.runtime.compiled import Opaque, compile_stage
from core.runtime.device import free_memory, synchronize, torch_dtype
from core.runtime.layer_cache import capacity
from core.runtime.model import Model, Precision
from core.runtime.sampling import Sampler, choose, require_finite
from core.runtime.sampling_params import SamplingParams

KINDS: dict[str, tuple[str, ...]] = {
    "linear": (
        "linear",
        "mm",
        "addmm",
        "matmul",
        "bmm",
        "baddbmm",
        "mkldnn::_linear",
        "_weight_int",
        "_int_mm",
        "embedding",
    ),
    "attention": ("scaled_dot_product", "_scaled_dot_product", "_flash_attention", "_efficient_attention", "_softmax"),
    "norm": ("rms_norm", "_fused_rms_norm", "native_layer_norm", "rsqrt", "pow", "mean"),
    "rope": ("cos", "sin", "cat", "addcmul"),
    "activation": ("silu", "gelu", "tanh", "sigmoid", "relu"),
}
"""What begins the names of the torch operators of each kind; those that several kinds use are "other"."""


class _Rows(NamedTuple):
    session: int
    position: int
    rows: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds for the prompt and its first token, and for the tokens after it."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class OpKind:
    """Seconds of compute per token, and its most costly operators with theirs."""

    name: str
    seconds: float
    operators: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """Where a decoded token's time goes, in seconds: medians.

    `layers` is all that a stage takes; the rest of it beyond `kinds` is Python and torch's dispatch.
    """

    embed: float
    layers: float
    head: float
    sampling: float
    kinds: tuple[OpKind, ...]

    @property
    def dispatch(self) -> float:
        return max(0.0, self.layers - sum(kind.seconds for kind in self.kinds))


class WholeModel:
    """All of a model's layers and ends on one device, with one greedy session."""

    def __init__(self, model: Model, precision: Precision, device: torch.device, *, compiles: bool = False) -> None:
        self._embed_and_head = model.load_embed_and_head(precision, device)
        layers = replace(precision, quantizer=Opaque(precision.quantizer)) if compiles else precision
        self._stage, _ = model.load_stage(range(model.spec.layers), layers, device)
        if compiles:
            compile_stage(self._stage, model.spec.hidden_size, torch_dtype(precision.compute))
        self._device = device
        self._sampler = Sampler(SamplingParams(temperature=0))

    def measure(self, prompt: Sequence[int], tokens: int) -> Round:
        """Decodes `tokens` tokens after the one that follows the prompt."""
        started = time.perf_counter()
        token = self.step(prompt, 0)
        first = time.perf_counter()
        for position in range(len(prompt), len(prompt) + tokens):
            token = self.step([token], position)
        return Round(first - started, time.perf_counter() - first)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int], position: int, lap: Callable[[str], None] = lambda _: None) -> int:
        """The token after `tokens`, the first of which is at `position`. `lap` hears of each part that is done."""
        hidden = self._embed(tokens)
        lap("embed")
        hidden = self._run(hidden, position)
        lap("layers")
        logits = self._embed_and_head.logits(hidden)[-1:]
        lap("head")
        require_finite(logits)
        [token] = choose(logits, [self._sampler], [position])
        lap("sampling")
        return token

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], position: int) -> Tensor:
        """float32 [1, vocab_size] after the last of `tokens`, the first of which is at `position`."""
        return self._embed_and_head.logits(self._run(self._embed(tokens), position))

    def profile(self, prompt: Sequence[int], tokens: int) -> Profile:
        """Of the first `tokens` tokens after the prompt. Raises ConfigError where torch can't profile the device."""
        if self._device.type not in ("cpu", "cuda"):
            raise ConfigError(f"--profile can't be had on {self._device}", "torch profiles only CPUs and CUDA devices")
        token, times = self.step(prompt, 0), _Laps(self._device)
        for position in range(len(prompt), len(prompt) + tokens):
            times.begin()
            token = self.step([token], position, times)
        return Profile(**times.medians(), kinds=self._op_kinds(token, len(prompt), tokens))

    @torch.inference_mode()
    def _op_kinds(self, token: int, position: int, repeats: int) -> tuple[OpKind, ...]:
        hidden, host = self._embed([token]), self._device.type == "cpu"
        with autograd.profiler.profile(use_kineto=not host, use_device=None if host else "cuda") as recorded:
            for _ in range(repeats):
                self._run(hidden, position)
            synchronize(self._device)
        seconds: Counter[str] = Counter()
        for event in recorded.key_averages():
            spent = event.self_cpu_time_total if host else event.self_device_time_total
            seconds[event.key.removeprefix("aten::")] += spent / 1e6 / repeats
        return _by_kind(seconds)

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        return self._embed_and_head.embed(torch.tensor(tokens, dtype=torch.int64, device=self._device))

    def _run(self, hidden: Tensor, position: int) -> Tensor:
        return self._stage.run(hidden, [_Rows(1, position, len(hidden), 1)], outputs_only=True)


class _Laps:
    """Seconds between calls, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = 0.0
        self._times: dict[str, list[float]] = {}

    def begin(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        synchronize(self._device)
        self._times.setdefault(name, []).append(time.perf_counter() - self._last)
        self.begin()

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self._times.items()}


def _by_kind(seconds: Counter[str]) -> tuple[OpKind, ...]:
    sorted_out: dict[str, list[tuple[str, float]]] = {kind: [] for kind in (*KINDS, "other")}
    for name, spent in seconds.most_common():
        sorted_out[kind_of(name)].append((name, spent))
    return tuple(
        OpKind(kind, sum(spent for _, spent in operators), tuple(operators[:4]))
        for kind, operators in sorted_out.items()
    )


def kind_of(operator: str) -> str:
    """A torch operator's kind, by its name without namespace."""
    return next((kind for kind, names in KINDS.items() if operator.startswith(names)), "other")


def made_up_prompt(model: Model, length: int, tokens: int) -> list[int]:
    """`length` token ids. Raises ConfigError where they and `tokens` more are longer than the model's context."""
    if length + tokens > model.spec.context_length:
        raise ConfigError(
            f"{length} tokens of prompt and {tokens} more don't fit the model's context",
            f"it ends at {model.spec.context_length}",
        )
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.spec.vocab_size, (length,), generator=generator).tolist()


def refuse_too_large(model: Model, precision: Precision, device: torch.device, tokens: int) -> None:
    """Raises ConfigError where the model with `tokens` tokens of KV cache takes more than the device has free."""
    layers = range(model.spec.layers)
    needed = model.embed_and_head_bytes(precision) + model.session_cost(layers, precision)(capacity(tokens))
    needed += sum(model.layer_bytes(layer, precision) for layer in layers)
    free = free_memory(device)
    if needed > free:
        raise ConfigError(
            f"the whole model does not fit {device}",
            f"it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            "pack its weights with --quant, or split it over machines with `core serve`",
        )
