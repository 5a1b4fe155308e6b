"""What nodes compute, held against what this machine computes (core.parity)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from core.parity import Results, difference, run_layer, run_operations
from core.runtime.device import free_memory
from core.runtime.model import Model, Precision

_log = logging.getLogger(__name__)


class ParityCheck:
    """Each of its own results is computed once. At most one layer's weights are held, while it computes."""

    def __init__(self, model: Model, precision: Precision, device: torch.device) -> None:
        self._model = model
        self._precision = precision
        self._device = device
        self._operations: Results = {}
        self._layers: dict[int, Results] = {}
        self._chosen: dict[range, int | None] = {}

    def layer_of(self, layers: range) -> int | None:
        """The layer that who holds `layers` is to compute: one whose files are on this machine, which needs no others.

        None, and the log says so, where there is none, or where this machine has no room for it. Decided once: a node
        keeps its weights only for the same layer.
        """
        if layers not in self._chosen:
            self._chosen[layers] = self._choose(layers)
        return self._chosen[layers]

    def _choose(self, layers: range) -> int | None:
        checkpoint = self._model.checkpoint
        for layer in layers:
            files = {checkpoint.tensors[name].file for name in self._model.layer_tensor_names(range(layer, layer + 1))}
            if all(checkpoint.path(file) for file in files):
                break
        else:
            _log.info("layers [%d, %d) are not compared: their files are not here", layers.start, layers.stop)
            return None
        need = 2 * self._model.layer_bytes(layer, self._precision)
        if need > free_memory(self._device):
            _log.info("layer %d is not compared: %.1f GB are not free on %s", layer, need / 1e9, self._device)
            return None
        return layer

    def prepare(self, layer: int | None) -> Results:
        """The results that a node is to have. In the compute thread."""
        if not self._operations:
            self._operations = run_operations(self._precision, self._device)
        if layer is None:
            return self._operations
        if layer not in self._layers:
            self._layers[layer] = run_layer(self._model, layer, self._precision, self._device)
        return self._operations | self._layers[layer]

    def difference(self, given: Mapping[str, bytes], layer: int | None) -> str:
        """Which result a node has not, and how far it is off; empty where all are as they should be.

        In the compute thread.
        """
        return difference(given, self.prepare(layer), self._precision.compute)
