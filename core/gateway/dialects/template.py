"""What a model's chat template says of the model."""

from __future__ import annotations

import re
from functools import lru_cache

from core.gateway.dialects.forms import HERMES, Form, ToolSettings
from core.gateway.dialects.thinking import CLOSE, OPEN

_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_CODE = re.compile(rf"\{{[%{{]((?:{_QUOTED}|[^'\"])*?)[%}}]\}}", re.DOTALL)
_STRINGS = re.compile(_QUOTED, re.DOTALL)
_OWN = ToolSettings()
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


@lru_cache(4)
def template_of(source: str | None, tools: ToolSettings = _OWN) -> Template:
    """Reading one takes milliseconds; a server has one model."""
    return Template(source, tools)


class Template:
    """Read off the Jinja source, which is not run: `form` is that of tool calls, where there is one that we know.

    `thinks` says that the model may write thoughts before its answer, `tools_as_text` that tools are told as text.
    """

    def __init__(self, source: str | None, tools: ToolSettings = _OWN) -> None:
        source = source or ""
        code = " ".join(_STRINGS.sub("''", block) for block in _CODE.findall(source))
        self._names = frozenset(_NAME.findall(code))
        self.tools_as_text = tools.as_text and not self.knows("tools")
        self.form: Form | None = HERMES if self.tools_as_text else tools.form(source)
        self.thinks = OPEN in source or CLOSE in source

    @property
    def takes_tools(self) -> bool:
        """Whether a model can be told of functions, and its calls be read."""
        return self.form is not None and (self.tools_as_text or self.knows("tools"))

    def knows(self, variable: str) -> bool:
        """Whether the template looks at `variable`."""
        return variable in self._names
