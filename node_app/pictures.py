"""The icon of each state: a colour and a shape of its own, drawn large and scaled down.

The colours are of middle brightness, so that they stand out on light and dark bars alike. The shapes tell the states
apart without colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from PIL import Image, ImageDraw

from node_app.status import State, Status

SIZE = 64
_UNIT = 512
"""The side of the canvas that the shapes are drawn on."""
_WHITE = (255, 255, 255, 255)
_STEPS = 12
"""A picture of a download shows its progress in so many steps."""

COLOURS = {
    State.NOT_JOINED: (122, 130, 142),
    State.CONNECTING: (59, 130, 246),
    State.WAITING: (148, 92, 214),
    State.DOWNLOADING: (14, 140, 190),
    State.LOADING: (10, 150, 140),
    State.READY: (22, 146, 76),
    State.BUSY: (204, 102, 0),
    State.PAUSED: (112, 124, 145),
    State.ERROR: (216, 48, 48),
}


def icon(status: Status, size: int = SIZE) -> Image.Image:
    """The picture of `status`, `size` pixels wide and high, with transparency."""
    return _icon(status.state, _step(status.fraction), size)


def _step(fraction: float | None) -> int:
    return 0 if fraction is None else math.floor(fraction * _STEPS)


@cache
def _icon(state: State, step: int, size: int) -> Image.Image:
    canvas = Image.new("RGBA", (_UNIT, _UNIT), (0, 0, 0, 0))
    _SHAPES[state](ImageDraw.Draw(canvas), (*COLOURS[state], 255), step / _STEPS)
    return canvas.resize((size, size), Image.Resampling.LANCZOS)


Ink = tuple[int, int, int, int]
Draw = ImageDraw.ImageDraw
_FULL = (24, 24, _UNIT - 24, _UNIT - 24)


def _disc(draw: Draw, colour: Ink) -> None:
    draw.ellipse(_FULL, colour)


def _square(draw: Draw, colour: Ink) -> None:
    draw.rounded_rectangle(_FULL, 104, colour)


def _not_joined(draw: Draw, colour: Ink, _: float) -> None:
    """A ring with nothing in it."""
    draw.ellipse(_FULL, outline=colour, width=84)


def _connecting(draw: Draw, colour: Ink, _: float) -> None:
    """An open ring around a dot."""
    draw.arc(_FULL, -30, 240, colour, 84)
    draw.ellipse((176, 176, 336, 336), colour)


def _waiting(draw: Draw, colour: Ink, _: float) -> None:
    """A clock."""
    _disc(draw, colour)
    draw.line((256, 112, 256, 270, 372, 338), _WHITE, 56, joint="curve")
    for x, y in ((256, 112), (372, 338), (256, 270)):
        draw.ellipse((x - 28, y - 28, x + 28, y + 28), _WHITE)


def _downloading(draw: Draw, colour: Ink, fraction: float) -> None:
    """An arrow down into a bar that fills."""
    draw.rectangle((180, 16, 332, 180), colour)
    draw.polygon(((40, 148), (472, 148), (256, 360)), colour)
    draw.rounded_rectangle((24, 392, 488, 496), 40, (*colour[:3], 110))
    if fraction:
        draw.rounded_rectangle((24, 392, 24 + 464 * max(fraction, 0.2), 496), 40, colour)


def _loading(draw: Draw, colour: Ink, fraction: float) -> None:
    """Layers, of which the loaded ones are solid."""
    for index in range(3):
        top = 376 - 168 * index
        solid = fraction * 3 > index or (index == 0 and fraction == 0)
        draw.rounded_rectangle((24, top, 488, top + 120), 40, colour if solid else (*colour[:3], 110))


def _ready(draw: Draw, colour: Ink, _: float) -> None:
    """A tick in a disc."""
    _disc(draw, colour)
    draw.line((132, 268, 222, 358, 384, 172), _WHITE, 72, joint="curve")
    for x, y in ((132, 268), (384, 172)):
        draw.ellipse((x - 36, y - 36, x + 36, y + 36), _WHITE)


def _busy(draw: Draw, colour: Ink, _: float) -> None:
    """A bolt in a hexagon."""
    draw.regular_polygon((256, 256, 248), 6, rotation=30, fill=colour)
    draw.polygon(((296, 72), (128, 292), (236, 292), (212, 440), (384, 212), (272, 212)), _WHITE)


def _paused(draw: Draw, colour: Ink, _: float) -> None:
    """Two bars in a square."""
    _square(draw, colour)
    draw.rounded_rectangle((150, 132, 226, 380), 20, _WHITE)
    draw.rounded_rectangle((286, 132, 362, 380), 20, _WHITE)


def _error(draw: Draw, colour: Ink, _: float) -> None:
    """An exclamation mark in a triangle."""
    draw.polygon(((256, 16), (504, 484), (8, 484)), colour)
    draw.rounded_rectangle((222, 180, 290, 352), 24, _WHITE)
    draw.ellipse((218, 380, 294, 456), _WHITE)


_SHAPES: dict[State, Callable[[Draw, Ink, float], None]] = {
    State.NOT_JOINED: _not_joined,
    State.CONNECTING: _connecting,
    State.WAITING: _waiting,
    State.DOWNLOADING: _downloading,
    State.LOADING: _loading,
    State.READY: _ready,
    State.BUSY: _busy,
    State.PAUSED: _paused,
    State.ERROR: _error,
}
