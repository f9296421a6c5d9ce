"""Where labels stand beside their points so that none covers another."""

import math
from collections.abc import Sequence

Box = tuple[float, float, float, float]  # left, bottom, right, top
Spot = tuple[float, float]

_ANGLES = 16
_RINGS = (5.0, 9.0, 15.0, 23.0, 33.0, 45.0, 60.0, 80.0, 105.0)
_DOT = 3.0  # radius of a dot
_COVERS, _OUTSIDE, _HIDES = 1000.0, 300.0, 15.0


def place_labels(anchors: Sequence[Spot], sizes: Sequence[tuple[float, float]], dots: Sequence[Spot], room: Box) -> list[Box]:
    """A box for each label, near its anchor, inside the room and off other labels, if that can be; then off the dots.

    Args:
        anchors: the points that the labels belong to.
        sizes: width and height of each label.
        dots: points that had better stay visible.
        room: the box to stay in.
    """
    placed: list[Box] = []
    middle = tuple(sum(values) / len(anchors) for values in zip(*anchors, strict=True)) if anchors else (0.0, 0.0)
    for (x, y), size in zip(anchors, sizes, strict=True):
        outward = math.atan2(y - middle[1], x - middle[0])
        spots = [
            (distance + 3 * (1 - math.cos(angle - outward)), _beside(x, y, size, distance, angle))
            for distance in _RINGS
            for angle in (2 * math.pi * k / _ANGLES for k in range(_ANGLES))
        ]
        placed.append(min(spots, key=lambda spot: spot[0] + _cost(spot[1], placed, dots, room))[1])
    return placed


def overlaps(one: Box, other: Box) -> bool:
    """Whether two boxes share some area."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def nearest_spot(box: Box, x: float, y: float) -> Spot:
    """The point of the box that is nearest to (x, y)."""
    return min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])


def _beside(x: float, y: float, size: tuple[float, float], distance: float, angle: float) -> Box:
    """The box whose edge is so far from the point, in that direction."""
    width, height = size
    across, up = math.cos(angle), math.sin(angle)
    left = x + distance * across + (across - 1) * width / 2
    bottom = y + distance * up + (up - 1) * height / 2
    return left, bottom, left + width, bottom + height


def _cost(box: Box, placed: Sequence[Box], dots: Sequence[Spot], room: Box) -> float:
    left, bottom, right, top = box
    outside = left < room[0] or bottom < room[1] or right > room[2] or top > room[3]
    covered = sum(overlaps(box, other) for other in placed)
    hidden = sum(left - _DOT < x < right + _DOT and bottom - _DOT < y < top + _DOT for x, y in dots)
    return _OUTSIDE * outside + _COVERS * covered + _HIDES * hidden
