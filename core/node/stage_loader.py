"""A shard -> its layers in memory, and a stage of them: opens the checkpoint, checks that it is the right model, reads
what is not held yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch

from core.errors import CheckpointError, CoreError, DamagedFile
from core.interfaces.checkpoint import Progress, Source
from core.interfaces.dtypes import DType, KVDType
from core.node.layer_keeper import LayerKeeper
from core.parity import as_bytes, run_layer, run_operations
from core.plugins import PluginHost
from core.protocol.fields import Shard
from core.runtime.compiled import Opaque, compile_stage, refuse_without_compiler
from core.runtime.device import torch_dtype
from core.runtime.held_layers import Parts, Variant
from core.runtime.layer_costs import LayerCost, layer_costs
from core.runtime.manifest import Difference, Proof, Prover, other_file, still_to_prove
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage

PROGRESS_SECONDS = 0.25
_log = logging.getLogger(__name__)
Seen = Callable[[str], None]
Told = dict[str, bytes]


class LoadAborted(CoreError):
    """The load was called off while it ran."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """`stage` is None where layers are held, or on disk, without one. `parity` is what core.parity computed.

    `costs` are those of the stage's layers, and `width` is how wide its rows are; `session_cost` is what a session's
    caches take, in bytes by tokens. `files` are those on this machine that the layers which were read are in; that took
    `reading` seconds.
    """

    weight_bytes: int
    read_bytes: int
    seconds: float
    parity: Told = field(default_factory=dict)
    stage: Stage | None = None
    costs: Sequence[LayerCost] = ()
    width: int = 0
    session_cost: Callable[[int], int] = lambda tokens: 0
    files: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    reading: float = 0.0


class StageLoader:
    """Loads in a thread: `report(phase, done, total)` is called from it, `abort()` may be called from outside.

    Layers that `keeper` holds of the very same model are not read again. What was read is held once all of it is
    proven. `load`, `hold` and `fetch` raise CoreError: not the coordinator's model, a damaged file, a dtype that the
    device lacks, no room, layers that can't be compiled.
    """

    def __init__(
        self,
        shard: Shard,
        plugins: PluginHost,
        device: torch.device,
        cache_dir: Path | None,
        keeper: LayerKeeper,
        report: Callable[[str, int, int], None],
        *,
        compiles: bool = False,
    ) -> None:
        self.layers = range(shard.layer_start, shard.layer_end)
        self.variant = Variant(shard.proof.manifest, shard.quant, shard.compute_dtype, compiles)
        self._shard = shard
        self._plugins = plugins
        self._device = device
        self._cache_dir = cache_dir
        self._keeper = keeper
        self._report = report
        self._compiles = compiles
        self._read_bytes = 0
        self._reading = 0.0
        self._files: Mapping[int, Sequence[Path]] = {}
        self._parity: Told = {}
        self._aborted = False
        self._deciding = threading.Lock()
        """Held while it is decided whether a load that ends was called off."""

    def abort(self) -> None:
        with self._deciding:
            self._aborted = True

    def load(self, wire_dtype: DType, kv_dtype: KVDType = KVDType.AUTO) -> Loaded:
        """A stage with caches of its own."""
        return self._repaired(lambda: self._load(replace(self._precision(wire_dtype), kv=kv_dtype)))

    def hold(self) -> Loaded:
        """The layers in memory, for a later stage."""
        return self._repaired(self._hold)

    def fetch(self) -> Loaded:
        """The files of all layers on this machine, proven to be the coordinator's."""
        return self._repaired(self._fetch)

    def _repaired(self, work: Callable[[], Loaded]) -> Loaded:
        """What `work` gives. A damaged file that a hub has is set aside, and downloaded once more from there."""
        try:
            return work()
        except DamagedFile as error:
            if not error.is_set_aside:
                raise
            _log.warning("%s; what is damaged is set aside and downloaded again", error)
            return work()

    def _load(self, precision: Precision) -> Loaded:
        started = time.monotonic()
        if self._compiles:
            refuse_without_compiler(self._device)
        with self._proven(precision) as (model, parts, seen):
            stage, _ = model.load_stage(self.layers, precision, self._device, self._progress("load"), seen, parts)
        if self._compiles:
            compile_stage(stage, model.spec.hidden_size, torch_dtype(precision.compute), self._progress("compile"))
        self._stop_if_aborted()
        costs = layer_costs(model, self.layers, precision, self._shard.quant)
        seconds = time.monotonic() - started
        width, session_cost = model.spec.hidden_size, model.session_cost(self.layers, precision)
        loaded = stage.nbytes, self._read_bytes, seconds, self._parity
        return Loaded(*loaded, stage, costs, width, session_cost, self._files, self._reading)

    def _hold(self) -> Loaded:
        started = time.monotonic()
        precision = self._precision(DType(self._shard.compute_dtype))
        with self._proven(precision) as (model, parts, seen):
            model.load_layers(self.layers, precision, self._device, self._progress("load"), seen, parts)
        nbytes = sum(part.nbytes for part in parts.values())
        seconds = time.monotonic() - started
        return Loaded(nbytes, self._read_bytes, seconds, self._parity, files=self._files, reading=self._reading)

    def _fetch(self) -> Loaded:
        started = time.monotonic()
        with self._opened(self._precision(DType(self._shard.compute_dtype))) as model:
            proof = self._brought(model, list(self.layers))
            names = model.layer_tensor_names(self.layers)
            sizes = [model.checkpoint.tensors[name].nbytes for name in names]
            progress = self._progress("verify")
            with Prover(model, self.layers, proof) as prover:
                for name, done in zip(names, accumulate(sizes), strict=True):
                    prover.seen(name)
                    progress(done, sum(sizes))
                self._refuse_other_copy(prover.difference())
            files = _files_of(model, self.layers)
        self._stop_if_aborted()
        return Loaded(0, 0, time.monotonic() - started, files=files)

    @contextmanager
    def _proven(self, precision: Precision) -> Iterator[tuple[Model, Parts, Seen]]:
        """The model, and the parts that are held of it; what the block reads is proven at its end, and held then."""
        held = self._keeper.held
        with self._opened(precision) as model:
            missing = self._missing()
            proof = self._brought(model, missing)
            self._keeper.make_room(sum(model.layer_bytes(layer, precision) for layer in missing))
            parts, began = held.parts(self.variant, self.layers), time.monotonic()
            with Prover(model, missing, proof) as prover:

                def seen(name: str) -> None:
                    self._read_bytes += model.checkpoint.tensors[name].nbytes
                    prover.seen(name)

                parity = self._computed(model, precision, seen, parts)
                yield model, parts, seen
                self._refuse_other_copy(prover.difference())
            self._reading, self._files = time.monotonic() - began, _files_of(model, missing)
            names = {layer: model.layer_tensor_names([layer]) for layer in missing}
            with self._deciding:
                self._stop_if_aborted()
                held.add(self.variant, parts, names, proof.layers)
                held.remember(self.variant, parity)
        self._parity = {name: told for results in parity.values() for name, told in results.items()}

    @contextmanager
    def _opened(self, precision: Precision) -> Iterator[Model]:
        source = Source(self._shard.model_id, self._shard.revision, self._cache_dir)
        with Model.open(source, self._plugins) as model:
            self._refuse_other_layers(model, precision)
            try:
                yield model
            except DamagedFile as error:
                error.is_set_aside = any([model.checkpoint.set_aside(file) for file in error.files])
                raise

    def _missing(self) -> list[int]:
        return self._keeper.held.missing(self.variant, self.layers)

    def _brought(self, model: Model, missing: list[int]) -> Proof:
        """Brings the files of the `missing` layers to this machine. What is to be proven of those layers still."""
        asked = self._shard.proof
        other = self._keeper.held.other_layer(self.variant, self.layers, asked.layers)
        if other is not None:
            self._refuse_other_copy(Difference(f"layer {other}, which it holds in memory, has other bytes", ()))
        if missing:
            model.fetch_stage(missing, self._progress("download"))
        given = Proof(asked.manifest, asked.files, asked.rests, asked.layers)
        proof = still_to_prove(model, self.layers, given, missing)
        self._refuse_other_copy(other_file(model, missing, proof, self._progress("verify")))
        return proof

    def _computed(self, model: Model, precision: Precision, seen: Seen, parts: Parts) -> dict[int | None, Told]:
        """What core.parity computes by operation, and of the layer that is asked for; as it is remembered.

        The one layer is computed before the others are held, so that it takes no room beside them.
        """
        held, layer = self._keeper.held, self._shard.parity_layer
        told: dict[int | None, Told] = {
            None: held.parity(self.variant, None) or as_bytes(run_operations(precision, self._device))
        }
        if layer is not None:
            told[layer] = held.parity(self.variant, layer) or as_bytes(
                run_layer(model, layer, precision, self._device, seen, parts)
            )
        return told

    def _precision(self, wire: DType) -> Precision:
        quantizer = self._plugins.quantizers.get(self._shard.quant)
        if self._compiles:
            quantizer = Opaque(quantizer)
        return Precision(quantizer, DType(self._shard.compute_dtype), wire)

    def _refuse_other_copy(self, difference: Difference | None) -> None:
        if difference is not None:
            raise DamagedFile(
                f"this machine's copy of {self._shard.model_id!r} is not the coordinator's model",
                difference.text,
                "download it again, or compare what `core manifest` says on both machines",
                files=difference.files,
            )

    def _refuse_other_layers(self, model: Model, precision: Precision) -> None:
        asked = self._shard
        if model.architecture.name != asked.architecture:
            self._refuse_other_copy(Difference(f"it is {model.architecture.name}, not {asked.architecture}", ()))
        if self.layers.stop > model.spec.layers:
            self._refuse_other_copy(Difference(f"it has {model.spec.layers} layers", ()))
        nbytes = sum(model.layer_bytes(layer, precision) for layer in self.layers)
        if nbytes != asked.weight_bytes:
            raise CheckpointError(
                f"this machine makes other layers of {asked.model_id!r} than the coordinator",
                f"they take {nbytes} bytes, not {asked.weight_bytes}",
                "give both machines the same revision of the model, and the same versions of core and its plugins",
            )

    def _stop_if_aborted(self) -> None:
        if self._aborted:
            raise LoadAborted("the load was called off")

    def _progress(self, phase: str) -> Progress:
        last = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal last
            self._stop_if_aborted()
            now = time.monotonic()
            if now - last >= PROGRESS_SECONDS or done >= total:
                last = now
                self._report(phase, done, total)

        return progress


def _files_of(model: Model, layers: Iterable[int]) -> dict[int, list[Path]]:
    """Where each layer's tensors are on this machine."""
    tensors, path = model.checkpoint.tensors, model.checkpoint.path
    by_layer = {layer: {tensors[name].file for name in model.layer_tensor_names([layer])} for layer in layers}
    return {layer: [found for file in sorted(files) if (found := path(file))] for layer, files in by_layer.items()}
