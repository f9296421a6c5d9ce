"""A line chart by plotly, and the page of its own that every chart gets: it works from a file, without a network."""

import html
import math
from pathlib import Path
from typing import Any

from normscope.errors import MissingExtraError
from normscope.report.drawing import Drawing
from normscope.report.lines import Chart, Trace, traces

_INK, _SOFT, _GRID = "#1f2328", "#57606a", "#e4e7eb"
_MARKS = 8  # about as many markers on a line

# The bar of buttons offers to upload the chart unless told otherwise; these pages send nothing anywhere.
_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["sendChartToCloud", "sendDataToCloud", "lasso2d", "select2d"],
}

# The legend goes below where it would take the chart its width: on a narrow screen, or if its names are long.
_LEGEND = """
const chart = document.getElementById("{plot_id}");
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
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
html {{ height: 100%; }}
body {{ display: flex; flex-direction: column; box-sizing: border-box; height: 100%; max-width: 75rem;
  margin: 0 auto; padding: 1rem; font: 1rem/1.45 system-ui, sans-serif; color: #1f2328; background: #fff; }}
h1 {{ font-size: 1.25rem; margin: 0 0 .25rem; }}
p {{ margin: 0 0 .75rem; }}
p, small {{ color: #57606a; }}
main {{ flex: 1; min-height: 22rem; max-height: 44rem; }}
@media (max-width: 700px) {{ body {{ height: auto; }} main {{ flex: none; }} }}
</style>
</head>
<body>
<header><h1>{title}</h1><p>{caption}</p></header>
<main>{plot}</main>
<footer><small>{settings}</small></footer>
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
    letters = {"family": "system-ui, sans-serif", "size": 14, "color": _INK}
    return go.Figure(layout={"template": "none", "font": letters, "margin": {"l": 70, "r": 20, "t": 36, "b": 55}})


def page(figure: Any, chart: Drawing) -> str:
    """The figure in a page with the chart's words."""
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs="directory",
        include_mathjax=False,
        div_id="chart",
        default_height="100%",
        config=_CONFIG,
        post_script=_LEGEND,
    )
    words = {key: html.escape(getattr(chart, key)) for key in ("title", "caption", "settings")}
    return _PAGE.format(plot=plot, **words)


def write_script(folder: Path) -> None:
    """Put plotly's script into the folder, once for all its pages."""
    from plotly.offline import get_plotlyjs

    script = folder / "plotly.min.js"
    if not script.exists():
        script.write_text(get_plotlyjs(), encoding="utf-8")


def axis(label: str) -> dict[str, Any]:
    """The settings of an axis in the style of all charts."""
    return {
        "title": {"text": markup(label), "standoff": 12},
        "exponentformat": "power",
        "automargin": True,
        "gridcolor": _GRID,
        "zeroline": False,
        "linecolor": _SOFT,
        "ticks": "outside",
        "tickcolor": _SOFT,
    }


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
