"""The icons, looked at as a bar shows them: small, on light and on dark."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("PIL", reason="Pillow comes with the extra `tray`")

from PIL import Image, ImageChops

from node_app.pictures import COLOURS, icon
from node_app.status import State, Status

SIZES = (16, 22, 32, 64)
BARS = {"light": (240, 240, 240), "dark": (30, 30, 34)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("state", State)
def test_an_icon_fills_its_size_and_is_clear_around(state: State, size: int) -> None:
    picture = icon(Status(state), size)
    assert (picture.size, picture.mode) == ((size, size), "RGBA")
    opaque = sum(alpha > 64 for alpha in picture.getchannel("A").tobytes())
    assert 0.25 < opaque / size**2 < 0.95


def test_each_state_has_a_colour_of_its_own() -> None:
    assert len(set(COLOURS.values())) == len(State)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(State, 2)))
def test_two_states_differ_without_colours_at_16_pixels(one: State, other: State) -> None:
    difference = ImageChops.difference(_grey(one), _grey(other))
    far_apart = sum(value > 64 for value in difference.tobytes())
    assert far_apart >= 16, f"{one} and {other} differ in {far_apart} pixels of 256"


def _grey(state: State) -> Image.Image:
    """The shape alone: ink is black, glyphs are white, what is around is white."""
    picture = icon(Status(state), 16)
    shape = Image.new("L", picture.size, 255)
    ink = picture.convert("RGB").getchannel("G").point(lambda value: 255 if value > 200 else 0)
    shape.paste(ink, mask=picture.getchannel("A"))
    return shape


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("state", State)
def test_an_icon_stands_out(state: State, bar: str) -> None:
    """By the contrast of 3 to 1 that WCAG 2.1 (1.4.11) asks of graphics."""
    bright, dim = sorted((_luminance(COLOURS[state]), _luminance(BARS[bar])), reverse=True)
    assert (bright + 0.05) / (dim + 0.05) > 3


def _luminance(colour: tuple[int, ...]) -> float:
    """Relative luminance, as WCAG defines it."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_progress_is_seen() -> None:
    for state in (State.DOWNLOADING, State.LOADING):
        begun, done = (icon(Status(state, progress=(part, 10)), 16) for part in (1, 10))
        assert begun.tobytes() != done.tobytes()
