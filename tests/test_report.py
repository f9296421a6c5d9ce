"""What the report room draws holds what it was given, and says so to every reader."""

import base64
import errno
import json
import math
import re
import subprocess
import sys
import warnings
from collections import Counter
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from normscope.errors import InputError
from normscope.report import (
    Chart,
    Line,
    PageTable,
    Picture,
    Section,
    draw_blocks,
    render_page,
    save_chart,
    save_figure,
)
from normscope.report.chart_html import write_script
from normscope.report.chart_png import draw_png
from normscope.results.lines import Look
from normscope.schemes import NAMED, block_records

LAYERS = [float(layer) for layer in range(20)]


def line(name: str, rate: float = 0.1, *, band: bool = False) -> Line:
    y = [math.exp(-rate * t) for t in LAYERS]
    return Line(name, LAYERS, y, [0.8 * v for v in y], [1.2 * v for v in y]) if band else Line(name, LAYERS, y)


def chart(*lines: Line, **options: Any) -> Chart:
    return Chart("Decay", "layer t", "1 − cosine", lines, "Peri decays faster than pre.", "64 tokens, seed 0", **options)


def traces(page: Path) -> list[dict[str, Any]]:
    """The traces that the page hands to plotly."""
    text = page.read_text(encoding="utf-8")
    start = re.search(r'Plotly\.newPlot\(\s*"chart",\s*', text)
    assert start is not None
    data, _ = json.JSONDecoder().raw_decode(text, start.end())
    assert isinstance(data, list)
    return data


class Reader(HTMLParser):
    """The elements of a page, and the text outside its style sheet and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._hidden = tag in {"style", "script"}

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def sources(self) -> list[str]:
        """Everything that a browser would load by itself."""
        loaded = {"script": "src", "link": "href", "img": "src", "iframe": "src"}
        found = [attributes.get(loaded[tag]) for tag, attributes in self.elements if tag in loaded]
        return [source for source in found if source]


# Charts


def test_the_picture_is_1200_pixels_wide_and_shows_the_lines(tmp_path: Path) -> None:
    picture, page = save_chart(chart(line("pre"), line("peri", 0.3)), tmp_path / "figures", "decay")
    assert (picture.name, page.name) == ("decay.png", "decay.html")
    with Image.open(picture) as image:
        assert image.width == 1200
        assert 600 <= image.height <= 1200
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=1 << 24) or []}
    for index in (0, 1):
        assert tuple(bytes.fromhex(Look(index).colour[1:])) in colours


def test_the_page_names_every_line_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    names = [*NAMED, "a < b & c"]
    _, page = save_chart(chart(*(line(name) for name in names)), tmp_path, "decay")
    text = page.read_text(encoding="utf-8")
    assert [trace["name"].replace("&lt;", "<").replace("&amp;", "&") for trace in traces(page)] == names
    reader = Reader(text)
    assert reader.sources()
    assert not [source for source in reader.sources() if "//" in source]
    assert "plotly.min.js" in reader.sources()
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000
    assert "http" not in text
    for words in ("Decay", "Peri decays faster than pre.", "64 tokens, seed 0"):
        assert words in reader.text


def test_the_script_of_pages_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str, **keywords: str) -> int:
        self.write_bytes(text[:1000].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            write_script(tmp_path)
    write_script(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plotly.min.js"]
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000


def test_values_reach_the_page_unchanged_and_gaps_stay_gaps(tmp_path: Path) -> None:
    y = [0.1, math.nan, 1 / 3, math.inf, 2e-300, -7.0]
    _, page = save_chart(chart(Line("a", range(6), y)), tmp_path, "gaps")
    first = traces(page)[0]
    assert first["x"] == list(range(6))
    assert first["y"] == [0.1, None, 1 / 3, None, 2e-300, -7.0]


def test_a_point_between_gaps_is_drawn_as_a_dot(tmp_path: Path) -> None:
    alone = chart(Line("a", [0, 1, 2, 3, 4], [0.5, math.nan, 0.7, math.nan, 0.9]))
    _, page = save_chart(alone, tmp_path, "dots")
    dots = [trace for trace in traces(page) if trace["mode"] == "markers"]
    assert [(trace["x"], trace["y"]) for trace in dots] == [([0, 2, 4], [0.5, 0.7, 0.9])]
    assert [0.5, 0.7, 0.9] in [list(drawn.get_ydata()) for drawn in draw_png(alone).axes[0].lines]


def test_a_band_is_drawn_in_both(tmp_path: Path) -> None:
    banded = chart(line("pre", band=True), line("peri"))
    assert len(draw_png(banded).axes[0].collections) == 1
    _, page = save_chart(banded, tmp_path, "band")
    (band,) = (trace for trace in traces(page) if trace.get("fill"))
    assert band["name"] == "pre"
    assert band["y"][: len(LAYERS)] == list(banded.lines[0].high or ())
    assert band["y"][len(LAYERS) : -1] == list(banded.lines[0].low or ())[::-1]


def test_a_band_breaks_at_gaps(tmp_path: Path) -> None:
    gap = chart(Line("a", [0, 1, 2, 3, 4], [1.0] * 5, [0.5, 0.5, math.nan, 0.5, 0.5], [2.0] * 5))
    _, page = save_chart(gap, tmp_path, "band")
    (band,) = (trace for trace in traces(page) if trace.get("fill"))
    assert band["x"] == [0, 1, 1, 0, None, 3, 4, 4, 3, None]


@pytest.mark.parametrize("y", [[0.0, 0.5, -1.0, 2.0], [0.0, 0.0, 0.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
def test_logarithmic_axes_leave_out_what_has_no_logarithm(tmp_path: Path, y: list[float]) -> None:
    banded = Line("a", [0, 1, 10, 100], y, [v - 1 for v in y], [v + 1 for v in y])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, page = save_chart(chart(banded, log_x=True, log_y=True), tmp_path, "log")
    drawn = next(trace for trace in traces(page) if not trace.get("fill"))
    assert drawn["x"] == [None, 1, 10, 100]
    assert drawn["y"] == [v if v > 0 else None for v in y]
    for trace in traces(page):
        assert all(value is None or value > 0 for value in trace["y"])


def test_a_chart_without_lines_is_still_a_chart(tmp_path: Path) -> None:
    picture, page = save_chart(chart(), tmp_path, "empty")
    assert picture.stat().st_size > 0
    assert traces(page) == []


def test_the_same_order_gives_a_name_the_same_look_everywhere(tmp_path: Path) -> None:
    names = list(NAMED)
    one = chart(*(line(name, band=True) for name in names))
    other = chart(*(line(name) for name in names), log_y=True)
    looks = []
    for number, drawn in enumerate((one, other)):
        _, page = save_chart(drawn, tmp_path, f"chart-{number}")
        found = [trace for trace in traces(page) if not trace.get("fill")]
        looks.append({trace["name"]: (trace["line"]["color"], trace["line"]["dash"]) for trace in found})
        legend = draw_png(drawn).axes[0].get_legend()
        assert legend is not None
        handles = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}
        assert {name: handle.get_color() for name, handle in handles.items()} == {  # type: ignore[union-attr]
            name: colour for name, (colour, _) in looks[-1].items()
        }
    assert looks[0] == looks[1]
    assert list(looks[0]) == names


def test_two_lines_of_one_name_share_their_look_and_their_legend(tmp_path: Path) -> None:
    _, page = save_chart(chart(line("pre"), line("peri"), line("pre", 0.5)), tmp_path, "twice")
    first, _, again = traces(page)
    assert first["line"] == again["line"]
    assert [trace["showlegend"] for trace in traces(page)] == [True, True, False]


def test_sixteen_lines_differ_without_colour() -> None:
    looks = [Look(index) for index in range(16)]
    assert len({(look.dash[1], look.marker[1]) for look in looks}) == 16
    assert len({(look.dash[1], look.colour) for look in looks}) == 16


def test_words_are_taken_as_they_stand() -> None:
    odd = "_under $x$ <b>"
    figure = draw_png(Chart(odd, odd, odd, (line(odd),), odd, odd))
    figure.canvas.draw()
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [odd]
    assert [text.get_text() for text in figure.texts] == [odd] * 3


@pytest.mark.parametrize("name", ["short", "a name that is far too long to stand at the right of a chart"])
@pytest.mark.parametrize("count", [1, 24])
def test_everything_stays_on_the_picture(name: str, count: int) -> None:
    long_words = "words that go on and on " * 12
    lines = tuple(line(f"{name} {number}") for number in range(count))
    figure = draw_png(Chart(long_words, "x", "y", lines, long_words, long_words))
    figure.canvas.draw()
    legend = figure.axes[0].get_legend()
    assert legend is not None
    width, height = figure.canvas.get_width_height()
    around = [text.get_window_extent() for text in (*figure.texts, figure.axes[0].xaxis.label)]
    for box in (*around, legend.get_window_extent()):
        assert 0 <= box.x0 <= box.x1 <= width + 1
        assert 0 <= box.y0 <= box.y1 <= height + 1
    assert not [box for box in around if box.overlaps(legend.get_window_extent())]


def test_a_line_says_what_is_wrong_with_it() -> None:
    with pytest.raises(InputError, match="3 values of x and 2 of y"):
        Line("a", [1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(InputError, match="both low and high"):
        Line("a", [1.0], [1.0], low=[0.0])


def test_a_chart_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the chart"):
        save_chart(chart(line("a")), tmp_path / "file", "name")


# Blocks


def all_records() -> list[dict[str, Any]]:
    return [record for scheme in NAMED.values() for record in block_records(scheme)]


def shown(axes: Any) -> list[Any]:
    return [text for text in axes.texts if text.get_text()]


def test_every_panel_says_exactly_what_its_records_say() -> None:
    records = all_records()
    figure = draw_blocks(records)
    panels = [(records[i], records[i + 1]) for i in range(0, len(records), 2)]
    assert len(figure.axes) == len(panels) == 16
    for axes, (attention, feedforward) in zip(figure.axes, panels, strict=True):
        expected = ["x", attention["scheme"], attention["stage"]]
        for record in (attention, feedforward):
            expected += [*record["branch"], record["carry"], record["after"]]
        assert Counter(text.get_text() for text in shown(axes)) == Counter(text for text in expected if text)


def test_no_text_overlaps_another_or_leaves_its_panel() -> None:
    figure = draw_blocks(all_records())
    figure.canvas.draw()
    for axes in figure.axes:
        panel = axes.get_window_extent()
        boxes = {text: text.get_window_extent() for text in shown(axes)}
        for one, other in combinations(boxes, 2):
            assert not boxes[one].overlaps(boxes[other]), (one, other)
        for text, box in boxes.items():
            assert panel.x0 <= box.x0 <= box.x1 <= panel.x1, text
            assert panel.y0 <= box.y0 <= box.y1 <= panel.y1, text


def test_a_token_passes_the_branch_from_the_bottom_up() -> None:
    attention, feedforward = block_records(NAMED["ngpt-lerp"])
    (axes,) = draw_blocks([attention, feedforward]).axes
    heights = [text.get_position()[1] for text in shown(axes) if text.get_text() in {"Norm(q, k)", "Attention", "Feed-forward"}]
    assert heights == sorted(heights)
    assert len(heights) == 3


def test_panels_have_one_scale_and_aligned_bottoms() -> None:
    figure = draw_blocks(all_records())
    assert len({tuple(round(size, 6) for size in axes.get_position().size[:1]) for axes in figure.axes}) == 1
    for axes in figure.axes:
        points = axes.get_window_extent().height / figure.dpi * 72
        assert points == pytest.approx(axes.get_ylim()[1])
    assert len({text.get_position() for axes in figure.axes for text in axes.texts if text.get_text() == "x"}) == 1


@pytest.mark.parametrize("count", [1, 6, 7, 13, 19])
def test_no_row_has_more_than_six_panels(count: int) -> None:
    records = [{**record, "scheme": f"pre-{n}"} for n in range(count) for record in block_records(NAMED["pre"])]
    figure = draw_blocks(records)
    rows = Counter(round(axes.get_position().y0, 6) for axes in figure.axes)
    assert sum(rows.values()) == count
    assert max(rows.values()) <= 6


def test_a_scheme_drawn_twice_has_two_panels() -> None:
    assert len(draw_blocks(block_records(NAMED["peri"]) * 2).axes) == 2


def test_records_read_back_from_a_table_are_drawn_alike(tmp_path: Path) -> None:
    import pandas as pd

    table = tmp_path / "blocks.parquet"
    pd.DataFrame(all_records()).to_parquet(table)
    again = draw_blocks([dict(row) for _, row in pd.read_parquet(table).iterrows()])  # type: ignore[misc]
    for one, other in zip(draw_blocks(all_records()).axes, again.axes, strict=True):
        assert [text.get_text() for text in one.texts] == [text.get_text() for text in other.texts]


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(InputError, match="no blocks"):
        draw_blocks([])


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_a_figure_is_saved_as_its_name_asks_and_always_the_same(tmp_path: Path, suffix: str, start: bytes) -> None:
    contents = []
    for name in ("one", "two"):
        save_figure(draw_blocks(block_records(NAMED["peri"])), tmp_path / (name + suffix))
        contents.append((tmp_path / (name + suffix)).read_bytes())
    assert contents[0].startswith(start)
    assert contents[0] == contents[1]


def test_a_figure_that_cannot_be_saved_says_why(tmp_path: Path) -> None:
    figure = draw_blocks(block_records(NAMED["pre"]))
    (tmp_path / "folder.png").mkdir()
    for name, message in (
        ("block.gif", r"\.png, \.svg or \.pdf"),
        ("block", r"\.png, \.svg or \.pdf"),
        ("absent/block.png", "there is no folder"),
        ("folder.png", "cannot draw to"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            save_figure(figure, tmp_path / name)
        assert "\n" not in str(caught.value)


# Pages


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "dot.png"
    Image.new("RGB", (40, 30), "white").save(path)
    return path


def test_a_page_embeds_its_pictures_and_loads_nothing(picture: Path) -> None:
    shown_picture = Picture('The "dot"', picture, "It is white.", "figures/a dot.html", "40 by 30")
    reader = Reader(render_page("Title", "Lead", [Section("One", (), pictures=(shown_picture,))], "Footer"))
    (image,) = reader.every("img")
    kind, _, content = str(image["src"]).partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content) == picture.read_bytes()
    assert image["alt"] == 'The "dot". It is white'
    assert (image["width"], image["height"]) == ("40", "30")
    assert all(source.startswith("data:") for source in reader.sources())
    assert [link["href"] for link in reader.every("a")] == ["figures/a%20dot.html"]
    for words in ('The "dot"', "It is white.", "40 by 30", "Title", "Lead", "Footer"):
        assert words in reader.text


def test_text_is_plain_wherever_it_stands(picture: Path) -> None:
    evil = "<script>alert(1)</script> & \"'"
    section = Section(evil, (evil,), (PageTable(evil, (evil,), ((evil,),)),), (Picture(evil, picture, evil, settings=evil),))
    page = render_page(evil, evil, [section, section], evil)
    reader = Reader(page)
    assert not reader.every("script")
    assert reader.text.count(evil) == 1 + 2 + 2 + 2 * (2 + 3 + 3) + 1


def test_contents_lead_to_the_sections() -> None:
    titles = ["Speed & spread", "Speed, spread", "α", "Speed & spread"]
    reader = Reader(render_page("Title", "", [Section(title, ("Text.",)) for title in titles]))
    links = [str(link["href"]) for link in reader.every("a")]
    identities = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert [link.removeprefix("#") for link in links] == [section["id"] for section in reader.every("section")]
    assert len(set(links)) == 4


def test_tables_have_a_caption_and_headers_for_rows_and_columns() -> None:
    rows = (("pre", "0.91", "none"), ("post", "−1.2e-3", "norm"), ("mix", "–", "12"))
    page = render_page("Title", "", [Section("One", (), (PageTable("Slots", ("scheme", "cosine", "stream"), rows),))])
    reader = Reader(page)
    assert [cell["scope"] for cell in reader.every("th")] == ["col"] * 3 + ["row"] * 3
    assert len(reader.every("caption")) == 1
    assert [cell.get("class") for cell in reader.every("td")] == ["number", None] * 3
    (region,) = (attributes for tag, attributes in reader.elements if attributes.get("class") == "scroll")
    assert region["aria-labelledby"] in [span.get("id") for span in reader.every("span")]


def test_a_page_does_not_repeat_what_a_chart_says_itself(tmp_path: Path) -> None:
    drawn = chart(line("pre"))
    png, _ = save_chart(drawn, tmp_path, "decay")
    own = Picture(drawn.title, png, drawn.caption, settings=drawn.settings)
    other = Picture(drawn.title, png, "Other words.")
    reader = Reader(render_page("Title", "", [Section("One", (), pictures=(own, other))]))
    said = [attributes.get("class") for tag, attributes in reader.elements if tag in {"strong", "span", "small"}]
    assert said == ["said", "said", "said", "said", None]


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [value / 255 for value in bytes.fromhex(digits)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_in_light_dark_and_print() -> None:
    palettes = re.findall(r":root \{([^}]*--paper[^}]*)\}", render_page("Title", "", []))
    assert len(palettes) == 3
    for palette in palettes:
        colours = dict(re.findall(r"--(\w+): (#\w+)", palette))
        for ground in ("paper", "shade"):
            for text in ("ink", "soft", "link"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground, palette)


def test_a_page_says_what_is_wrong_with_its_parts(tmp_path: Path, picture: Path) -> None:
    (tmp_path / "no.png").write_text("text")
    for png, link, message in (
        (tmp_path / "absent.png", None, "cannot read the picture"),
        (tmp_path / "no.png", None, "is not a PNG file"),
        (picture, "https://example.org", "relative"),
        (picture, "javascript:alert(1)", "relative"),
    ):
        with pytest.raises(InputError, match=message):
            render_page("Title", "", [Section("One", (), pictures=(Picture("Dot", png, "", link),))])
    with pytest.raises(InputError, match="2 columns and a row of 1"):
        PageTable("Slots", ("a", "b"), (("1",),))


# The room


def test_missing_libraries_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("plotly", "plotly.graph_objects", "jinja2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"needs plotly; pip install 'normscope\[report\]'"):
        save_chart(chart(line("a")), tmp_path, "decay")
    with pytest.raises(InputError, match=r"needs jinja2; pip install 'normscope\[report\]'"):
        render_page("Title", "", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decay.csv", "decay.png"]  # which need neither


def test_importing_the_room_loads_no_library_that_draws() -> None:
    code = "import sys, normscope.report; print({'matplotlib', 'plotly', 'jinja2', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
