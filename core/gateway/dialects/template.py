"""What a model's chat template says of the model."""

from __future__ import annotations

from functools import lru_cache

from core.gateway.dialects.forms import Form, form_of
from core.gateway.dialects.thinking import CLOSE, OPEN
from core.interfaces.engine import ChatTemplate


@lru_cache(4)
def template_of(template: ChatTemplate) -> Template:
    """Reading one takes milliseconds; a server has one model."""
    return Template(template)


class Template:
    """`form` is that of tool calls, if there is one that we know, as the template's source teaches it to the model.

    `thinks` says that the model may write thoughts before its answer.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._variables = template.variables
        self.form: Form | None = form_of(template.source)
        self.thinks = OPEN in template.source or CLOSE in template.source

    def knows(self, variable: str) -> bool:
        """Whether the template looks at `variable`."""
        return variable in self._variables
