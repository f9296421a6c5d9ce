"""A line chart by plotly, and the page of its own that every chart gets: it works from a file, without a network."""

import html
import json
import math
from pathlib import Path
from typing import Any

from normscope.errors import MissingExtraError
from normscope.results.drawing import Drawing
from normscope.results.lines import Chart, Look, Trace, traces
from normscope.results.scene import ORDER_COLOURS, ORDER_COLOURS_ON_DARK

PAPER, INK, SOFT, GRID, WIRE, EMPTY = "#ffffff", "#1f2328", "#57606a", "#e4e7eb", "#c3cad2", "#dfe3e8"
# What these and the darkest colours of lines and trails become on a dark screen, so that they still stand out.
_DARK = {
    PAPER: "#14181d",
    INK: "#e4e8ec",
    SOFT: "#a5afba",
    GRID: "#343c45",
    WIRE: "#4b5560",
    EMPTY: "#262d35",
    Look(6).colour: "#f2f4f6",
    **dict(zip(ORDER_COLOURS, ORDER_COLOURS_ON_DARK, strict=True)),
}
_MARKS = 8  # about as many markers on a line

# The bar of buttons offers to upload the chart unless told otherwise; these pages send nothing anywhere.
_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["sendChartToCloud", "sendDataToCloud", "lasso2d", "select2d"],
}

# Colours follow the screen, and printing is on white paper. Then the legend: it goes below where it would take the chart its
# width, on a narrow screen or if its names are long.
_SCRIPT = """
const chart = document.getElementById("{plot_id}");
const dark = matchMedia("screen and (prefers-color-scheme: dark)");
const darker = new Map(COLOURS), lighter = new Map(COLOURS.map(([light, dark]) => [dark, light]));
const repaint = (part, colours, isColour) =>
  typeof part === "string" ? (isColour && colours.get(part.toLowerCase())) || part
  : Array.isArray(part) ? part.map(one => repaint(one, colours, isColour))
  : part && part.constructor === Object
    ? Object.fromEntries(Object.entries(part).map(([key, one]) => [key, repaint(one, colours, /color/.test(key))]))
  : part;
const follow = () => {
  const colours = dark.matches ? darker : lighter;
  Plotly.react(chart, repaint(chart.data, colours), repaint(chart.layout, colours));
};
if (dark.matches) follow();
dark.addEventListener("change", follow);
const names = chart.data.filter(trace => trace.showlegend).map(trace => trace.name.length);
const longest = Math.max(0, ...names);
if (window.innerWidth < 700 || longest > 40) {
  const below = 32 * (longest > 13 ? names.length : Math.ceil(names.length / 2));
  chart.closest("main").style.height = chart.closest("main").style.maxHeight = 420 + below + "px";
  Plotly.relayout(chart, {
    "legend.orientation": "h", "legend.yref": "container", "legend.y": 0, "legend.yanchor": "bottom",
    "margin.l": 55, "margin.r": 5, "margin.b": 65 + below, "height": 420 + below
  });
}
""".replace("COLOURS", json.dumps([[light.lower(), dark] for light, dark in _DARK.items()]))

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --paper: {paper}; --ink: {ink}; --soft: {soft}; }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ --paper: {dark_paper}; --ink: {dark_ink}; --soft: {dark_soft}; }} }}
html {{ height: 100%; background: var(--paper); }}
body {{ display: flex; flex-direction: column; box-sizing: border-box; height: 100%; max-width: 75rem;
  margin: 0 auto; padding: 1rem; font: 1rem/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); }}
h1 {{ font-size: 1.25rem; margin: 0 0 .25rem; }}
p {{ margin: 0 0 .75rem; }}
p, small {{ color: var(--soft); }}
footer {{ order: 1; }} /* below the chart, which asks for its height when the footer is there */
main {{ flex: 1; min-height: 22rem; max-height: 44rem; }}
@media (max-width: 700px) {{ body {{ height: auto; }} main {{ flex: none; }} }}
</style>
</head>
<body>
<header><h1>{title}</h1><p>{caption}</p></header>
<footer><small>{settings}</small></footer>
<main>{plot}</main>
</body>
</html>
"""


def draw_html(chart: Chart) -> str:
    """The page; it looks for plotly's script beside itself."""
    figure = new_figure()
    for trace in traces(chart):
        _add(figure, trace)
    figure.update_layout(
        xaxis={**axis(chart.x_label), "type": "log" if chart.log_x else "linear"},
        yaxis={
            **axis(chart.y_label),
            "type": "log" if chart.log_y else "linear",
            **({"scaleanchor": "x", "constrain": "domain"} if chart.equal else {}),
            **({"range": _range(chart.limits, log=chart.log_y)} if chart.limits else {}),
        },
        legend={"itemwidth": 50},
        showlegend=True,
        hovermode="closest",
    )
    return page(figure, chart)


def new_figure() -> Any:
    """An empty figure of plotly in the style of all charts."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise MissingExtraError("an interactive chart needs plotly; pip install 'normscope[report]'") from error
    letters = {"family": "system-ui, sans-serif", "size": 14, "color": INK}
    ground = {"paper_bgcolor": PAPER, "plot_bgcolor": PAPER, "margin": {"l": 70, "r": 20, "t": 36, "b": 55}}
    return go.Figure(layout={"template": "none", "font": letters, **ground})


def page(figure: Any, chart: Drawing) -> str:
    """The figure in a page with the chart's words."""
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs="directory",
        include_mathjax=False,
        div_id="chart",
        default_height="100%",
        config=_CONFIG,
        post_script=_SCRIPT,
    )
    words = {key: html.escape(getattr(chart, key)) for key in ("title", "caption", "settings")}
    colours = {"paper": PAPER, "ink": INK, "soft": SOFT}
    return _PAGE.format(plot=plot, **words, **colours, **{f"dark_{key}": _DARK[colour] for key, colour in colours.items()})


def write_script(folder: Path) -> None:
    """Put plotly's script into the folder, once for all its pages, whole or not at all."""
    from plotly.offline import get_plotlyjs

    script, partial = folder / "plotly.min.js", folder / ".plotly.min.js.partial"
    if not script.exists():
        partial.write_text(get_plotlyjs(), encoding="utf-8")
        partial.replace(script)


def axis(label: str) -> dict[str, Any]:
    """The settings of an axis in the style of all charts."""
    return {
        "title": {"text": markup(label), "standoff": 12},
        "exponentformat": "power",
        "automargin": True,
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": SOFT,
        "ticks": "outside",
        "tickcolor": SOFT,
    }


def bar_style() -> dict[str, Any]:
    """The settings of a bar that explains colours, in the style of all charts."""
    return {"outlinecolor": SOFT, "tickcolor": SOFT}


def _add(figure: Any, trace: Trace) -> None:
    look = trace.look
    shared = {"name": markup(trace.name), "legendgroup": markup(trace.name)}
    symbol = {"symbol": look.marker[1] or "circle", "size": 4 if trace.thin else 8, "color": look.colour}
    dash = {"dash": "solid", "width": 0.8} if trace.thin else {"dash": "solid" if trace.arrow else look.dash[1], "width": 2.2}
    if trace.bands:
        # One outline for each piece, up along one edge and back along the other; None keeps them apart.
        x = [v for band in trace.bands for v in (*band.x, *reversed(band.x), None)]
        y = [v for band in trace.bands for v in (*band.high, *reversed(band.low), None)]
        fill = {"fill": "toself", "fillcolor": look.colour, "opacity": 0.15, "line": {"width": 0}}
        figure.add_scatter(x=x, y=y, mode="lines", hoverinfo="skip", showlegend=False, **fill, **shared)
    figure.add_scatter(
        x=[None if math.isnan(v) else v for v in trace.x],
        y=[None if math.isnan(v) else v for v in trace.y],
        mode="lines+markers" if trace.arrow or (look.marker[1] and not trace.thin) else "lines",
        line={"color": look.colour, **dash},
        marker=_arrow_head(trace) if trace.arrow else {**symbol, "maxdisplayed": _MARKS},
        showlegend=trace.first,
        **shared,
    )
    if any(trace.lonely):
        x_alone, y_alone = trace.lonely
        figure.add_scatter(x=x_alone, y=y_alone, mode="markers", marker=symbol, showlegend=False, **shared)


def _range(limits: tuple[float, float], *, log: bool) -> list[float]:
    """The ends of an axis; plotly gives those of a logarithmic one as powers of ten."""
    return [math.log10(limit) if log else limit for limit in limits]


def _arrow_head(trace: Trace) -> dict[str, Any]:
    """A marker at the last point, turned the way the line comes."""
    sizes = [0] * (len(trace.x) - 1) + [14]
    return {"symbol": "arrow", "angleref": "previous", "size": sizes, "color": trace.look.colour}


def markup(text: str) -> str:
    """Text for plotly, which reads some HTML in its labels."""
    return html.escape(text, quote=False)
