"""The architecture `glm4_moe`: GLM-4.5, GLM-4.5-Air, GLM-4.6 and others of the same shape."""

from core import Architecture, hookimpl


@hookimpl
def core_architectures() -> list[type[Architecture]]:
    from core_plugin_glm4_moe.glm4_moe import Glm4Moe

    return [Glm4Moe]
