"""Checkpoints in GGUF: a local file, or a file of a repository of the Hugging Face hub."""

from core import CheckpointFormat, hookimpl


@hookimpl
def core_checkpoint_formats() -> list[type[CheckpointFormat]]:
    from core_plugin_gguf.checkpoint import GgufFormat

    return [GgufFormat]
