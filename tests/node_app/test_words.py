"""Every word of the app, without a screen."""

from __future__ import annotations

from core.node.state import Activity
from node_app.status import SEPARATOR, TOOLTIP_LENGTH, Action, Line, State, Status, headline, menu, sentence, tooltip
from node_app.status_text import Facts, status_of

READY = Status(
    State.READY, "desk", "Qwen/Qwen2.5-1.5B", range(0, 12), 1_234_000_000, tokens_today=1234, tokens_per_second=3.14159
)


def texts(status: Status, *, resumable: bool = False) -> list[str]:
    return [line.text for line in menu(status, resumable=resumable, at_login=False, version="1.2.3")]


def test_each_state_has_words_of_its_own() -> None:
    said = {headline(Status(state, cluster="desk")) for state in State}
    assert len(said) == len(State)


def test_progress_is_told_in_percent() -> None:
    assert headline(Status(State.DOWNLOADING, progress=(1, 3))) == "Downloading 33%"
    assert headline(Status(State.LOADING, progress=(9, 9))) == "Loading layers 100%"
    assert headline(Status(State.LOADING)) == "Loading layers"
    assert headline(Status(State.DOWNLOADING, progress=(0, 0))) == "Downloading"


def test_a_reason_follows_the_state() -> None:
    assert sentence(Status(State.PAUSED, reason="this machine runs on battery")) == (
        "Paused: this machine runs on battery"
    )


def test_a_host_that_is_off_is_said_in_one_line() -> None:
    status = status_of(Activity("unreachable", "no connection to 10.0.0.1:7001: it timed out"), Facts(cluster="desk"))
    assert sentence(status) == "Connecting: the host is off or out of reach, this machine keeps trying"


def test_the_code_for_the_host_is_shown_while_it_is_asked_alone() -> None:
    asking = status_of(Activity("asking", "tell the host", code="8D3K-22QX"), Facts(cluster="desk"))
    assert (asking.code, headline(asking)) == ("8D3K-22QX", "Waiting for the host's answer")
    paused = status_of(
        Activity("asking", "tell the host", code="8D3K-22QX"), Facts(cluster="desk", pause="by its user")
    )
    assert paused.code == ""


def test_the_code_that_a_host_asks_for_fits_the_menu() -> None:
    asks = Status(State.CONNECTING, "192.168.1.7:7001", reason="tell the host this code: 8D3K-22QX; it lets you in")
    assert "8D3K-22QX" in texts(asks)[0]


def test_the_tooltip_says_what_is_held_and_fits_windows() -> None:
    assert tooltip(READY) == "core · Ready · layers 0 to 11, 1.2 GB"
    long = tooltip(Status(State.ERROR, reason="x" * 500))
    assert len(long) == TOOLTIP_LENGTH
    assert long.endswith("...")


def test_the_menu_of_a_node_that_serves() -> None:
    assert texts(READY)[:5] == [
        "Ready",
        "Cluster: desk",
        "Model: Qwen/Qwen2.5-1.5B",
        "Holds layers 0 to 11, 1.2 GB",
        "1,234 tokens today, 3.14 tokens/s now",
    ]


def test_a_single_layer_is_not_a_range() -> None:
    assert "Holds layer 3, 5 MB" in texts(Status(State.READY, "desk", layers=range(3, 4), memory=5_000_000))


def test_the_menu_before_an_invite_has_no_figures() -> None:
    lines = menu(Status(), resumable=False, at_login=True, version="1.2.3")
    assert lines[0] == Line("Not joined to a cluster")
    assert lines[1] == SEPARATOR
    assert Line("Start at login", Action.START_AT_LOGIN, checked=True) in lines
    assert lines[-1] == Line("Quit", Action.QUIT)
    assert not {Action.PAUSE, Action.RESUME} & {line.action for line in lines}, "there is nothing to pause"


def test_every_action_has_a_line() -> None:
    asked = menu(READY, resumable=True, at_login=False, version="1") + menu(
        READY, resumable=False, at_login=False, version="1"
    )
    assert {line.action for line in asked} == {*Action, None}
    assert "Resume" in texts(READY, resumable=True)
    assert "Pause" not in texts(READY, resumable=True)


def test_what_failed_can_be_tried_again() -> None:
    assert Line("Try again", Action.RESUME) in menu(
        Status(State.ERROR, "desk"), resumable=False, at_login=False, version="1"
    )
