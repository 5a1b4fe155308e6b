"""What a model's chat template says of the model."""

from __future__ import annotations

from functools import lru_cache

from core.gateway.dialects.forms import HERMES, Form, ToolSettings
from core.gateway.dialects.thinking import CLOSE, OPEN
from core.interfaces.engine import ChatTemplate

_OWN = ToolSettings()


@lru_cache(4)
def template_of(template: ChatTemplate, tools: ToolSettings = _OWN) -> Template:
    """Reading one takes milliseconds; a server has one model."""
    return Template(template, tools)


class Template:
    """`form` is that of tool calls, if there is one that we know, as the template's source teaches it to the model.

    `thinks` says that the model may write thoughts before its answer, `tools_as_text` that tools are told as text.
    """

    def __init__(self, template: ChatTemplate, tools: ToolSettings = _OWN) -> None:
        self._variables = template.variables
        self.tools_as_text = tools.as_text and not self.knows("tools")
        self.form: Form | None = HERMES if self.tools_as_text else tools.form(template.source)
        self.thinks = OPEN in template.source or CLOSE in template.source

    @property
    def takes_tools(self) -> bool:
        """Whether a model can be told of functions, and its calls be read."""
        return self.form is not None and (self.tools_as_text or self.knows("tools"))

    def knows(self, variable: str) -> bool:
        """Whether the template looks at `variable`."""
        return variable in self._variables
