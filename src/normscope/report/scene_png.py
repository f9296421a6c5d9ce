"""A scene by matplotlib: seen from one side, with labels beside its points and the order of its trails as colours.

All lengths are in points (1/72 inch).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from normscope.report.chart_png import INK, MARGIN, SOFT, TEXT, WIDTH, Sheet, new_sheet
from normscope.report.labels import Box, Spot, nearest_spot, place_labels
from normscope.report.lettering import FONT, font, printable, text_width
from normscope.results.scene import (
    MANY,
    ORDER_COLOURS,
    SYMBOLS,
    Point,
    Scene,
    Trail,
    camera,
    clear_words,
    cloud_colour,
    frame,
    order_limits,
    wire_sphere,
)

if TYPE_CHECKING:
    import matplotlib.cm
    import matplotlib.figure
    from mpl_toolkits.mplot3d import Axes3D

_SIDE = 340.0
_FEW = 50  # lines that do not yet cover what they lead to
_LETTERS = 7.0
_LEAST_LEADER = 9.0  # a label that is nearer needs no line to its point
_BAR, _BAR_LENGTH, _BAR_ROOM = 8.0, 150.0, 48.0
_WIRE, _LINK = "#c3cad2", "#8c959f"
_SMALLEST, _LARGEST = 9.0, 46.0  # area of a marker at the start and at the end of a trail
_FILL = 0.93  # of the square, by what is drawn
_BETWEEN = 6  # parts of a trail's line between two points, for labels to stay off
_APART = 0.06  # between points with labels, in halves of the picture
_LEAST_SLANT = 0.3  # an axis that points at the camera has no end to name


def draw_scene_png(scene: Scene) -> "matplotlib.figure.Figure":
    """The scene as a figure 1200 pixels wide."""
    sheet = new_sheet(scene, _SIDE)
    axes = _axes(sheet, scene)
    _draw_axes(axes, scene)
    handles = {**_draw_clouds(axes, scene), **_draw_trails(axes, scene)}
    _write_labels(sheet, axes, scene)
    _add_bar(sheet, scene)
    sheet.figure.legend(
        list(handles.values()),
        [printable(name) for name in handles],
        loc="upper left",
        bbox_to_anchor=(MARGIN / WIDTH, (sheet.foot + _SIDE) / sheet.height),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handletextpad=0.4,
        prop={"family": FONT, "size": TEXT},
        labelcolor=INK,
    )
    for text in sheet.figure.legends[0].get_texts():
        text.set_parse_math(False)
    return sheet.figure


def _axes(sheet: Sheet, scene: Scene) -> "Axes3D":
    """Axes without a frame, turned to the camera and scaled so that the ball of all points fills them."""
    place = ((WIDTH - _SIDE) / 2 / WIDTH, sheet.foot / sheet.height, _SIDE / WIDTH, _SIDE / sheet.height)
    axes: Axes3D = sheet.figure.add_axes(place, projection="3d", computed_zorder=False)
    axes.set_axis_off()
    axes.set_proj_type("ortho")
    axes.view_init(*camera(scene))
    centre, reach, screen = frame(scene)
    for set_limits, middle in zip((axes.set_xlim, axes.set_ylim, axes.set_zlim), centre.tolist(), strict=True):
        set_limits(middle - reach, middle + reach)
    axes.set_box_aspect((1, 1, 1))
    left, right = _project(axes, np.stack([centre - reach * screen[0], centre + reach * screen[0]]))
    axes.set_box_aspect((1, 1, 1), zoom=_FILL * _SIDE / float(right[0] - left[0]))
    return axes


def _project(axes: "Axes3D", points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Where points fall on the sheet, in points of print from its lower left corner."""
    from mpl_toolkits.mplot3d import proj3d

    figure = axes.get_figure(root=True)
    assert figure is not None
    x, y, _ = proj3d.proj_transform(points[:, 0], points[:, 1], points[:, 2], axes.get_proj())
    spots: npt.NDArray[np.float64] = axes.transData.transform(np.column_stack([x, y])) * 72 / figure.dpi
    return spots


def _draw_axes(axes: "Axes3D", scene: Scene) -> None:
    """The three axes and the wire sphere."""
    for line in wire_sphere(scene.radius) if scene.radius else []:
        axes.plot(*zip(*line, strict=True), color=_WIRE, linewidth=0.4, alpha=0.7, zorder=1)
    for start, end in _axis_ends(scene):
        axes.plot(*zip(start, end, strict=True), color=_WIRE, linewidth=0.6, zorder=1)


def _axis_ends(scene: Scene) -> list[tuple[Point, Point]]:
    """Start and end of each axis: through the wire sphere if there is one, else small in a corner."""
    centre, reach, screen = frame(scene)
    middle, length = (centre, reach) if scene.radius else (centre - 0.85 * reach * screen.sum(0), 0.13 * reach)
    starts = middle - length * np.eye(3) if scene.radius else np.tile(middle, (3, 1))
    return [
        (tuple(start), tuple(end)) for start, end in zip(starts.tolist(), (middle + length * np.eye(3)).tolist(), strict=True)
    ]


def _halo() -> list[Any]:
    """White around letters, so that they can be read over lines."""
    from matplotlib import patheffects

    return [patheffects.withStroke(linewidth=1.6, foreground="white")]


def _draw_clouds(axes: "Axes3D", scene: Scene) -> dict[str, Any]:
    from matplotlib.lines import Line2D
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    handles: dict[str, Any] = {}
    for index, cloud in enumerate(scene.clouds):
        if not cloud.shown:
            continue
        colour = cloud_colour(cloud, index)
        points = np.array([cloud.points[i] for i in cloud.shown])
        if cloud.origins:
            pairs = [(cloud.origins[i], cloud.points[i]) for i in cloud.shown]
            axes.add_collection3d(
                Line3DCollection(pairs, colors=_LINK, linewidths=0.4, alpha=0.6 if len(pairs) < _FEW else 0.3, zorder=2),
                autolim=False,
            )
        size, marker = (34.0, "*") if cloud.marked else (_dot(len(points)), "o")
        shade = (
            {"alpha": 1.0, "depthshade": False}
            if cloud.marked
            else {"alpha": 0.9 if len(points) < MANY else 0.6, "depthshade": True}
        )
        axes.scatter(*points.T, s=size, c=colour, marker=marker, linewidths=0, zorder=6 if cloud.marked else 3, **shade)
        handles[cloud.name] = Line2D([], [], color=colour, linestyle="", marker=marker, markersize=7 if cloud.marked else 4)
    return handles


def _dot(count: int) -> float:
    """Area of a small point: the more there are, the smaller."""
    return max(2.0, min(14.0, 2500 / count))


def _draw_trails(axes: "Axes3D", scene: Scene) -> dict[str, Any]:
    from matplotlib.lines import Line2D
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    handles: dict[str, Any] = {}
    for index, trail in enumerate(scene.trails):
        if not trail.shown:
            continue
        marker = SYMBOLS[index % len(SYMBOLS)][0]
        points = np.array([trail.points[i] for i in trail.shown])
        colours = _colours(scene, trail)
        pieces = list(pairwise(points))
        axes.add_collection3d(Line3DCollection(pieces, colors=colours[1:], linewidths=1.4, zorder=4), autolim=False)
        sizes = np.linspace(_SMALLEST, _LARGEST, len(points))
        style = {"linewidths": 0.5, "edgecolors": "white", "depthshade": False, "zorder": 5}
        axes.scatter(*points.T, s=sizes, c=colours, marker=marker, **style)
        handles[trail.name] = Line2D([], [], color=colours[-1], marker=marker, markersize=5, linewidth=1.4)
    return handles


def _colours(scene: Scene, trail: Trail) -> npt.NDArray[np.float64]:
    steps = np.array([trail.numbers[i] for i in trail.shown], dtype=np.float64)
    colours: npt.NDArray[np.float64] = np.asarray(_order_map(scene).to_rgba(steps))
    return colours


def _order_map(scene: Scene) -> "matplotlib.cm.ScalarMappable":
    """The colour of every step."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    return ScalarMappable(Normalize(*order_limits(scene)), LinearSegmentedColormap.from_list("order", ORDER_COLOURS))


@dataclass(frozen=True)
class _Label:
    """A text beside a point in space."""

    point: Point
    text: str
    bold: bool = False
    colour: str = INK

    @property
    def size(self) -> tuple[float, float]:
        return text_width(self.text, _LETTERS, bold=self.bold) + 1, 1.15 * _LETTERS


def _labels(scene: Scene) -> list[_Label]:
    """Texts of marked points, of trails where they change, and of axes that do not point at the camera."""
    found: list[_Label] = []
    for cloud in scene.clouds:
        if cloud.marked and cloud.labels:
            found += [_Label(cloud.points[i], printable(cloud.labels[i]), bold=True) for i in cloud.shown]
    for trail in scene.trails:
        found += [_Label(trail.points[i], printable(text)) for i, text in clear_words(scene, trail, _APART, _APART).items()]
    slants = np.linalg.norm(frame(scene)[2], axis=0)
    for name, (_, end), slant in zip(scene.axes, _axis_ends(scene), slants, strict=True):
        if slant > _LEAST_SLANT:
            found.append(_Label(end, printable(name), colour=SOFT))
    return found


def _write_labels(sheet: Sheet, axes: "Axes3D", scene: Scene) -> None:
    """Texts beside their points, none over another."""
    labels = _labels(scene)
    anchors = _spots(axes, [label.point for label in labels])
    dots = [spot for trail in scene.trails for spot in _along(_spots(axes, [trail.points[i] for i in trail.shown]))] or anchors
    room = (MARGIN, sheet.foot, WIDTH - MARGIN - (_BAR_ROOM if scene.trails else 0), sheet.foot + _SIDE)
    boxes = place_labels(anchors, [label.size for label in labels], dots, room)
    for label, anchor, box in zip(labels, anchors, boxes, strict=True):
        _write_label(sheet, label, anchor, box)


def _along(way: list[Spot]) -> list[Spot]:
    """The points of a way and some between them."""
    shares = [k / _BETWEEN for k in range(_BETWEEN)]
    between = [(x + t * (to_x - x), y + t * (to_y - y)) for (x, y), (to_x, to_y) in pairwise(way) for t in shares]
    return [*between, *way[-1:]]


def _spots(axes: "Axes3D", points: list[Point]) -> list[Spot]:
    return [(x, y) for x, y in _project(axes, np.array(points).reshape(-1, 3)).tolist()]


def _write_label(sheet: Sheet, label: _Label, anchor: Spot, box: Box) -> None:
    """The text in its box, with a line to its point unless that is near."""
    from matplotlib.lines import Line2D

    figure, scale = sheet.figure, np.array([WIDTH, sheet.height])
    near = nearest_spot(box, *anchor)
    if math.dist(near, anchor) > _LEAST_LEADER:
        figure.add_artist(Line2D(*(np.array([anchor, near]) / scale).T, color=SOFT, linewidth=0.4, zorder=7))
    left, middle = np.array([box[0], (box[1] + box[3]) / 2]) / scale
    letters = font(_LETTERS, bold=label.bold, colour=label.colour)
    written = figure.text(left, middle, label.text, va="center", **letters)
    written.set_path_effects(_halo())
    written.set_zorder(8)


def _add_bar(sheet: Sheet, scene: Scene) -> None:
    """The colours of the order, at the right."""
    from matplotlib.ticker import MaxNLocator

    if not any(trail.shown for trail in scene.trails):
        return
    left, bottom = WIDTH - MARGIN - _BAR_ROOM + 12, sheet.foot + (_SIDE - _BAR_LENGTH) / 2
    place = (left / WIDTH, bottom / sheet.height, _BAR / WIDTH, _BAR_LENGTH / sheet.height)
    bar = sheet.figure.add_axes(place)
    sheet.figure.colorbar(_order_map(scene), cax=bar)
    bar.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    bar.set_ylabel(scene.order, **font(TEXT, colour=INK))
    bar.tick_params(labelsize=TEXT, labelfontfamily=FONT, labelcolor=INK, color=SOFT, width=0.7, length=2.5, pad=2)
    for spine in bar.spines.values():
        spine.set(color=SOFT, linewidth=0.7)
