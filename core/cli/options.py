"""Options that several commands have: one wording each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from core.cli.console import DTypeOption
from core.errors import ConfigError
from core.interfaces.dtypes import KVDType

ModelName = Annotated[str, typer.Option(help="A Hugging Face repo id, a model directory, or a .gguf file.")]
Revision = Annotated[str | None, typer.Option(help="The repo's branch, tag or commit.")]
Quant = Annotated[
    str,
    typer.Option(
        help="How weights are packed (see `core plugins`). auto: as they are `stored` if they are quantized and can be"
        " kept so; if not, 4-bit files in int4, 8-bit in int8, others in fp16."
    ),
]
KeepHead = Annotated[bool, typer.Option("--keep-head", help="Leave embedding and head as they are, whatever --quant.")]
Compute = Annotated[
    DTypeOption,
    typer.Option(help="What layers compute in. auto: bf16, or fp16 if the model was published in it and it is faster."),
]
Wire = Annotated[
    DTypeOption, typer.Option(help="What hidden states travel in. auto: --dtype, but fp32 where fp16 could overflow.")
]
KV = Annotated[
    KVDType,
    typer.Option(help="What KV caches hold. auto: --dtype. int8: half of bf16's memory, at some loss and slower."),
]
TransportName = Annotated[str, typer.Option(help="How machines reach each other.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where downloaded models are kept.")]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the layers as they are loaded: for GPUs; on most CPUs it is slower.")
]
Device = Annotated[str, typer.Option(help="auto, cuda, cuda:0, mps or cpu.")]
StateDirectory = Annotated[
    Path | None,
    typer.Option(
        help="Where this machine's key and memberships are kept. Default: CORE_STATE_DIR, or the user's data directory."
    ),
]
Threads = Annotated[
    int | None, typer.Option(help="Compute threads. Default: physical cores less one.", min=1, max=1024)
]
ApiUrl = Annotated[str, typer.Option(help="Where the cluster's API answers.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


def bounds(min_nodes: int, max_nodes: int | None) -> None:
    """Raises ConfigError where no number of nodes is within both."""
    if max_nodes is not None and max_nodes < min_nodes:
        raise ConfigError(
            f"--max-nodes {max_nodes} is less than the {min_nodes} that are needed", "", "see --min-nodes"
        )


def one_of(given: Mapping[str, str | bool | None]) -> None:
    """Raises ConfigError where more than one of these options, each of which does something else, is given."""
    several = [name for name, value in given.items() if value]
    if len(several) > 1:
        raise ConfigError(f"{' and '.join(several)} can't be done at once", "", "give them one after the other")
