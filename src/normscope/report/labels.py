"""Where labels stand beside their points so that none covers another."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Box = tuple[float, float, float, float]  # left, bottom, right, top
Spot = tuple[float, float]
_Numbers = npt.NDArray[np.float64]

_ANGLES = 16
_RINGS = (5.0, 9.0, 15.0, 23.0, 33.0, 45.0, 60.0, 80.0, 105.0)
_DOT = 3.0  # radius of a dot
_LEADER = 8  # points of the line from a label to its anchor that are checked
_INWARD = 3.0  # what a label costs that stands on the side of the others
_COVERS, _OUTSIDE, _CROSSES, _HIDES = 1000.0, 300.0, 20.0, 15.0


def place_labels(anchors: Sequence[Spot], sizes: Sequence[Spot], dots: Sequence[Spot], room: Box) -> list[Box]:
    """A box for each label, near its anchor, inside the room and off other labels, if that can be; then off the dots.

    Args:
        anchors: the points that the labels belong to.
        sizes: width and height of each label.
        dots: points that had better stay visible.
        room: the box to stay in.
    """
    placed, leaders = np.empty((0, 4)), np.empty((0, 2))
    shown = np.array(dots, dtype=np.float64).reshape(-1, 2)
    middle = np.array(anchors, dtype=np.float64).reshape(-1, 2).mean(0) if anchors else np.zeros(2)
    for anchor, size in zip(anchors, sizes, strict=True):
        boxes, costs = _around(np.array(anchor), np.array(size), middle)
        lines = _leaders(boxes, np.array(anchor))
        low, high = np.array(room[:2]), np.array(room[2:])
        costs = costs + _OUTSIDE * ((boxes[:, :2] < low) | (boxes[:, 2:] > high)).any(1)
        costs = costs + _COVERS * _overlaps(boxes, placed).sum(1)
        costs = costs + _CROSSES * _inside(lines.reshape(-1, 2), placed).reshape(len(boxes), -1).sum(1)
        costs = costs + _CROSSES * _inside(leaders, boxes).sum(0)
        costs = costs + _HIDES * _inside(shown, boxes + _DOT * np.array([-1, -1, 1, 1])).sum(0)
        best = int(costs.argmin())
        placed, leaders = np.vstack([placed, boxes[best]]), np.vstack([leaders, lines[best]])
    return [(left, bottom, right, top) for left, bottom, right, top in placed.tolist()]


def nearest_spot(box: Box, x: float, y: float) -> Spot:
    """The point of the box that is nearest to (x, y)."""
    return min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])


def _around(anchor: _Numbers, size: _Numbers, middle: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Boxes whose edge is on one of the rings, and what their distance and direction cost: outward is best."""
    angles = np.tile(2 * np.pi * np.arange(_ANGLES) / _ANGLES, len(_RINGS))
    distances = np.repeat(np.array(_RINGS), _ANGLES)
    way = np.stack([np.cos(angles), np.sin(angles)], 1)
    corners = anchor + distances[:, None] * way + (way - 1) * size / 2
    outward = math.atan2(anchor[1] - middle[1], anchor[0] - middle[0])
    return np.hstack([corners, corners + size]), distances + _INWARD * (1 - np.cos(angles - outward))


def _leaders(boxes: _Numbers, anchor: _Numbers) -> _Numbers:
    """For each box some points on the line from it to its anchor."""
    starts = np.clip(anchor, boxes[:, :2], boxes[:, 2:])
    shares = np.arange(1, _LEADER)[:, None] / _LEADER
    lines: _Numbers = starts[:, None] + (anchor - starts)[:, None] * shares
    return lines


def _overlaps(boxes: _Numbers, others: _Numbers) -> npt.NDArray[np.bool_]:
    """Whether a box (row) shares some area with another (column)."""
    return np.asarray(((boxes[:, None, :2] < others[None, :, 2:]) & (others[None, :, :2] < boxes[:, None, 2:])).all(-1))


def _inside(spots: _Numbers, boxes: _Numbers) -> npt.NDArray[np.bool_]:
    """Whether a spot (row) lies in a box (column)."""
    return np.asarray(((spots[:, None] > boxes[None, :, :2]) & (spots[:, None] < boxes[None, :, 2:])).all(-1))
