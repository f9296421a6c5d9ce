"""What a notebook shows of a result: summary, findings that matter, names of tables and figures; and a figure as PNG."""

import io
from collections.abc import Sequence
from html import escape

from normscope.report.files import figure_svg
from normscope.results.figures import Figure
from normscope.results.findings import Finding, card_html, most_important

_SCALE, _COLOURS = 2, 256


def render_summary(title: str, summary: str, findings: Sequence[Finding], tables: Sequence[str], figures: Sequence[str]) -> str:
    """HTML without scripts."""
    shown = most_important(findings) or list(findings)[:5]
    left = len(findings) - len(shown)
    names = {"tables": tables, "figures": figures}
    parts = [
        f"<h4 style='margin:0 0 .3em'>{escape(title)}</h4>",
        f"<p style='margin:0 0 .6em;opacity:.75'>{escape(summary)}</p>",
        *map(card_html, shown),
        f"<p style='opacity:.75'>{left} more findings in <code>.findings</code>.</p>" if left > 0 else "",
        *(
            f"<p style='margin:.2em 0'><b>{what}</b> {', '.join(f'<code>{escape(name)}</code>' for name in listed)}</p>"
            for what, listed in names.items()
            if listed
        ),
    ]
    return f"<div style='max-width:60em'>{''.join(parts)}</div>"


def render_picture(figure: Figure) -> tuple[bytes, int]:
    """A PNG with a palette, a tenth as large as one without, and the width to show it at, half its own."""
    import vl_convert
    from PIL import Image

    picture = Image.open(io.BytesIO(vl_convert.svg_to_png(figure_svg(figure), scale=_SCALE))).convert("RGB")
    file = io.BytesIO()
    picture.quantize(_COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue(), picture.width // _SCALE
