"""Colours and sizes that all renderers share, for light and dark screens."""

from typing import Any

# Okabe-Ito without its yellow; the last one stands out from white and from black paper respectively.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Eight dashes tell lines apart without colour.
DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3), (12, 4), (2, 5), (9, 2, 2, 2, 2, 2), (5, 1))
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "soft": "#57606a",
    "line": "#d8dee4",
    "shade": "#f6f8fa",
    "empty": "#eceff2",
    "wire": "#c3cad2",
    "last": "#000000",
    "link": "#0059a8",
    "warning": "#a33300",
    "notice": "#0059a8",
    "ok": "#00694c",
}
DARK = {
    "paper": "#14181d",
    "ink": "#e4e8ec",
    "soft": "#a5afba",
    "line": "#343c45",
    "shade": "#1c2229",
    "empty": "#262d35",
    "wire": "#4b5560",
    "last": "#f2f4f6",
    "link": "#79b8ff",
    "warning": "#ff9e64",
    "notice": "#79b8ff",
    "ok": "#4fd1a1",
}
# Colours of steps along a trail, from plasma: its end is too light for white, its beginning too dark for black.
STEPS_ON_LIGHT = ("#0d0887", "#46039f", "#7401a8", "#9d189d", "#bf3984", "#da5a6a", "#ee7b51", "#fba238", "#fcce25")
STEPS_ON_DARK = ("#a62098", "#b83289", "#c8437b", "#d6556d", "#e3685f", "#ef7e50", "#f89540", "#fdb130", "#f7e425")
CLOUDS = ("#8c959f", "#56B4E9", "#D55E00", "#009E73")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
STATIC_FONT = "'DejaVu Sans', 'Liberation Sans', Arial, sans-serif"  # of files, wherever they are drawn

_NARROW, _WIDE = "ijlt.,:;'|!()[]{}f ·", "mwMW@%—→"


def theme_css() -> str:
    """The colours as variables of a style sheet: the screen's theme, or the one that ``data-theme`` of the root names."""
    light, dark = (
        " ".join(f"--{name}: {colour};" for name, colour in {**colours, **_line_variables(colours)}.items())
        for colours in (LIGHT, DARK)
    )
    return (
        f":root {{ color-scheme: light dark; --font: {FONT}; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}\n"
        f"@media screen {{ :root[data-theme=dark] {{ color-scheme: dark; {dark} }} "
        ":root[data-theme=light] { color-scheme: light; } }\n"
        "@media print { :root { color-scheme: light; } }\n"
    )


def _line_variables(colours: dict[str, str]) -> dict[str, str]:
    return {f"line-{i}": colour for i, colour in enumerate((*LINE_COLOURS, colours["last"]))}


def vega_config(colours: dict[str, str], font: str = STATIC_FONT) -> dict[str, Any]:
    """The look of all charts in these colours."""
    axis = {
        "labelColor": colours["ink"],
        "titleColor": colours["ink"],
        "tickColor": colours["soft"],
        "domainColor": colours["soft"],
        "gridColor": colours["line"],
        "gridOpacity": 0.7,
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 11,
        "labelOverlap": "greedy",
        "labelLimit": 120,
    }
    legend = {
        "labelColor": colours["ink"],
        "titleColor": colours["ink"],
        "titleFontWeight": "normal",
        "titleFontSize": 12,
        "labelFontSize": 11.5,
        "labelLimit": 520,
        "titleLimit": 260,
    }
    return {
        "font": font,
        "background": colours["paper"],
        "view": {"stroke": colours["line"]},
        "axis": axis,
        "legend": legend,
        "title": {"color": colours["ink"], "subtitleColor": colours["soft"], "anchor": "start", "fontSize": 15, "offset": 10},
        "text": {"color": colours["ink"]},
        "range": {"category": [*LINE_COLOURS, colours["last"]]},
    }


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """About how wide a line of text is, in the unit of ``size``; rather too wide than too narrow."""
    letters = sum(
        0.35 if c in _NARROW else 0.95 if c in _WIDE or ord(c) > 0x2E80 else 0.75 if c.isupper() else 0.62 for c in text
    )
    return size * letters * (1.1 if bold else 1.0)


def wrapped(text: str, size: float, width: float, *, bold: bool = False) -> list[str]:
    """The text in lines of at most ``width``, broken between words; no line for an empty text."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold=bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
