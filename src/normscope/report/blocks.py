"""The block of a scheme as an SVG drawing in the manner of a paper: x enters at the bottom and goes up.

All lengths are in SVG units, so that boxes and letters have the same size in every panel and every figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from normscope.errors import InputError
from normscope.report.theme import FONT, LIGHT, STATIC_FONT, text_width

_COLUMNS = (4, 5, 6)
_LETTERS, _TITLE = 11.5, 13.5
_BOX, _FACTOR = 27.0, 19.0  # heights
_GAP = 15.0  # line between two things on the branch
_REST = 20.0  # line between two sublayers
_SIDE = 24.0  # from the trunk to the boxes of the branch
_BESIDE = 7.0  # from a line to the factor beside it
_CORNER = 7.0
_SUM = 8.0  # radius of ⊕
_PADDING, _BETWEEN = 19.0, 14.0  # inside and between the panels
_HEAD, _STAGE = 38.0, 16.0  # room for the title, and for the stage below it
_INK = "#1f2328"  # of letters in boxes, which are light on every screen
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


def blocks_svg(records: Sequence[Mapping[str, Any]], *, in_page: bool = False) -> str:
    """One panel for each scheme and stage, in a grid, all on the same scale.

    Args:
        records: a record for each sublayer, with the keys scheme, stage, sublayer, branch, carry and after
            (``normscope.schemes.block_records`` makes them).
        in_page: colours and letters of the page around it; otherwise those of a file.
    """
    panels = _panels(records)
    if not panels:
        raise InputError("no blocks to draw; give the records of at least one scheme")
    measures = _measures(panels)
    columns = _columns(len(panels))
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(map(_height, row)) for row in rows]
    width = measures.left + measures.right + 2 * _PADDING
    body, top = [], _BETWEEN
    for row, height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            place = f"{_BETWEEN + column * (width + _BETWEEN):.1f} {top:.1f}"
            body.append(f'<g transform="translate({place})">{_panel(panel, measures, width, height)}</g>')
        top += height + _BETWEEN
    across = columns * (width + _BETWEEN) + _BETWEEN
    return _document("".join(body), across, top, in_page)


def _document(body: str, width: float, height: float, in_page: bool) -> str:
    names = ("paper", "ink", "soft", "line", "shade")
    colours = {name: f"var(--{name})" if in_page else LIGHT[name] for name in names}
    ground = "" if in_page else f'<rect width="100%" height="100%" fill="{colours["paper"]}"/>'
    font = FONT if in_page else STATIC_FONT
    for name, colour in colours.items():
        body = body.replace(f"@{name}", colour)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {height:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" font-family="{font}" font-size="{_LETTERS}" stroke-width="1.3" role="img">{ground}{body}</svg>'
    )


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
    if text.startswith(("Norm", "tanh", "erf")):
        return "norm"
    return sublayer if sublayer in _FILL else "attention"  # mixers and cross-attention mix tokens, too


def _measures(panels: list[_Panel]) -> _Measures:
    sublayers = [sublayer for panel in panels for sublayer in panel.sublayers]
    steps = [(text, _kind(text, sublayer["sublayer"])) for sublayer in sublayers for text in sublayer["branch"]]
    afters = [sublayer["after"] for sublayer in sublayers if sublayer["after"]]
    boxed = [*(text for text, kind in steps if kind != "factor"), *afters]
    box = max((text_width(text, _LETTERS) for text in boxed), default=0) + 20
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


def _panel(panel: _Panel, measures: _Measures, width: float, height: float) -> str:
    trunk, floor = _PADDING + measures.left, height - _PADDING
    parts = [
        f'<rect x=".5" y=".5" width="{width - 1:.1f}" height="{height - 1:.1f}" rx="8" fill="@shade" stroke="@line"/>',
        _text(_PADDING, 25, panel.scheme, size=_TITLE, bold=True),
        _text(_PADDING, 44, panel.stage, colour="@soft") if panel.stage else "",
        _text(trunk, floor, "x", anchor="middle", size=_TITLE, italic=True),
    ]
    level = floor - 13
    for sublayer in panel.sublayers:
        drawn, level = _sublayer(sublayer, measures, trunk, level)
        parts.append(drawn)
    return "".join([*parts, _arrow((trunk, level), (trunk, level - _REST))])


def _sublayer(sublayer: Mapping[str, Any], measures: _Measures, trunk: float, bottom: float) -> tuple[str, float]:
    """One sublayer from ``bottom`` up, and the height at which the next begins."""
    fork = bottom - _REST
    total = fork - _branch_height(sublayer)
    parts = [
        f'<path d="M{trunk:.1f} {bottom:.1f}V{total + _SUM:.1f}" stroke="@ink" fill="none"/>',
        _branch(sublayer, measures, trunk, fork),
        _text(trunk - _BESIDE, (fork + total + _SUM) / 2 + 4, sublayer["carry"], anchor="end") if sublayer["carry"] else "",
        f'<circle cx="{trunk:.1f}" cy="{total:.1f}" r="{_SUM}" fill="@paper" stroke="@ink"/>',
        f'<path d="M{trunk - _SUM:.1f} {total:.1f}h{2 * _SUM}M{trunk:.1f} {total - _SUM:.1f}v{2 * _SUM}" stroke="@ink"/>',
    ]
    if not sublayer["after"]:
        return "".join(parts), total - _SUM
    end = total - _SUM - _GAP
    parts += [_arrow((trunk, total - _SUM), (trunk, end)), _box(sublayer["after"], "norm", (trunk, end), measures.box)]
    return "".join(parts), end - _BOX


def _branch(sublayer: Mapping[str, Any], measures: _Measures, trunk: float, fork: float) -> str:
    """The way from the fork through everything on the branch to the sum."""
    branch, parts = trunk + measures.branch, []
    begin, level = fork, fork - _GAP
    corner: list[tuple[float, float]] = [(trunk, fork)]
    for text in sublayer["branch"]:
        kind = _kind(text, sublayer["sublayer"])
        if kind == "factor":
            parts.append(_text(branch + _BESIDE, level + _GAP / 2 - _FACTOR / 2 + 4, text))
            level -= _FACTOR
            continue
        parts += [_arrow(*corner, (branch, begin), (branch, level)), _box(text, kind, (branch, level), measures.box)]
        corner, begin = [], level - _BOX
        level -= _BOX + _GAP
    return "".join([*parts, _arrow(*corner, (branch, begin), (branch, level), (trunk + _SUM, level))])


def _box(text: str, kind: str, bottom: tuple[float, float], width: float) -> str:
    x, y = bottom
    box = f'<rect x="{x - width / 2:.1f}" y="{y - _BOX:.1f}" width="{width:.1f}" height="{_BOX}" rx="5"'
    return f'{box} fill="{_FILL[kind]}" stroke="{_EDGE[kind]}"/>' + _text(
        x, y - _BOX / 2 + 4, text, anchor="middle", colour=_INK
    )


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    colour: str = "@ink",
    size: float = _LETTERS,
    bold: bool = False,
    italic: bool = False,
) -> str:
    style = ' font-weight="bold"' * bold + ' font-style="italic"' * italic + f' font-size="{size}"' * (size != _LETTERS)
    shown = escape(text).replace("@", "&#64;")  # which begins the name of a colour
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{style}>{shown}</text>'


def _arrow(*points: tuple[float, float]) -> str:
    """A line through the points, its right-angled turns rounded, with a head at its end."""
    way = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for before, at, after in zip(points, points[1:], points[2:], strict=False):
        (x0, y0), (x1, y1) = _towards(at, before), _towards(at, after)
        way += f"L{x0:.1f} {y0:.1f}Q{at[0]:.1f} {at[1]:.1f} {x1:.1f} {y1:.1f}"
    (x, y), (back_x, back_y) = points[-1], _towards(points[-1], points[-2])
    side_x, side_y = 0.5 * (back_y - y), 0.5 * (x - back_x)
    head = f"M{x:.1f} {y:.1f}L{back_x + side_x:.1f} {back_y + side_y:.1f}L{back_x - side_x:.1f} {back_y - side_y:.1f}Z"
    line = f'<path d="{way}L{back_x:.1f} {back_y:.1f}" stroke="@ink" fill="none"/>'
    return f'{line}<path d="{head}" fill="@ink"/>'


def _towards(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    length = abs(start[0] - end[0]) + abs(start[1] - end[1])  # lines run along the axes
    share = min(_CORNER, length / 2) / length if length else 0.0
    return (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]))
