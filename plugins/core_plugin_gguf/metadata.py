"""A GGUF file's metadata, asked for by the architecture's own keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from core import CheckpointError

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""How to draw from the model, as its makers advise: of llama.cpp's keys `general.sampling` those that core draws by."""


class Metadata:
    """Raises CheckpointError for what lacks."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self.file = file
        self.architecture = str(self._of_all("general.architecture"))

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._number(key, default)
        if not isinstance(value, int):
            raise CheckpointError(f"{self.file} says that its {key} is {value}", hint="convert the model again")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        return float(self._number(key, default))

    def get(self, key: str) -> Any:
        """What it says; a list whose values are all the same says that value."""
        value = self._values.get(f"{self.architecture}.{key}")
        return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value

    def sampling(self) -> dict[str, Any]:
        """The advice on how to draw that it has, in the words of generation_config.json."""
        said = {name: self._values.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
        return {name: value for name, value in said.items() if value is not None}

    @property
    def parts(self) -> int:
        """The number of files that the model is split into."""
        return int(self._values.get("split.count", 0)) or 1

    def _of_all(self, key: str) -> Any:
        if key not in self._values:
            raise CheckpointError(f"{self.file} does not say its {key}", hint="convert the model again")
        return self._values[key]

    def _number(self, key: str, default: float | None) -> int | float:
        value = self.get(key)
        if value is None:
            value = self._of_all(f"{self.architecture}.{key}") if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self.file} says that its {key} is {value}", hint="convert the model again")
        return value
