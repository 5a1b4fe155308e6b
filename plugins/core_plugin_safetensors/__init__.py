"""Checkpoints of safetensors: a directory, or a repository of the Hugging Face hub."""

from core import CheckpointFormat, hookimpl


@hookimpl
def core_checkpoint_formats() -> list[type[CheckpointFormat]]:
    from core_plugin_safetensors.checkpoint import SafetensorsFormat

    return [SafetensorsFormat]
