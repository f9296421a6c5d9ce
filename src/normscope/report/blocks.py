"""The block of a scheme as a figure in the manner of a paper: x enters at the bottom and goes up.

All lengths are in points (1/72 inch), so that boxes and letters have the same size in every panel and every figure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normscope.errors import InputError
from normscope.report.lettering import font, text_width

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_FORMATS = (".png", ".svg", ".pdf")
_DPI = 200
_COLUMNS = (4, 5, 6)

_LETTERS, _TITLE = 8.5, 10.0
_BOX, _FACTOR = 20.0, 14.0  # heights
_GAP = 11.0  # line between two things on the branch
_REST = 15.0  # line between two sublayers
_SIDE = 18.0  # from the trunk to the boxes of the branch
_BESIDE = 5.0  # from a line to the factor beside it
_CORNER = 5.0
_SUM = 6.0  # radius of ⊕
_PADDING, _BETWEEN = 14.0, 10.0  # inside and between the panels
_HEAD, _STAGE = 28.0, 12.0  # room for the title, and for the stage below it

_INK, _SOFT, _PANEL, _PANEL_EDGE = "#1f2328", "#57606a", "#fafbfc", "#d8dee4"
_FILL = {"norm": "#fff1bd", "attention": "#fbd9c6", "feedforward": "#cfe5f7"}
_EDGE = {"norm": "#9a7200", "attention": "#b34700", "feedforward": "#00639c"}


@dataclass
class _Panel:
    scheme: str
    stage: str
    sublayers: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Measures:
    """Sizes that all panels share: the box, and how far a panel reaches to both sides of the trunk."""

    box: float
    left: float
    right: float

    @property
    def branch(self) -> float:
        """How far right of the trunk the branch runs."""
        return _SIDE + self.box / 2


def draw_blocks(records: Sequence[Mapping[str, Any]]) -> "matplotlib.figure.Figure":
    """One panel for each scheme and stage, in a grid, all on the same scale.

    Args:
        records: a record for each sublayer, with the keys scheme, stage, sublayer, branch, carry and after
            (``normscope.schemes.block_records`` makes them).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(records)
    if not panels:
        raise InputError("no blocks to draw; give the records of at least one scheme")
    measures = _measures(panels)
    columns = _columns(len(panels))
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(_height(panel) for panel in row) for row in rows]
    width = measures.left + measures.right + 2 * _PADDING
    total_width = columns * (width + _BETWEEN) + _BETWEEN
    total_height = sum(heights) + _BETWEEN * (len(rows) + 1)

    figure = Figure(figsize=(total_width / 72, total_height / 72), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    top = total_height
    for row, height in zip(rows, heights, strict=True):
        top -= _BETWEEN + height
        for column, panel in enumerate(row):
            left = _BETWEEN + column * (width + _BETWEEN)
            place = (left / total_width, top / total_height, width / total_width, height / total_height)
            axes = figure.add_axes(place, xlim=(0, width), ylim=(0, height))
            axes.set_axis_off()
            _draw_panel(axes, panel, measures, width, height)
    return figure


def save_figure(figure: "matplotlib.figure.Figure", path: Path, words: Mapping[str, str] | None = None) -> None:
    """Write the figure as the kind of file that the name asks for: .png, which keeps the words too, .svg or .pdf."""
    import matplotlib

    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise InputError(f"cannot draw to '{path}'; the name has to end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")
    if not path.parent.is_dir():
        raise InputError(f"cannot draw to '{path}': there is no folder '{path.parent}'")
    kept: dict[str, dict[str, Any]] = {".png": dict(words or {}), ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "normscope"}):  # the same figure gives the same file
            figure.savefig(path, format=suffix[1:], dpi=_DPI, metadata=kept[suffix])
    except OSError as error:
        raise InputError(f"cannot draw to '{path}': {error.strerror or error}") from error


def _panels(records: Sequence[Mapping[str, Any]]) -> list[_Panel]:
    """Consecutive records of one scheme and stage; a sublayer that comes again begins another panel."""
    panels: list[_Panel] = []
    for record in records:
        name = (record["scheme"], record["stage"])
        last = panels[-1] if panels else None
        seen = {sublayer["sublayer"] for sublayer in last.sublayers} if last else set()
        if last is None or (last.scheme, last.stage) != name or record["sublayer"] in seen:
            panels.append(_Panel(*name))
        panels[-1].sublayers.append(record)
    return panels


def _columns(panels: int) -> int:
    """One row as long as it fits, then the grid with the fewest empty places."""
    return panels if panels <= max(_COLUMNS) else min(_COLUMNS, key=lambda columns: (-panels % columns, columns))


def _kind(text: str, sublayer: str) -> str:
    if text.startswith("×"):
        return "factor"
    return "norm" if text.startswith("Norm") else sublayer


def _measures(panels: list[_Panel]) -> _Measures:
    sublayers = [sublayer for panel in panels for sublayer in panel.sublayers]
    steps = [(text, _kind(text, sublayer["sublayer"])) for sublayer in sublayers for text in sublayer["branch"]]
    afters = [sublayer["after"] for sublayer in sublayers if sublayer["after"]]
    boxed = [*(text for text, kind in steps if kind != "factor"), *afters]
    box = max((text_width(text, _LETTERS) for text in boxed), default=0) + 16
    factor = max((text_width(text, _LETTERS) for text, kind in steps if kind == "factor"), default=0)
    carry = max((text_width(sublayer["carry"], _LETTERS) for sublayer in sublayers), default=0)
    left = max(carry + _BESIDE, box / 2 if afters else _SUM)
    right = _SIDE + box / 2 + max(box / 2, factor + _BESIDE)
    title = max(max(text_width(panel.scheme, _TITLE, bold=True), text_width(panel.stage, _LETTERS)) for panel in panels)
    return _Measures(box, left, max(right, title - left))


def _height(panel: _Panel) -> float:
    """From the x at the bottom to the title at the top."""
    head = _HEAD + (_STAGE if panel.stage else 0)
    return 2 * _PADDING + _REST + sum(_sublayer_height(sublayer) for sublayer in panel.sublayers) + head


def _branch_height(sublayer: Mapping[str, Any]) -> float:
    sizes = [_FACTOR if _kind(text, "") == "factor" else _BOX + _GAP for text in sublayer["branch"]]
    return _GAP + sum(sizes)


def _sublayer_height(sublayer: Mapping[str, Any]) -> float:
    return _REST + _branch_height(sublayer) + _SUM + (_GAP + _BOX if sublayer["after"] else 0)


def _draw_panel(axes: "matplotlib.axes.Axes", panel: _Panel, measures: _Measures, width: float, height: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    edge = FancyBboxPatch((0.5, 0.5), width - 1, height - 1, "round,pad=0,rounding_size=6", fc=_PANEL, ec=_PANEL_EDGE, lw=0.8)
    axes.add_patch(edge)
    axes.text(_PADDING, height - 10, panel.scheme, va="top", **font(_TITLE, bold=True, colour=_INK))
    axes.text(_PADDING, height - 24, panel.stage, va="top", **font(_LETTERS, colour=_SOFT))
    trunk = _PADDING + measures.left
    axes.text(trunk, _PADDING, "x", ha="center", va="baseline", style="italic", **font(_TITLE, colour=_INK))
    level = _PADDING + 10
    for sublayer in panel.sublayers:
        level = _draw_sublayer(axes, sublayer, measures, trunk, level)
    _arrow(axes, (trunk, level), (trunk, level + _REST))


def _draw_sublayer(
    axes: "matplotlib.axes.Axes", sublayer: Mapping[str, Any], measures: _Measures, trunk: float, bottom: float
) -> float:
    """Draw one sublayer from ``bottom`` up; return the height at which the next begins."""
    fork = bottom + _REST
    total = fork + _branch_height(sublayer)
    _line(axes, (trunk, bottom), (trunk, total - _SUM))
    _draw_branch(axes, sublayer, measures, trunk, fork)
    if sublayer["carry"]:
        middle = (fork + total - _SUM) / 2
        axes.text(trunk - _BESIDE, middle, sublayer["carry"], ha="right", va="center", **font(_LETTERS, colour=_INK))
    _draw_sum(axes, trunk, total)
    if not sublayer["after"]:
        return total + _SUM
    _arrow(axes, (trunk, total + _SUM), (trunk, total + _SUM + _GAP))
    _draw_box(axes, sublayer["after"], "norm", (trunk, total + _SUM + _GAP), measures.box)
    return total + _SUM + _GAP + _BOX


def _draw_branch(
    axes: "matplotlib.axes.Axes", sublayer: Mapping[str, Any], measures: _Measures, trunk: float, fork: float
) -> None:
    """The way from the fork through everything on the branch to the sum."""
    branch = trunk + measures.branch
    begin, level = fork, fork + _GAP
    corner: tuple[float, float] | None = (trunk, fork)
    for text in sublayer["branch"]:
        kind = _kind(text, sublayer["sublayer"])
        if kind == "factor":
            middle = level - _GAP / 2 + _FACTOR / 2
            axes.text(branch + _BESIDE, middle, text, ha="left", va="center", **font(_LETTERS, colour=_INK))
            level += _FACTOR
            continue
        _arrow(axes, *([corner] if corner else []), (branch, begin), (branch, level))
        _draw_box(axes, text, kind, (branch, level), measures.box)
        corner, begin = None, level + _BOX
        level += _BOX + _GAP
    _arrow(axes, *([corner] if corner else []), (branch, begin), (branch, level), (trunk + _SUM, level))


def _draw_box(axes: "matplotlib.axes.Axes", text: str, kind: str, bottom: tuple[float, float], width: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = bottom
    box = FancyBboxPatch(
        (x - width / 2, y), width, _BOX, "round,pad=0,rounding_size=4", fc=_FILL[kind], ec=_EDGE[kind], lw=0.9, zorder=3
    )
    axes.add_patch(box)
    axes.text(x, y + _BOX / 2 - 0.5, text, ha="center", va="center_baseline", zorder=4, **font(_LETTERS, colour=_INK))


def _draw_sum(axes: "matplotlib.axes.Axes", x: float, y: float) -> None:
    from matplotlib.patches import Circle

    axes.add_patch(Circle((x, y), _SUM, fc="white", ec=_INK, lw=1.0, zorder=3))
    for dx, dy in ((_SUM, 0.0), (0.0, _SUM)):
        axes.plot((x - dx, x + dx), (y - dy, y + dy), color=_INK, lw=1.0, zorder=4)


def _line(axes: "matplotlib.axes.Axes", *points: tuple[float, float]) -> None:
    axes.plot(*zip(*points, strict=True), color=_INK, lw=1.0, zorder=1, solid_capstyle="butt")


def _arrow(axes: "matplotlib.axes.Axes", *points: tuple[float, float]) -> None:
    """A line through the points, its right-angled turns rounded, with a head at its end."""
    from matplotlib.patches import FancyArrowPatch

    arrow = FancyArrowPatch(
        path=_rounded(points), arrowstyle="-|>,head_length=2.6,head_width=1.5", fc=_INK, ec=_INK, lw=1.0,
        mutation_scale=1.3, shrinkA=0, shrinkB=0, zorder=2, capstyle="butt", joinstyle="miter",
    )  # fmt: skip
    axes.add_patch(arrow)


def _rounded(points: tuple[tuple[float, float], ...]) -> Any:
    from matplotlib.path import Path as Outline

    vertices, codes = [points[0]], [Outline.MOVETO]
    for before, at, after in zip(points, points[1:], points[2:], strict=False):
        vertices += [_towards(at, before), at, _towards(at, after)]
        codes += [Outline.LINETO, Outline.CURVE3, Outline.CURVE3]
    return Outline([*vertices, points[-1]], [*codes, Outline.LINETO])


def _towards(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    length = math.dist(start, end)
    share = min(_CORNER, length / 2) / length
    return (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]))
