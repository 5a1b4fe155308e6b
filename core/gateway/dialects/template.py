"""What a model's chat template says of the model."""

from __future__ import annotations

import re
from functools import lru_cache

from core.gateway.dialects.forms import Form, form_of
from core.gateway.dialects.thinking import CLOSE, OPEN

_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_CODE = re.compile(rf"\{{[%{{]((?:{_QUOTED}|[^'\"])*?)[%}}]\}}", re.DOTALL)
_STRINGS = re.compile(_QUOTED, re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


@lru_cache(4)
def template_of(source: str | None) -> Template:
    """Reading one takes milliseconds; a server has one model."""
    return Template(source)


class Template:
    """Read off the Jinja source, which is not run: `form` is that of tool calls, where there is one that we know.

    `thinks` says that the model may write thoughts before its answer.
    """

    def __init__(self, source: str | None) -> None:
        source = source or ""
        code = " ".join(_STRINGS.sub("''", block) for block in _CODE.findall(source))
        self._names = frozenset(_NAME.findall(code))
        self.form: Form | None = form_of(source)
        self.thinks = OPEN in source or CLOSE in source

    def knows(self, variable: str) -> bool:
        """Whether the template looks at `variable`."""
        return variable in self._names
