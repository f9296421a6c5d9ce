"""What the report renders holds what it was given, in every form, without a network and without a browser."""

import math
import re
import subprocess
import sys
import warnings
from collections import Counter
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image

from helpers.pages import Reader, points_of, spec_of
from normscope.errors import InputError
from normscope.report import render_page, save_figure, write_report
from normscope.report.blocks import blocks_svg
from normscope.report.charts import draw_chart
from normscope.report.files import figure_svg
from normscope.report.theme import DARK, DASHES, LIGHT, LINE_COLOURS, text_width
from normscope.report.write import Report
from normscope.results import Blocks, Chart, Figure, Finding, HeatMap, Line, PageTable, Panels, Scene, Scenes, Section, Trail
from normscope.schemes import NAMED, block_records

LAYERS = [float(layer) for layer in range(20)]


def line(name: str, rate: float = 0.1, *, band: bool = False) -> Line:
    y = [math.exp(-rate * t) for t in LAYERS]
    return Line(name, LAYERS, y, [0.8 * v for v in y], [1.2 * v for v in y]) if band else Line(name, LAYERS, y)


def chart(*lines: Line, **options: Any) -> Chart:
    return Chart("Decay", "layer t", "1 − cosine", lines, "Peri decays faster than pre.", "64 tokens, seed 0", **options)


def heat_map(rows: int = 3, columns: int = 4, **options: Any) -> HeatMap:
    values = [[(1 + y * columns + x) / 20 for x in range(columns)] for y in range(rows)]
    names = [str(x) for x in range(columns)], [str(y) for y in range(rows)]
    return HeatMap("Heads", "head", "layer", "share", *names, values, "Bright is much.", "seed 0", **options)


def scene() -> Scene:
    return Scene("Journey", (), (Trail("way", [(0.0, 0.0, 1.0), (0.0, 1.0, 0.0)], ["x", "y"], [3, 4]),), "See.", radius=1.0)


def every_figure() -> dict[str, Figure]:
    return {
        "chart": chart(line("pre", band=True), line("peri", 0.3)),
        "map": heat_map(),
        "scene": scene(),
        "scenes": Scenes("Spheres", [scene(), scene()], "Two of them."),
        "blocks": Blocks("Blocks", block_records(NAMED["peri"]), "Norms are yellow."),
        "panels": Panels("Both", [chart(line("pre")), heat_map()], "Side by side.", columns=2),
    }


# Charts


def test_names_keep_their_order_their_colours_and_their_dashes() -> None:
    names = list(NAMED)
    spec = spec_of(chart(*(line(name) for name in names)))
    assert spec["usermeta"]["names"] == names
    (drawn,) = (layer for layer in spec["layer"] if "strokeDash" in layer["encoding"])
    assert drawn["encoding"]["color"]["scale"]["domain"] == drawn["encoding"]["strokeDash"]["scale"]["domain"] == names
    assert len({(i % (len(LINE_COLOURS) + 1), i % len(DASHES)) for i in range(16)}) == 16  # sixteen lines differ
    assert len(set(DASHES)) == 8  # eight of them without colour


def test_values_have_five_digits_and_gaps_stay_gaps() -> None:
    y = [0.1, math.nan, 1 / 3, 2 / 3, math.inf, 2e-300, -7.0]
    points = points_of(chart(Line("a", range(7), y)))
    assert points["x"].tolist() == [0, 2, 3, 5, 6]
    assert points["y"].tolist() == [0.1, 0.33333, 0.66667, 2e-300, -7.0]
    assert points["g"].tolist() == [1, 2, 2, 3, 3]  # every piece is a stroke of its own
    assert points["k"].tolist() == [3, 0, 0, 0, 0]  # a point between gaps is a dot


def test_a_band_is_drawn_and_breaks_at_gaps() -> None:
    points = points_of(chart(Line("a", range(5), [1.0] * 5, [0.5, 0.5, math.nan, 0.5, 0.5], [2.0] * 5)))
    assert points["l"].isna().tolist() == points["h"].isna().tolist() == [False, False, True, False, False]
    areas = [layer for layer in spec_of(chart(line("a", band=True)))["layer"] if layer["mark"]["type"] == "area"]
    assert [(area["encoding"]["y"]["field"], area["encoding"]["y2"]["field"]) for area in areas] == [("l", "h")]


@pytest.mark.parametrize("y", [[0.0, 0.5, -1.0, 2.0], [0.0, 0.0, 0.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
def test_logarithmic_axes_leave_out_what_has_no_logarithm(y: list[float]) -> None:
    banded = chart(Line("a", [0, 1, 10, 100], y, [v - 1 for v in y], [v + 1 for v in y]), log_x=True, log_y=True)
    points = points_of(banded)
    assert points["y"].tolist() == [v for x, v in zip([0, 1, 10, 100], y, strict=True) if x > 0 and v > 0]
    assert (points[["x", "y"]].min() > 0).all() or points.empty
    assert points["l"].tolist() == (points["y"] - 1).tolist()  # the numbers of a band stay, wherever it is drawn
    for channel in ("x", "y"):
        low, high = spec_of(banded)["layer"][0]["encoding"][channel]["scale"]["domain"]
        assert 0 < low < high
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert figure_svg(banded).startswith("<svg")


def test_equal_axes_keep_a_circle_round_and_arrows_have_heads() -> None:
    turn = [2 * math.pi * i / 50 for i in range(51)]
    circle = Line("circle", [5 * math.cos(t) for t in turn], [2 * math.sin(t) for t in turn])
    drawn = draw_chart(chart(circle, Line("to", [0, 5], [0, 0], arrow=True), equal=True)).to_dict()
    assert drawn["height"] / drawn["width"] == pytest.approx(4 / 10, rel=1e-2)
    heads = [layer for layer in drawn["layer"] if layer["mark"].get("shape") == "triangle"]
    assert len(heads) == 1


def test_a_line_says_what_is_wrong_with_it() -> None:
    with pytest.raises(InputError, match="3 values of x and 2 of y"):
        Line("a", [1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(InputError, match="both low and high"):
        Line("a", [1.0], [1.0], low=[0.0])


# Heat maps


def test_a_heat_map_holds_its_values_and_empty_cells_none() -> None:
    values = [[0.0, math.nan], [math.inf, 1 / 3]]
    heat = HeatMap("Heads", "head", "layer", "share", ["0", "1"], ["0", "1"], values, "", heads=True)
    assert points_of(heat).to_numpy().tolist() == [[0, 0, 0], [1, 1, 0.33333]]
    assert spec_of(heat)["usermeta"] == {
        "layers": ["0", "1"], "heads": ["0", "1"], "label": "share", "columns": 2, "rows": 2, "head": None,
    }  # fmt: skip
    rows = spec_of(heat)["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert rows == [1, 0]  # from the bottom


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("value", [math.nan, 0.0, 0.5])
def test_colours_need_no_second_value(value: float, log: bool) -> None:
    heat = HeatMap("One", "x", "y", "z", ["0"], ["0"], [[value]], "", log=log)
    low, high = heat.colour_limits
    assert low < high
    assert figure_svg(heat).startswith("<svg")


def test_a_heat_map_says_what_is_wrong_with_it() -> None:
    with pytest.raises(InputError, match="needs 1 rows of 2 values"):
        HeatMap("Heads", "head", "layer", "share", ["0", "1"], ["0"], [[1.0]], "")
    with pytest.raises(InputError, match="has no cells"):
        HeatMap("Heads", "head", "layer", "share", [], [], [], "")


# Blocks


def all_records() -> list[dict[str, Any]]:
    return [record for scheme in NAMED.values() for record in block_records(scheme)]


def texts_of(svg: str) -> list[list[tuple[str, float, float, str, float]]]:
    """For each panel its texts: content, x, y, anchor and size."""
    panels = svg.split("<g transform")[1:]
    pattern = r'<text x="([\d.-]+)" y="([\d.-]+)" text-anchor="(\w+)"([^>]*)>([^<]*)</text>'
    found = []
    for panel in panels:
        size = [re.search(r'font-size="([\d.]+)"', more) for *_, more, _ in re.findall(pattern, panel)]
        rows = zip(re.findall(pattern, panel), size, strict=True)
        found.append([(text, float(x), float(y), anchor, float(s[1]) if s else 11.5) for (x, y, anchor, _, text), s in rows])
    return found


def test_every_panel_says_exactly_what_its_records_say() -> None:
    records = all_records()
    panels = texts_of(blocks_svg(records))
    pairs = [(records[i], records[i + 1]) for i in range(0, len(records), 2)]
    assert len(panels) == len(pairs) == sum(len(list(scheme.stages)) for scheme in NAMED.values())
    for texts, (attention, feedforward) in zip(panels, pairs, strict=True):
        expected = ["x", attention["scheme"], attention["stage"]]
        for record in (attention, feedforward):
            expected += [*record["branch"], record["carry"], record["after"]]
        assert Counter(text.replace("&lt;", "<") for text, *_ in texts) == Counter(text for text in expected if text)


def test_no_text_of_a_block_overlaps_another() -> None:
    for texts in texts_of(blocks_svg(all_records())):
        boxes = []
        for text, x, y, anchor, size in texts:
            width = text_width(text, size)
            left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
            boxes.append((left, y - 0.8 * size, left + width, y + 0.2 * size, text))
        for one, other in combinations(boxes, 2):
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)


def test_a_token_passes_the_branch_from_the_bottom_up() -> None:
    (texts,) = texts_of(blocks_svg(block_records(NAMED["ngpt-lerp"])))
    heights = [y for text, _, y, *_ in texts if text in {"Norm(q, k)", "Attention", "Feed-forward"}]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == 3


@pytest.mark.parametrize("count", [1, 6, 7, 13, 19])
def test_no_row_has_more_than_six_panels(count: int) -> None:
    records = [{**record, "scheme": f"pre-{n}"} for n in range(count) for record in block_records(NAMED["pre"])]
    rows = Counter(re.findall(r'<g transform="translate\([\d.]+ ([\d.]+)\)">', blocks_svg(records)))
    assert sum(rows.values()) == count
    assert max(rows.values()) <= 6


def test_records_read_back_from_a_table_are_drawn_alike(tmp_path: Path) -> None:
    table = tmp_path / "blocks.parquet"
    pd.DataFrame(all_records()).to_parquet(table)
    again = [{str(key): value for key, value in row.items()} for row in pd.read_parquet(table).to_dict("records")]
    assert blocks_svg(again) == blocks_svg(all_records())
    assert len(texts_of(blocks_svg(block_records(NAMED["peri"]) * 2))) == 2


def test_odd_names_of_schemes_are_plain_text_and_nothing_is_an_error() -> None:
    svg = blocks_svg([{**record, "scheme": "@ink<b>&"} for record in block_records(NAMED["pre"])])
    assert "&#64;ink&lt;b&gt;&amp;" in svg
    with pytest.raises(InputError, match="no blocks"):
        blocks_svg([])


# Files


@pytest.mark.parametrize("name", list(every_figure()))
@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG"), (".html", b"<!")]
)
def test_every_figure_becomes_every_file_and_always_the_same(tmp_path: Path, name: str, suffix: str, start: bytes) -> None:
    contents = []
    for copy in ("one", "two"):
        path = save_figure(every_figure()[name], tmp_path / (copy + suffix))
        contents.append(path.read_bytes())
    assert contents[0].startswith(start)
    if suffix != ".pdf":  # which says when it was made
        assert contents[0] == contents[1]


def test_a_picture_is_large_enough_and_shows_the_lines() -> None:
    import vl_convert

    png = vl_convert.svg_to_png(figure_svg(every_figure()["chart"]), scale=2)
    with Image.open(BytesIO(png)) as image:
        assert image.width >= 1200
        colours = {colour for _, colour in image.convert("RGB").getcolors(maxcolors=1 << 24) or []}
    for colour in LINE_COLOURS[:2]:
        assert tuple(bytes.fromhex(colour[1:])) in colours


def test_words_are_taken_as_they_are_written() -> None:
    odd = "_under $x$ <b>"
    svg = figure_svg(Chart(odd, odd, odd, (line(odd),), odd, odd))
    assert svg.count("_under $x$ &lt;b&gt;") >= 6  # title, caption, small print, both axes, legend


def test_a_figure_that_cannot_be_saved_says_why(tmp_path: Path) -> None:
    figure = every_figure()["blocks"]
    (tmp_path / "folder.png").mkdir()
    for name, message in (
        ("block.gif", r"\.png, \.svg, \.pdf"),
        ("block", r"\.png, \.svg, \.pdf"),
        ("absent/block.png", "there is no folder"),
        ("folder.png", "cannot draw to"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            save_figure(figure, tmp_path / name)
        assert "\n" not in str(caught.value)


def test_scenes_stand_side_by_side_with_one_bar_and_no_names_of_thin_trails() -> None:
    ways = [[(1.0, 0.0, 0.0), (0.0, 1.0, 0.0)], [(0.0, 0.0, 1.0), (0.0, 1.0, 0.0)]]
    scenes = [
        Scene(name, (), tuple(Trail(f"token {i}", way, thin=True) for i, way in enumerate(ways)), f"of {name}", radius=1.0)
        for name in ("post", "pre")
    ]
    svg = figure_svg(Scenes("Spheres", scenes, "Together."))
    texts = {words: (float(x), float(y)) for x, y, words in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)<', svg)}
    assert texts["pre"][0] > texts["post"][0]
    assert texts["pre"][1] == texts["post"][1]
    assert {"of post", "of pre", "Together.", "step"} <= set(texts)
    assert "token" not in svg
    assert svg.count("<linearGradient") == 1
    assert svg.count("<circle") == 4  # one for each token, where its way ends


# Pages


def test_a_page_holds_its_figures_and_loads_nothing() -> None:
    figures = every_figure()
    page = render_page("Title", "Lead", [Section("One", figures=figures)], facts=[("layers", "30")], footer="Footer")
    reader = Reader(page)
    assert reader.figures == list(figures)
    assert all(source.startswith("data:") for source in reader.sources())
    assert [plot["name"] for plot in reader.plots] == ["chart", "map", "scene", "scenes", "scenes", "panels", "panels"]
    for figure in figures.values():
        assert figure.title in reader.text
        assert figure.caption in reader.text
    for words in ("Title", "Lead", "layers", "30", "64 tokens, seed 0", "Footer"):
        assert words in reader.text
    assert len(page.encode()) < 1_100_000


def test_text_is_plain_wherever_it_stands() -> None:
    evil = "<script>alert(1)</script> & \"'"
    drawn = Chart(evil, evil, evil, (Line(evil, [0, 1], [0, 1]),), evil, evil + "!")
    section = Section(evil, (evil,), (PageTable(evil, (evil,), ((evil,),)),), {"evil": drawn}, (Finding(evil),))
    page = render_page(
        evil, evil, [section, section], facts=[(evil, evil)], findings=[Finding(evil, title=evil, weight=1)], footer=evil
    )
    reader = Reader(page)
    assert len(reader.every("script")) == 3  # data, Vega, and ours
    assert reader.text.count(evil) == 3 + 2 + 2 + 2 + 2 * (1 + 1 + 3 + 3 + 1) + 1


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
    reader = Reader(render_page("Title", "", [Section("One", (), (PageTable("Slots", ("scheme", "cosine", "stream"), rows),))]))
    assert [cell["scope"] for cell in reader.every("th") if "scope" in cell] == ["col"] * 3 + ["row"] * 3
    assert len(reader.every("caption")) == 1
    assert [cell.get("class") for cell in reader.every("td")] == ["number", None] * 3
    (region,) = (attributes for tag, attributes in reader.elements if attributes.get("class") == "scroll")
    assert region["aria-labelledby"] in [span.get("id") for span in reader.every("span")]
    with pytest.raises(InputError, match="2 columns and a row of 1"):
        PageTable("Slots", ("a", "b"), (("1",),))


def test_five_findings_are_cards_and_the_others_are_folded() -> None:
    findings = [Finding(f"Finding {i}.", title=f"Card {i}", severity="warning" if i == 7 else "ok", weight=i) for i in range(8)]
    page = render_page(
        "Title", "", [Section("One", figures={"map": heat_map()})], findings=[*findings, Finding("Plain.", "map")]
    )
    cards = re.findall(r'<li class="finding (\w+)">\s*<h3><span class="badge">\w+</span>([^<]+)</h3>', page)
    assert cards == [("warning", "Card 7"), *(("ok", f"Card {i}") for i in (6, 5, 4, 3))]
    folded = page[page.index("4 more findings") :]
    assert all(f"Finding {i}." in folded for i in range(3))
    assert '<a href="#figure-map">Figure: Heads</a>' in folded


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [value / 255 for value in bytes.fromhex(colour[1:])]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_stands_out_in_light_and_dark(theme: dict[str, str]) -> None:
    for ground in ("paper", "shade"):
        for text in ("ink", "soft", "link", "warning", "notice", "ok"):
            assert contrast(theme[text], theme[ground]) >= 4.5, (text, ground)
    for colour in (*LINE_COLOURS, theme["last"]):
        assert contrast(colour, theme["paper"]) >= 2.2, colour


# Reports on disk


@pytest.mark.parametrize(
    ("formats", "wanted"),
    [
        (("html",), {"report.html"}),
        (("md",), {"report.md", "figures/map.png"}),
        (("png",), {"report.html", "figures/map.png"}),
        (("html", "md", "csv"), {"report.html", "report.md", "figures/map.png", "figures/map.csv"}),
    ],
)
def test_a_report_has_the_files_that_were_asked_for(tmp_path: Path, formats: tuple[str, ...], wanted: set[str]) -> None:
    pages = write_report(tmp_path, Report("Title", "Lead", [Section("One", figures={"map": heat_map()})]), formats)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == wanted
    assert {path.name for path in pages} == {name for name in wanted if "/" not in name}


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown format 'htm'; allowed: html, md, png, csv; did you mean 'html'\?"):
        write_report(tmp_path, Report("Title", "", []), ("htm",))
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the report"):
        write_report(tmp_path / "file", Report("Title", "", [Section("One", figures={"map": heat_map()})]), ("csv",))


def test_importing_the_package_loads_no_library_that_draws() -> None:
    code = "import sys, normscope.report; print({'altair', 'vl_convert', 'jinja2', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
