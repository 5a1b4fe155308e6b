"""Words from elsewhere neither steer a terminal nor forge a line of the log."""

from __future__ import annotations

import io
import logging

import pytest

from core.one_line import OneLineFormatter, one_line

FORGED = "x\n10:00:00 INFO    anna asks to join: if it shows 123 456 too"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        (FORGED, FORGED.replace("\n", r"\n")),
        ("a\u202eb\u2028c\x85d", r"a\u202eb\u2028c\x85d"),
        ("Grüße, 世界 🙂", "Grüße, 世界 🙂"),
    ],
)
def test_what_is_unsafe_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_a_record_is_a_line_and_its_traceback_can_not_be_taken_for_one() -> None:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(OneLineFormatter("INFO %(message)s"))
    log = logging.Logger("strangers")
    log.addHandler(handler)
    log.warning("the peer said %s", FORGED)
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("it failed")
    records = [line for line in said.getvalue().splitlines() if line.startswith("INFO")]
    assert records == ["INFO the peer said " + one_line(FORGED), "INFO it failed"]
    assert all(line.startswith(("INFO", "  | ")) for line in said.getvalue().splitlines())
