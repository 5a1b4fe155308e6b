"""Words from elsewhere, shown on a terminal or in a log: they can neither steer it nor begin a line of their own."""

from __future__ import annotations

import logging
import re

UNSAFE = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""What a text from elsewhere must not have, as a class of `re`: control characters, those that separate lines, and
those that turn the direction of writing (Unicode's bidirectional controls)."""
_UNSAFE = re.compile(f"[{UNSAFE}]")


def one_line(text: str) -> str:
    """`text` with what is unsafe written as an escape, a newline as \\n for instance."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class OneLineFormatter(logging.Formatter):
    """Each record is a line; those of a traceback follow it, indented, so that none can be taken for a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        lines = super().formatException(ei).splitlines()  # type: ignore[arg-type]
        return "\n".join(f"  | {one_line(line)}" for line in lines)
