"""A scene in three dimensions: the numbers for the page's WebGL component, and a static SVG picture of it.

All lengths of the picture are in SVG units.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from normscope.report.labels import Spot, nearest_spot, place_labels
from normscope.report.theme import CLOUDS, LIGHT, LINE_COLOURS, STATIC_FONT, STEPS_ON_LIGHT, text_width, wrapped
from normscope.results.figures import Cloud, Point, Scene, Scenes, Trail

_ELEVATION, _AZIMUTH = 20.0, -60.0  # degrees
_STEEPEST = 60.0  # a higher camera would look along the third axis
_CIRCLES, _STEPS = 6, 72  # of a wire sphere
_MANY = 1000  # points of a cloud that would hide each other
_DRAWN = 4000  # of a cloud in the picture; more would only make the file larger
_SIDE, _BAR_ROOM, _MARGIN = 560.0, 80.0, 14.0
_BAR = 200.0  # height of the bar of colours
_WIDTH = _SIDE + _BAR_ROOM + 2 * _MARGIN
_WIDE, _COLUMNS = 800.0, 3  # of scenes side by side
_LETTERS = 11.0
_APART = 0.06  # between points with labels, in halves of the picture
_LEAST_LEADER = 12.0  # a label that is nearer needs no line to its point
_LEAST_SLANT = 0.3  # an axis that points at the camera has no end to name
_LINK = "#8c959f"
_RANGE = 32767

Numbers = npt.NDArray[np.float64]


def camera(scene: Scene) -> tuple[float, float]:
    """Elevation and azimuth in degrees: facing trails and marked points on a sphere, else where trails look widest."""
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


def frame(scene: Scene) -> tuple[Numbers, float, Numbers]:
    """What the camera has to show: the middle, half the side of the square around it, and the directions right and up."""
    elevation, azimuth = (math.radians(angle) for angle in camera(scene))
    right = np.array([-math.sin(azimuth), math.cos(azimuth), 0.0])
    up = np.array([-math.sin(elevation) * math.cos(azimuth), -math.sin(elevation) * math.sin(azimuth), math.cos(elevation)])
    screen = np.stack([right, up])
    seen = _all_points(scene) @ screen.T
    middle = np.zeros(2) if scene.radius else (seen.min(0) + seen.max(0)) / 2
    reach = max(float(np.abs(seen - middle).max()), scene.radius or 0.0)
    return middle @ screen, reach or 1.0, screen


def scene_data(scene: Scene) -> dict[str, Any]:
    """The scene for ``sphere.js``: points as 16-bit integers in base64, scaled by ``reach`` around ``centre``."""
    points = _all_points(scene)
    low, high = points.min(0), points.max(0)
    centre = np.zeros(3) if scene.radius else (low + high) / 2
    reach = max(float(np.abs(points - centre).max()), scene.radius or 0.0) or 1.0

    def packed(positions: Sequence[Point]) -> str:
        scaled = (np.array(positions, dtype=np.float64).reshape(-1, 3) - centre) / reach * _RANGE
        return base64.b64encode(np.rint(scaled).astype("<i2").tobytes()).decode("ascii")

    clouds = [
        {
            "name": cloud.name,
            "points": packed([cloud.points[i] for i in cloud.shown]),
            "labels": [cloud.labels[i] for i in cloud.shown] if cloud.labels else [],
            "origins": packed([cloud.origins[i] for i in cloud.shown]) if cloud.origins else "",
            "marked": cloud.marked,
            "colour": _cloud_colour(cloud, index),
        }
        for index, cloud in enumerate(scene.clouds)
        if cloud.shown
    ]
    trails = [
        {
            "name": trail.name,
            "points": packed([trail.points[i] for i in trail.shown]),
            "labels": [trail.labels[i] if trail.labels else trail.name for i in trail.shown],
            "steps": [trail.numbers[i] for i in trail.shown],
            "thin": trail.thin,
            "captions": [[trail.shown.index(i), text] for i, text in trail.captions().items()],
        }
        for trail in scene.trails
        if trail.shown
    ]
    sphere = {"radius": scene.radius / reach if scene.radius else 0, "axes": scene.axes, "order": scene.order}
    return {"clouds": clouds, "trails": trails, **sphere, "steps": _step_limits(scene), "view": camera(scene)}


def scene_svg(scene: Scene) -> str:
    """The scene from one side: labels beside its points, none over another, and the order of its trails as colours."""
    top = _MARGIN + _header_height(scene, _WIDTH) + 10 + 18 * len(_named(scene))
    view = _View.of(scene, _MARGIN, top, _SIDE)
    bar = _bar(scene, _WIDTH - _BAR_ROOM + 10, top + (_SIDE - _BAR) / 2)
    labels = [*_labels(scene), *_axis_labels(scene)]
    drawn = [*_picture(scene, view, labels, _WIDTH - _BAR_ROOM), *_legend(scene, view), bar]
    return _document(scene, _WIDTH, view.bottom, "".join(drawn))


def scenes_svg(figure: Scenes) -> str:
    """Scenes in rows, each below its title and caption, with one legend and one bar for the order of their trails."""
    count = min(_COLUMNS, len(figure.scenes))
    column = (_WIDE - _BAR_ROOM - 2 * _MARGIN) / count
    side, first = min(column - _MARGIN, _SIDE), figure.scenes[0]
    top = _MARGIN + _header_height(figure, _WIDE) + 10 + 18 * len(_named(first))
    drawn = []
    for place, scene in enumerate(figure.scenes):
        left, y = _MARGIN + column * (place % count), top + (side + 44) * (place // count)
        view = _View.of(scene, left, y + 40, side)
        drawn += [
            _text(left, y + 14, scene.title, 14, LIGHT["ink"], bold=True),
            _text(left, y + 30, scene.caption, 12, LIGHT["ink"]),
        ]
        drawn += _picture(scene, view, _labels(scene), left + column)
    drawn += _legend(first, _View.of(first, _MARGIN, top, side))
    drawn.append(_bar(first, _WIDE - _BAR_ROOM + 10, top + 40 + (side - _BAR) / 2))
    return _document(figure, _WIDE, view.bottom, "".join(drawn))


def _picture(scene: Scene, view: "_View", labels: "list[_Label]", right: float) -> list[str]:
    """Sphere, points, trails and labels; labels stay left of ``right``."""
    anchors = view.project([label.point for label in labels])
    dots = [spot for trail in scene.trails for spot in _along(view.project([trail.points[i] for i in trail.shown]))] or anchors
    boxes = place_labels(anchors, [label.size for label in labels], dots, (view.left, view.top, right, view.bottom))
    written = [label.svg(anchor, box) for label, anchor, box in zip(labels, anchors, boxes, strict=True)]
    return [*_ball(scene, view), *_clouds(scene, view), *_trails(scene, view), *written]


def _heading(figure: Scene | Scenes, width: float) -> list[tuple[str, float, str, bool, float]]:
    """Lines of the title and the caption: text, size, colour, whether bold, and height."""
    room = width - 2 * _MARGIN
    title = [(line, 15.0, LIGHT["ink"], True, 20.0) for line in wrapped(figure.title, 15, room, bold=True)]
    return title + [(line, 12.0, LIGHT["soft"], False, 15.0) for line in wrapped(figure.caption, 12, room)]


def _header_height(figure: Scene | Scenes, width: float) -> float:
    return sum(line[-1] for line in _heading(figure, width))


def _document(figure: Scene | Scenes, width: float, bottom: float, body: str) -> str:
    """The picture with its texts, on white."""
    y, texts = _MARGIN, []
    for line, size, colour, bold, leading in _heading(figure, width):
        y += leading
        texts.append(_text(_MARGIN, y - 4, line, size, colour, bold))
    y = bottom + 6
    for line in wrapped(figure.settings, 10, width - 2 * _MARGIN):
        y += 13
        texts.append(_text(_MARGIN, y, line, 10, LIGHT["soft"]))
    height = y + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="{STATIC_FONT}" role="img"><rect width="100%" height="100%" '
        f'fill="{LIGHT["paper"]}"/>{"".join(texts)}{body}</svg>'
    )


@dataclass(frozen=True)
class _View:
    """The picture's square, and how points in space fall into it."""

    centre: Numbers
    scale: float
    screen: Numbers
    left: float
    top: float
    side: float

    @classmethod
    def of(cls, scene: Scene, left: float, top: float, side: float) -> "_View":
        centre, reach, screen = frame(scene)
        return cls(centre, 0.465 * side / reach, screen, left, top, side)

    @property
    def bottom(self) -> float:
        """Where the square ends."""
        return self.top + self.side

    def project(self, points: Sequence[Point]) -> list[Spot]:
        """Where points fall on the picture."""
        seen = (np.array(points, dtype=np.float64).reshape(-1, 3) - self.centre) @ self.screen.T * self.scale
        return [(self.left + self.side / 2 + x, self.top + self.side / 2 - y) for x, y in seen.tolist()]

    def depth(self, points: Sequence[Point]) -> list[float]:
        """How near points are to the camera, from -1 to 1."""
        towards = np.cross(self.screen[0], self.screen[1])
        distance = (np.array(points, dtype=np.float64).reshape(-1, 3) - self.centre) @ towards
        nearness: list[float] = (distance / (float(np.abs(distance).max(initial=0.0)) or 1.0)).tolist()
        return nearness


@dataclass(frozen=True)
class _Label:
    """A text beside a point in space."""

    point: Point
    text: str
    bold: bool = False
    colour: str = LIGHT["ink"]

    @property
    def size(self) -> tuple[float, float]:
        """Width and height."""
        return text_width(self.text, _LETTERS, bold=self.bold), 1.2 * _LETTERS

    def svg(self, anchor: Spot, box: tuple[float, float, float, float]) -> str:
        """The text in its box, with a line to its point unless that is near."""
        near = nearest_spot(box, *anchor)
        line = _line([anchor, near], LIGHT["soft"], 0.6) if math.dist(near, anchor) > _LEAST_LEADER else ""
        halo = f' stroke="{LIGHT["paper"]}" stroke-width="3" paint-order="stroke" stroke-linejoin="round"'
        return line + _text(box[0], box[3] - 0.3 * _LETTERS, self.text, _LETTERS, self.colour, self.bold, halo)


def wire_sphere(radius: float) -> list[list[Point]]:
    """Meridians and parallels, each as a closed line."""
    around = [2 * math.pi * i / _STEPS for i in range(_STEPS + 1)]
    lines: list[list[Point]] = []
    for k in range(_CIRCLES):
        c, s = math.cos(math.pi * k / _CIRCLES), math.sin(math.pi * k / _CIRCLES)
        lines.append([(radius * math.cos(a) * c, radius * math.cos(a) * s, radius * math.sin(a)) for a in around])
    for k in range(1, _CIRCLES):
        across, up = radius * math.sin(math.pi * k / _CIRCLES), radius * math.cos(math.pi * k / _CIRCLES)
        lines.append([(across * math.cos(a), across * math.sin(a), up) for a in around])
    return lines


def clear_captions(scene: Scene, trail: Trail) -> dict[int, str]:
    """The texts that have room beside a trail: the first, the last, and those far enough from them."""
    captions = trail.captions()
    _, reach, screen = frame(scene)
    spots = {i: screen @ np.array(trail.points[i]) for i in captions}
    shown: list[int] = []
    for i in [*list(captions)[:1], *list(captions)[-1:], *captions]:
        if all(np.any(np.abs(spots[i] - spots[other]) > _APART * reach) for other in shown):
            shown.append(i)
    return {i: captions[i] for i in sorted(shown)}


def _all_points(scene: Scene) -> Numbers:
    drawn = [part.points[i] for part in scene.parts for i in part.shown]
    drawn += [origin for cloud in scene.clouds for origin in cloud.origins if all(map(math.isfinite, origin))]
    return np.array(drawn, dtype=np.float64)


def _cloud_colour(cloud: Cloud, index: int) -> str:
    """Pale for the first, so that others stand out."""
    return LINE_COLOURS[(index + 1) % len(LINE_COLOURS)] if cloud.marked else CLOUDS[index % len(CLOUDS)]


def _step_limits(scene: Scene) -> tuple[float, float]:
    """The first and last step of all trails, never the same."""
    steps = [trail.numbers[i] for trail in scene.trails for i in trail.shown] or [0]
    return float(min(steps)), float(max(max(steps), min(steps) + 1))


def _step_colour(share: float) -> str:
    """The colour at a share of the way, between the two nearest."""
    place = max(0.0, min(1.0, share)) * (len(STEPS_ON_LIGHT) - 1)
    low = min(int(place), len(STEPS_ON_LIGHT) - 2)
    ends = [[int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in STEPS_ON_LIGHT[low : low + 2]]
    mixed = (round(a + (place - low) * (b - a)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _ball(scene: Scene, view: _View) -> list[str]:
    """The wire sphere and the three axes: through the sphere if there is one, else small in a corner."""
    lines = [_line(view.project(line), LIGHT["wire"], 0.5) for line in wire_sphere(scene.radius)] if scene.radius else []
    return lines + [_line(view.project(ends), LIGHT["wire"], 0.9) for ends in _axis_ends(scene)]


def _axis_ends(scene: Scene) -> list[tuple[Point, Point]]:
    centre, reach, screen = frame(scene)
    middle, length = (centre, reach) if scene.radius else (centre - 0.85 * reach * screen.sum(0), 0.13 * reach)
    starts = middle - length * np.eye(3) if scene.radius else np.tile(middle, (3, 1))
    ends = middle + length * np.eye(3)
    return [(tuple(start), tuple(end)) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _clouds(scene: Scene, view: _View) -> list[str]:
    drawn: list[str] = []
    for index, cloud in enumerate(scene.clouds):
        places = cloud.shown[:: math.ceil(len(cloud.shown) / _DRAWN) or 1]
        colour, shown = _cloud_colour(cloud, index), [cloud.points[i] for i in places]
        if cloud.origins:
            links = zip(view.project([cloud.origins[i] for i in places]), view.project(shown), strict=True)
            drawn += [_line(link, _LINK, 0.6, 0.5) for link in links]
        size = 6.0 if cloud.marked else max(1.0, min(2.8, 500 / max(1, len(shown))))
        for (x, y), near in sorted(zip(view.project(shown), view.depth(shown), strict=True), key=lambda pair: pair[1]):
            faint = 1.0 if cloud.marked else round((0.9 if len(shown) < _MANY else 0.6) * (0.75 + 0.25 * near), 2)
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" fill="{colour}" fill-opacity="{faint}"/>')
    return drawn


def _trails(scene: Scene, view: _View) -> list[str]:
    low, high = _step_limits(scene)
    drawn: list[str] = []
    depths = iter(view.depth([trail.points[i] for trail in scene.trails for i in trail.shown]))
    for trail in scene.trails:
        spots, near = view.project([trail.points[i] for i in trail.shown]), [next(depths) for _ in trail.shown]
        colours = [_step_colour((trail.numbers[i] - low) / (high - low)) for i in trail.shown]
        if trail.thin:
            drawn += _thin_trail(spots, colours, [0.65 + 0.35 * depth for depth in near])
            continue
        drawn += [_line(piece, colour, 2.0) for piece, colour in zip(pairwise(spots), colours[1:], strict=False)]
        for (x, y), colour, size in zip(spots, colours, np.linspace(3.0, 6.0, len(spots)).tolist(), strict=True):
            edge = f'stroke="{LIGHT["paper"]}" stroke-width=".8"'
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" fill="{colour}" {edge}/>')
    return drawn


def _thin_trail(spots: Sequence[Spot], colours: Sequence[str], opacities: Sequence[float]) -> list[str]:
    """A line that is fainter far from the camera, and a point at its end."""
    pieces = zip(pairwise(spots), colours[1:], opacities[1:], strict=False)
    (x, y), edge = spots[-1], f'stroke="{LIGHT["ink"]}" stroke-width=".5"'
    end = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[-1]}" {edge} opacity="{opacities[-1]:.2f}"/>'
    return [*(_line(piece, colour, 1.2, round(opacity, 2)) for piece, colour, opacity in pieces), end]


def _labels(scene: Scene) -> list[_Label]:
    """Texts of marked points, and of trails where they change."""
    labels: list[_Label] = []
    for cloud in scene.clouds:
        if cloud.marked and cloud.labels:
            labels += [_Label(cloud.points[i], cloud.labels[i], bold=True) for i in cloud.shown]
    for trail in scene.trails:
        labels += [_Label(trail.points[i], text) for i, text in clear_captions(scene, trail).items()]
    return labels


def _axis_labels(scene: Scene) -> list[_Label]:
    """Names of the axes that do not point at the camera."""
    ends, slants = _axis_ends(scene), np.linalg.norm(frame(scene)[2], axis=0)
    named = zip(scene.axes, ends, slants, strict=True)
    return [_Label(end, name, colour=LIGHT["soft"]) for name, (_, end), slant in named if slant > _LEAST_SLANT]


def _legend(scene: Scene, view: _View) -> list[str]:
    named = _named(scene)
    drawn, y = [], view.top - 18 * len(named)
    for index, part in enumerate(named):
        colour = _cloud_colour(part, index) if isinstance(part, Cloud) else STEPS_ON_LIGHT[-3]
        drawn.append(f'<circle cx="{view.left + 6}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        drawn.append(_text(view.left + 18, y + 4, part.name, 12, LIGHT["ink"]))
        y += 18
    return drawn


def _named(scene: Scene) -> list[Cloud | Trail]:
    """What the legend names: all that is drawn, except trails that are many."""
    return [part for part in scene.parts if part.shown and not (isinstance(part, Trail) and part.thin)]


def _bar(scene: Scene, left: float, top: float) -> str:
    """The colours of the order."""
    if not any(trail.shown for trail in scene.trails):
        return ""
    low, high = _step_limits(scene)
    last = len(STEPS_ON_LIGHT) - 1
    stops = "".join(
        f'<stop offset="{1 - k / last:.3f}" stop-color="{c}"/>' for k, c in reversed(list(enumerate(STEPS_ON_LIGHT)))
    )
    return (
        f'<linearGradient id="steps" x1="0" x2="0" y1="0" y2="1">{stops}</linearGradient>'
        f'<rect x="{left}" y="{top:.1f}" width="12" height="{_BAR}" fill="url(#steps)"/>'
        + _text(left + 18, top + 9, f"{high:g}", 11, LIGHT["ink"])
        + _text(left + 18, top + _BAR, f"{low:g}", 11, LIGHT["ink"])
        + _text(left, top - 8, scene.order, 12, LIGHT["ink"])
    )


def _along(way: list[Spot]) -> list[Spot]:
    """The points of a way and some between them, for labels to stay off."""
    shares = [k / 6 for k in range(6)]
    between = [(x + t * (to_x - x), y + t * (to_y - y)) for (x, y), (to_x, to_y) in pairwise(way) for t in shares]
    return [*between, *way[-1:]]


def _line(spots: Sequence[Spot], colour: str, width: float, opacity: float = 1.0) -> str:
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'


def _text(x: float, y: float, text: str, size: float, colour: str, bold: bool = False, more: str = "") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{weight}{more}>{escape(text)}</text>'
