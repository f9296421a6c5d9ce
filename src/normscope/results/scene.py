"""A picture in three dimensions in words and numbers, and what both of its drawings share: view, wire sphere, labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from normscope.errors import InputError
from normscope.results.lines import Look

Point = tuple[float, float, float]

_ELEVATION, _AZIMUTH = 20.0, -60.0  # degrees
_STEEPEST = 60.0  # a higher camera would look along the third axis
_CIRCLES, _STEPS = 6, 72  # of a wire sphere
MANY = 1000  # points of a cloud that would hide each other
_CLOUDS = ("#8c959f", "#56B4E9", "#D55E00", "#009E73")
ORDER_COLOURS = (
    "#0d0887",
    "#46039f",
    "#7401a8",
    "#9d189d",
    "#bf3984",
    "#da5a6a",
    "#ee7b51",
    "#fba238",
    "#fcce25",
)  # of plasma, whose end is too light for white
ORDER_COLOURS_ON_DARK = (
    "#a62098",
    "#b83289",
    "#c8437b",
    "#d6556d",
    "#e3685f",
    "#ef7e50",
    "#f89540",
    "#fdb130",
    "#f7e425",
)  # of plasma, whose beginning is too dark for black
SYMBOLS = (("o", "circle"), ("s", "square"), ("D", "diamond"), ("X", "x"))  # as matplotlib and plotly name them


@dataclass(frozen=True)
class Cloud:
    """Many small points; points that are not finite are left out.

    Attributes:
        name: what they are, for the legend.
        points: where they are.
        labels: a text for each, shown on hover.
        origins: where each came from; a thin line leads from there.
        marked: few points, drawn large with their labels beside them.
    """

    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    origins: Sequence[Point] = ()
    marked: bool = False

    def __post_init__(self) -> None:
        _check_lengths("cloud", self.name, len(self.points), {"labels": self.labels, "origins": self.origins})

    @property
    def shown(self) -> list[int]:
        """The points that can be drawn."""
        return _finite(self.points)


@dataclass(frozen=True)
class Trail:
    """An ordered line of points, coloured and growing along its way; points that are not finite are left out.

    Attributes:
        name: what it is, for the legend.
        points: where it leads, in order.
        labels: a text for each point; beside the trail it stands where it changes.
        steps: the number of each point, such as its layer; 0, 1, 2, ... unless given.
    """

    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    steps: Sequence[int] = ()

    def __post_init__(self) -> None:
        _check_lengths("trail", self.name, len(self.points), {"labels": self.labels, "steps": self.steps})

    @property
    def shown(self) -> list[int]:
        """The points that can be drawn."""
        return _finite(self.points)

    @property
    def numbers(self) -> list[int]:
        """The number of each point."""
        return list(self.steps or range(len(self.points)))

    def words(self) -> dict[int, str]:
        """For each drawn point that begins a new label: the label, with the steps that it holds for."""
        found: dict[int, str] = {}
        shown = self.shown if self.labels else []
        starts = [k for k, i in enumerate(shown) if k == 0 or self.labels[i] != self.labels[shown[k - 1]]]
        for start, end in pairwise([*starts, len(shown)]):
            first, last = self.numbers[shown[start]], self.numbers[shown[end - 1]]
            found[shown[start]] = f"{self.labels[shown[start]]} ({first if first == last else f'{first}–{last}'})"
        return found


@dataclass(frozen=True)
class Scene:
    """Points and trails in three dimensions.

    Attributes:
        title: what is drawn.
        clouds: points without an order, drawn below the trails.
        trails: points with an order.
        caption: one line that says what to see in it.
        settings: small print under the picture, such as sizes and seed.
        radius: radius of a faint wire sphere around the origin.
        axes: names of the three axes.
        order: what the steps of a trail count.
        view: elevation and azimuth of the camera in degrees; unless given, the trails lie in front.
    """

    title: str
    clouds: tuple[Cloud, ...]
    trails: tuple[Trail, ...]
    caption: str
    settings: str = ""
    radius: float | None = None
    axes: tuple[str, str, str] = ("x", "y", "z")
    order: str = "step"
    view: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not any(one.shown for one in self.parts):
            raise InputError(f"scene '{self.title}' has no points")

    @property
    def parts(self) -> list[Cloud | Trail]:
        """All clouds and trails."""
        return [*self.clouds, *self.trails]


def camera(scene: Scene) -> tuple[float, float]:
    """Elevation and azimuth in degrees: in front of trails and marked points on a sphere, else where trails look widest."""
    points = np.array([trail.points[i] for trail in scene.trails for i in trail.shown], dtype=np.float64)
    if scene.view or not len(points):
        return scene.view or (_ELEVATION, _AZIMUTH)
    middle = points.mean(0)
    marks = [cloud.points[i] for cloud in scene.clouds if cloud.marked for i in cloud.shown] or [middle]
    towards = np.linalg.svd(points - middle)[2][2] if scene.radius is None else np.mean(marks, axis=0) + middle / 2
    length = float(np.linalg.norm(towards))
    if length == 0:
        return _ELEVATION, _AZIMUTH
    elevation = math.degrees(math.asin(towards[2] / length))
    azimuth = math.degrees(math.atan2(towards[1], towards[0]))
    return max(-_STEEPEST, min(_STEEPEST, elevation)), azimuth


def frame(scene: Scene) -> tuple[npt.NDArray[np.float64], float, npt.NDArray[np.float64]]:
    """What the camera has to show: the middle, half the side of the square around it, and the directions right and up."""
    elevation, azimuth = (math.radians(angle) for angle in camera(scene))
    right = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])
    up = np.array([-math.sin(elevation) * math.cos(azimuth), -math.sin(elevation) * math.sin(azimuth), math.cos(elevation)])
    screen = np.stack([right, up])
    drawn = [(one.points, one.shown) for one in scene.parts]
    drawn += [(cloud.origins, _finite(cloud.origins)) for cloud in scene.clouds]
    seen = np.array([points[i] for points, shown in drawn for i in shown], dtype=np.float64) @ screen.T
    middle = np.zeros(2) if scene.radius else (seen.min(0) + seen.max(0)) / 2
    reach = max(float(np.abs(seen - middle).max()), scene.radius or 0.0)
    return middle @ screen, reach or 1.0, screen


def clear_words(scene: Scene, trail: Trail, across: float, up: float) -> dict[int, str]:
    """The words that have room beside a trail: the first, the last, and what is so far from them in halves of the picture."""
    words = trail.words()
    _, reach, screen = frame(scene)
    room = reach * np.array([across, up])
    spots = {i: screen @ np.array(trail.points[i]) for i in words}
    kept: list[int] = []
    for i in [*list(words)[:1], *list(words)[-1:], *words]:
        if all(np.any(np.abs(spots[i] - spots[other]) > room) for other in kept):
            kept.append(i)
    return {i: words[i] for i in sorted(kept)}


def wire_sphere(radius: float) -> list[list[Point]]:
    """Meridians and parallels, each as a closed line."""
    around = [2 * math.pi * i / _STEPS for i in range(_STEPS + 1)]
    lines: list[list[Point]] = []
    for k in range(_CIRCLES):
        turn = math.pi * k / _CIRCLES
        lines.append(
            [
                (radius * math.cos(a) * math.cos(turn), radius * math.cos(a) * math.sin(turn), radius * math.sin(a))
                for a in around
            ]
        )
    for k in range(1, _CIRCLES):
        height = math.pi * k / _CIRCLES
        across, up = radius * math.sin(height), radius * math.cos(height)
        lines.append([(across * math.cos(a), across * math.sin(a), up) for a in around])
    return lines


def cloud_colour(cloud: Cloud, index: int) -> str:
    """The colour of the scene's cloud of that index: pale for the first, so that others stand out."""
    return Look(index + 1).colour if cloud.marked else _CLOUDS[index % len(_CLOUDS)]


def order_limits(scene: Scene) -> tuple[float, float]:
    """The first and last step of all trails, never the same."""
    steps = [trail.numbers[i] for trail in scene.trails for i in trail.shown]
    return float(min(steps)), float(max(max(steps), min(steps) + 1))


def _finite(points: Sequence[Point]) -> list[int]:
    return [i for i, point in enumerate(points) if all(map(math.isfinite, point))]


def _check_lengths(kind: str, name: str, count: int, parts: dict[str, Sequence[object]]) -> None:
    for part, values in parts.items():
        if values and len(values) != count:
            raise InputError(f"{kind} '{name}' has {count} points and {len(values)} {part}")
