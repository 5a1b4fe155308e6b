"""An ASSIGNMENT -> a loaded stage: opens the checkpoint, checks that it is the right model, reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from core.errors import CheckpointError, CoreError
from core.interfaces.checkpoint import Progress, Source
from core.interfaces.dtypes import DType
from core.parity import as_bytes, run_layer, run_operations
from core.plugins import PluginHost
from core.protocol.messages import Assignment
from core.runtime.compiled import Opaque, compile_stage, refuse_without_compiler
from core.runtime.device import give_back_memory, torch_dtype
from core.runtime.manifest import Proof, Prover, other_file
from core.runtime.model import Model, Precision
from core.runtime.stage import Stage

PROGRESS_SECONDS = 0.25


class LoadAborted(CoreError):
    """The load was called off while it ran."""


@dataclass(frozen=True, slots=True)
class StageKey:
    """Two assignments with equal keys are served by the same loaded weights, which have proven the same manifest."""

    manifest: bytes
    quant: str
    compute_dtype: str
    wire_dtype: str
    layers: range
    parity_layer: int | None

    @classmethod
    def of(cls, assignment: Assignment) -> StageKey:
        return cls(
            assignment.proof.manifest,
            assignment.quant,
            assignment.compute_dtype,
            assignment.wire_dtype,
            range(assignment.layer_start, assignment.layer_end_exclusive),
            assignment.parity_layer,
        )


@dataclass(slots=True)
class Holdings:
    """Loaded weights outlive a connection, so that a coordinator that comes back need not wait for them.

    `parity` is what this machine computed when it loaded them.
    """

    key: StageKey | None = None
    stage: Stage | None = None
    parity: dict[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.stage.nbytes if self.stage is not None else 0

    def drop(self) -> None:
        """Lets go of the weights, and gives their memory back to the system: other programs may need it."""
        if self.stage is not None:
            device = self.stage.device
            self.key = self.stage = None
            give_back_memory(device)


@dataclass(frozen=True, slots=True)
class LoadedStage:
    stage: Stage
    read_bytes: int
    seconds: float
    parity: dict[str, bytes]


class StageLoader:
    """Loads in a thread: `report(phase, done, total)` is called from it, `abort()` may be called from outside."""

    def __init__(
        self,
        assignment: Assignment,
        plugins: PluginHost,
        device: torch.device,
        cache_dir: Path | None,
        report: Callable[[str, int, int], None],
        *,
        compiles: bool = False,
    ) -> None:
        self._assignment = assignment
        self._plugins = plugins
        self._device = device
        self._cache_dir = cache_dir
        self._report = report
        self._compiles = compiles
        self._aborted = False

    def abort(self) -> None:
        self._aborted = True

    def load(self, holdings: Holdings) -> LoadedStage:
        """What `holdings` has of the very same model is kept, with empty caches; anything else makes room first.

        Raises CoreError: not the coordinator's model, a damaged file, a dtype that the device lacks, layers that
        can't be compiled.
        """
        asked, started, key = self._assignment, time.monotonic(), StageKey.of(self._assignment)
        if holdings.key == key and holdings.stage is not None:
            holdings.stage.caches.clear_all()
            return LoadedStage(holdings.stage, 0, time.monotonic() - started, holdings.parity)
        holdings.drop()
        if self._compiles:
            refuse_without_compiler(self._device)
        with Model.open(Source(asked.model_id, asked.revision, self._cache_dir), self._plugins) as model:
            precision = self._precision()
            self._refuse_other_layers(model, key.layers, precision)
            stage, read_bytes, parity = self._read(model, key.layers, precision)
        self._stop_if_aborted()
        holdings.key, holdings.stage, holdings.parity = key, stage, parity
        return LoadedStage(stage, read_bytes, time.monotonic() - started, parity)

    def _precision(self) -> Precision:
        asked = self._assignment
        quantizer = self._plugins.quantizers.get(asked.quant)
        if self._compiles:
            quantizer = Opaque(quantizer)
        return Precision(quantizer, DType(asked.compute_dtype), DType(asked.wire_dtype))

    def _read(self, model: Model, layers: range, precision: Precision) -> tuple[Stage, int, dict[str, bytes]]:
        """The one layer is computed before the others are held, so that it takes no room beside them."""
        proof = self._proof()
        model.fetch_stage(layers, self._progress("download"))
        self._refuse_other_copy(other_file(model, layers, proof, self._progress("verify")))
        parity = self._parity(model, precision)
        with Prover(model, layers, proof) as prover:
            stage, read_bytes = model.load_stage(layers, precision, self._device, self._progress("load"), prover.seen)
            self._refuse_other_copy(prover.other_layer())
        if self._compiles:
            compile_stage(stage, model.spec.hidden_size, torch_dtype(precision.compute), self._progress("compile"))
        return stage, read_bytes, parity

    def _parity(self, model: Model, precision: Precision) -> dict[str, bytes]:
        layer = self._assignment.parity_layer
        results = run_operations(precision, self._device)
        if layer is not None:
            results |= run_layer(model, layer, precision, self._device)
        return as_bytes(results)

    def _proof(self) -> Proof:
        asked = self._assignment.proof
        return Proof(asked.manifest, asked.files, asked.rests, asked.layers)

    def _refuse_other_copy(self, difference: str) -> None:
        if difference:
            raise CheckpointError(
                f"this machine's copy of {self._assignment.model_id!r} is not the coordinator's model",
                difference,
                "download it again, or compare what `core manifest` says on both machines",
            )

    def _refuse_other_layers(self, model: Model, layers: range, precision: Precision) -> None:
        asked = self._assignment
        if model.architecture.name != asked.architecture:
            self._refuse_other_copy(f"it is {model.architecture.name}, not {asked.architecture}")
        if layers.stop > model.spec.layers:
            self._refuse_other_copy(f"it has {model.spec.layers} layers")
        nbytes = sum(model.layer_bytes(layer, precision) for layer in layers)
        if nbytes != asked.total_weight_bytes:
            raise CheckpointError(
                f"this machine makes other layers of {asked.model_id!r} than the coordinator",
                f"they take {nbytes} bytes, not {asked.total_weight_bytes}",
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
