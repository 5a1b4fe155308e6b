"""What the coordinator itself holds of a model: embedding and head, tokenizer, and what nodes prove their copies by."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from core.coordinator.head import Head
from core.coordinator.settings import CoordinatorSettings
from core.errors import ConfigError, DamagedFile
from core.interfaces.architecture import EmbedAndHead
from core.interfaces.checkpoint import Progress
from core.interfaces.quantizer import Quantizer
from core.parity import fixed_values
from core.plugins import Registry
from core.protocol.fields import Holding, Span
from core.runtime.device import free_memory, torch_dtype
from core.runtime.manifest import NOTHING, Difference, Manifest, Prover, other_file, stated_proof
from core.runtime.model import Model, Precision
from core.runtime.precision_choice import choose_precision
from core.runtime.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class Note(Protocol):
    """Told, from any thread, what the coordinator is at, with bytes done and in all if there are any."""

    def __call__(self, phase: str, progress: tuple[int, int] | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    precision: Precision
    tokenizer: Tokenizer
    head: Head
    manifest: Manifest
    head_seconds: float = 0.0
    """What embedding and head take for one token."""

    @property
    def held_as(self) -> Holding:
        """All its layers, as nodes hold them."""
        digest, layers = bytes.fromhex(self.manifest.digest), Span(0, self.model.spec.layers)
        return Holding(digest, self.precision.quantizer.name, self.precision.compute, [layers])


def load_model(
    model: Model, settings: CoordinatorSettings, quantizers: Registry[Quantizer], device: torch.device, note: Note
) -> LoadedModel:
    """In the compute thread. Raises ConfigError if the head does not fit into this machine, PluginError for a quantizer
    that fails."""
    checkpoint = model.checkpoint
    precision = choose_precision(
        model,
        quantizers,
        device,
        quant=settings.quant,
        dtype=settings.dtype,
        wire=settings.wire_dtype,
        keep_head=settings.keep_head,
        kv=settings.kv_dtype,
    )
    try_quantizer(model, precision, device)
    need, free = model.embed_and_head_bytes(precision), free_memory(device)
    if need > free:
        raise ConfigError(
            "the embedding and head do not fit into this machine",
            f"they take {need / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB free",
            "run the coordinator on a larger machine, or use a smaller model",
        )
    embed_and_head = load_embed_and_head(model, precision, device, note)
    note("loading the tokenizer")
    tokenizer = Tokenizer(checkpoint.tokenizer(), eos_token_ids=_eos_ids(model), chat_template=settings.chat_template)
    head = Head(embed_and_head, model.spec.hidden_size, device, torch_dtype(precision.wire), tokenizer)
    manifest = Manifest.of(model, _noting(note, "hashing the model's files"))
    return LoadedModel(model, precision, tokenizer, head, manifest, head.seconds())


def try_quantizer(model: Model, precision: Precision, device: torch.device) -> None:
    """Packs something as small as the layers have, before any node is asked to. Raises PluginError if that fails."""
    shape = model.smallest_linear()
    if shape is not None:
        dtype = torch_dtype(precision.compute)
        precision.quantizer.pack(fixed_values(*shape, seed=1), None, dtype=dtype, device=device)


def load_embed_and_head(model: Model, precision: Precision, device: torch.device, note: Note) -> EmbedAndHead:
    """Proven: by what a hub states of the files, and by what they were when they were hashed first.

    A damaged file that a hub has is set aside, and loaded once more from there. Raises DamagedFile if that is no help.
    """
    try:
        return _load_proven(model, precision, device, note)
    except DamagedFile as error:
        if not any([model.checkpoint.set_aside(file) for file in error.files]):
            raise
        _log.warning("%s; it is set aside and downloaded again", error)
        return _load_proven(model, precision, device, note)


def _load_proven(model: Model, precision: Precision, device: torch.device, note: Note) -> EmbedAndHead:
    names = model.embed_and_head_tensor_names()
    model.fetch_embed_and_head(_noting(note, "downloading embedding and head"))
    _refuse(other_file(model, (), stated_proof(model, names), _noting(note, "hashing the model's files")))
    with Prover(model, (), NOTHING, names) as prover:
        loading = _noting(note, "loading embedding and head")
        loaded = model.load_embed_and_head(precision, device, loading, prover.seen)
        _refuse(prover.difference())
    return loaded


def _refuse(difference: Difference | None) -> None:
    if difference is not None:
        damaged = " and ".join(difference.files)
        hint = "download it again"
        raise DamagedFile(f"{damaged} is damaged", difference.text, hint, files=difference.files)


def _noting(note: Note, phase: str) -> Progress:
    return lambda done, total: note(phase, (done, total))


def _eos_ids(model: Model) -> list[int]:
    """All that end a generation: of config.json and generation_config.json, each one id or a list."""
    ids: list[int] = []
    for config in (model.checkpoint.config, model.checkpoint.generation_config):
        value = config.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return ids
