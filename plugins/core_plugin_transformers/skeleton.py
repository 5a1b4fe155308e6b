"""A family's own model with only some of its weights: whatever it lacks is NaN.

Layers keep the numbers that they have in the whole model. The model's own forward runs over all of them, and those
that lie elsewhere pass their input on. A value that depends on anything that is not held is NaN, and the stage
refuses those: so a family whose layers need more of each other than the hidden state fails, and never answers wrong.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core import ConfigError

PROBED_ROWS = 3
REPLIES = 4
"""How many forms of a layer's result are tried: the hidden state alone, or first in a tuple of 1, 2 or 3."""

_DEFAULT_DTYPE = threading.Lock()
"""Held while transformers changes torch's default dtype, which is the whole process's, and changes it back; and while a
family's code computes, which may depend on it: one thread may build a stack while another runs one."""


class Absent(nn.Module):
    """A layer that lies elsewhere. `result` is what it hands on in place of its input; None hands on the input.

    What else the family's layers hand on is NaN.
    """

    def __init__(self, layer: nn.Module, reply: int) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer
        self.reply = reply
        self.result: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """What the model looks up in the layer that this one stands in for, which has no weights."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_argument(args, kwargs) if self.result is None else self.result
        if self.reply == 0:
            return hidden
        unknown = torch.full_like(hidden, torch.nan)
        return (hidden, unknown, unknown)[: self.reply]


def hidden_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


class Skeleton:
    """The model of `config` without any weights, as it would compute in `dtype`."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        with _DEFAULT_DTYPE, torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.model.requires_grad_(False)
        self.config: Any = self.model.config
        self.dtype = dtype
        self.stack_name, self.layers = _layers_of(self.model, int(self.config.num_hidden_layers))
        self.base: Any = self.model.get_submodule(self.stack_name.rpartition(".")[0])
        self._accepted = inspect.signature(self.base.forward).parameters
        self.cache_argument = next(
            (name for name in ("cache", "past_key_values", "cache_params") if name in self._accepted), None
        )

    @property
    def prefix(self) -> str:
        """What the names of the first layer's tensors start with, up to the layer's number."""
        return f"{self.stack_name}."

    def leave_out(self, layers: Collection[int], reply: int) -> list[Absent]:
        """What stands in the places of `layers`."""
        absent = [Absent(self.layers[layer], reply) for layer in layers]
        for layer, stand_in in zip(layers, absent, strict=True):
            self.layers[layer] = stand_in
        return absent

    def fill(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        """Puts `values` in their places, NaN (without taking memory) in all others, and computes the buffers."""
        for name, empty in self.model.state_dict(keep_vars=True).items():
            value = values.get(name)
            if value is None:
                value = _unheld(empty, device)
            elif value.shape != empty.shape:
                raise ConfigError(f"{name} has shape {list(value.shape)}", f"the model asks for {list(empty.shape)}")
            owner, _, leaf = name.rpartition(".")
            place = self.model.get_submodule(owner)
            if leaf in place._parameters:
                place._parameters[leaf] = value = nn.Parameter(value, requires_grad=False)
            else:
                place._buffers[leaf] = value
            value._is_hf_initialized = True  # type: ignore[attr-defined]
        self.model._move_missing_keys_from_meta_to_device(set(), {"": device}, None, None)
        self.model._initialize_missing_keys(False)

    def run(self, model: Any, embeds: Tensor, positions: Tensor, cache: Any = None, mask: Tensor | None = None) -> Any:
        """`model`, the whole one or its base, over `embeds` [sessions, rows, hidden_size] at `positions` [sessions,
        rows]. `mask` [sessions, tokens] leaves out what is 0."""
        arguments = {
            "position_ids": positions,
            "cache_position": positions.max(dim=0).values,
            "attention_mask": mask,
            "use_cache": cache is not None,
            str(self.cache_argument): cache,
        }
        accepted = {name: value for name, value in arguments.items() if name in self._accepted}
        with _DEFAULT_DTYPE:
            return model(inputs_embeds=embeds, **accepted)

    def nowhere(self, like: Tensor) -> Tensor:
        """Embeddings that nothing may depend on, of the shape and place of `like`."""
        return torch.full_like(like, torch.nan, dtype=self.dtype)


def probe(skeleton: Skeleton) -> tuple[int, set[str]]:
    """The form of a layer's result (see REPLIES), and the modules that run before the first layer.

    No layer runs, nothing is held. Consumes the skeleton: all of its layers are left out.
    """
    outside = [name for name, module in skeleton.model.named_modules() if _is_outside(skeleton, name, module)]
    absent = skeleton.leave_out(range(len(skeleton.layers)), 0)
    cpu = torch.device("cpu")
    skeleton.fill({}, cpu)
    before, reached = _watch(skeleton, outside)
    width = skeleton.model.get_input_embeddings().weight.shape[1]
    failures = []
    for reply in range(REPLIES):
        for layer in absent:
            layer.reply = reply
        before.clear()
        reached.clear()
        try:
            with torch.inference_mode():
                ran = skeleton.run(
                    skeleton.base,
                    torch.zeros(1, PROBED_ROWS, width, dtype=skeleton.dtype),
                    torch.arange(PROBED_ROWS)[None],
                )
            if ran[0].shape == (1, PROBED_ROWS, width):
                return reply, before
        # The family's own code meets results of a form that it may not expect.
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    kind = skeleton.config.model_type
    raise ConfigError(f"{kind} can't be split: its model can't be run without its layers", "; ".join(failures[:1]))


def _watch(skeleton: Skeleton, outside: list[str]) -> tuple[set[str], set[int]]:
    """What fills while the skeleton runs: modules of `outside` that ran before the first layer; layers."""
    before: set[str] = set()
    reached: set[int] = set()

    def note(name: str) -> Any:
        def hook(*_: Any) -> None:
            if not reached:
                before.add(name)

        return hook

    for name in outside:
        skeleton.model.get_submodule(name).register_forward_pre_hook(note(name))
    skeleton.layers[0].register_forward_pre_hook(lambda *_: reached.add(0))
    return before, reached


def _is_outside(skeleton: Skeleton, name: str, module: nn.Module) -> bool:
    held = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    return held and not name.startswith(skeleton.prefix)


def _layers_of(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers: of the lists that are as long as the model is deep, that with the most weights."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of {count} layers that could be split")
    return max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))


def _unheld(empty: Tensor, device: torch.device) -> Tensor:
    value = torch.nan if empty.is_floating_point() else 0
    return torch.full((), value, dtype=empty.dtype, device=device).expand(empty.shape)
