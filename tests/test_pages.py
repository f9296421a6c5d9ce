"""Pages of real runs, opened in a browser: nothing fails, everything is drawn and can be read, and numbers are the tables'."""

import io
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from PIL import Image

import test_cli_words
import test_report_sweep
from browser import CHROMIUM, Browser, chromium
from normscope.cli import main
from normscope.models import open_model
from normscope.report.stability import write_stability_report
from normscope.runs import RunFolder, open_run
from normscope.stability import findings, measure_clean, measure_noise
from normscope.stability.noise import disturbances

pytestmark = pytest.mark.slow
gpt2 = test_cli_words.gpt2
scan = test_report_sweep.scan

KINDS = ("stability", "simulate", "words", "subspaces", "audit", "compare", "advise", "sweep")
STILL = {"circuit", "block"}  # pictures without an interactive version
SHOWN_BY = {"Norm spread": "spread", "Norm noise": "noise-accuracy", "Fragile": "margins", "17.": "sparsity"}

# Every text that can be seen, with the contrast (WCAG 2) of its colour to what lies below it.
CONTRASTS = """(() => {
  const parts = colour => [...colour.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = element => {
    if (!element) return [255, 255, 255];
    const own = parts(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, ground(element.parentElement));
  };
  const linear = part => part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = colour => 0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2]);
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, style = getComputedStyle(element);
    if (!walk.currentNode.data.trim() || element.closest("script, style") || !element.checkVisibility()) continue;
    const below = ground(element);
    const colour = over(parts(element instanceof SVGElement ? style.fill : style.color), below);
    const [low, high] = [luminance(colour), luminance(below)].sort((one, other) => one - other);
    found.push([walk.currentNode.data.trim(), (high + 0.05) / (low + 0.05)]);
  }
  return found;
})()"""

# What plotly should have drawn and did not, by name, and how much it drew in two dimensions.
DRAWN = """(() => {
  const chart = document.querySelector(".js-plotly-plot");
  const seen = one => { const box = one.getBoundingClientRect(); return box.width + box.height > 0; };
  const there = (trace, i) => (trace.x[i] ?? null) !== null && (trace.y[i] ?? null) !== null;
  const next = trace => trace.mode.includes("markers") ? 0 : 1;  // a line needs two points
  const lines = [...chart.querySelectorAll(".scatterlayer .trace")];
  const missing = chart.data.filter((trace, place) =>
    trace.type === "scatter" && !trace.fill && trace.x.some((_, i) => there(trace, i) && there(trace, i + next(trace)))
    && ![...lines[place].querySelectorAll("path")].some(seen));
  const maps = [...chart.querySelectorAll(".heatmaplayer image")].filter(one => seen(one) && one.href.baseVal.length > 100);
  return {
    missing: missing.map(trace => trace.name),
    flat: lines.length + maps.length,
    wanted: chart.data.filter(trace => ["scatter", "heatmap"].includes(trace.type)).length,
    scene: chart.data.some(trace => trace.type === "scatter3d"),
  };
})()"""

# Whether nothing lies over the small print of a chart.
UNCOVERED = """(() => {
  const box = document.querySelector("footer").getBoundingClientRect();
  return document.elementFromPoint(box.x + 5, box.y + box.height / 2).closest("footer") !== null;
})()"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, gpt2: str, scan: test_report_sweep.Tables) -> dict[str, RunFolder]:
    """A run of each kind, as small as it can be."""
    folder = tmp_path_factory.mktemp("runs")
    _command("simulate", "--scheme", "post,pre", "--tokens", "6", "--layers", "--gradient", "--out", str(folder / "simulate"))
    _command("words", gpt2, "journey", test_cli_words.SENTENCE, "--out", str(folder / "words"))
    (folder / "cache").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        _command("audit", "builtin:addition-small-pre", "--examples", "8", "--out", str(folder / "audit"))
        models = ("builtin:addition-small-pre", "builtin:addition-small-qkv")
        _command("compare", *models, "--examples", "8", "--out", str(folder / "compare"))
    shape = ("--depth", "2", "--width", "32", "--heads", "4", "--context", "16", "--runs", "2", "--schemes", "pre,post,qkv")
    _command("advise", *shape, "--out", str(folder / "advise"))
    _command("subspaces", "world", "--schemes", "pre,qkv", "--types", "5", "--out", str(folder / "subspaces"))
    test_report_sweep.written(folder / "sweep", {"runs": scan[0], "curves": scan[1]}, list(test_report_sweep.GRID))
    (folder / "stability").mkdir()
    found = {kind: open_run(folder / kind) for kind in KINDS[1:]} | {"stability": RunFolder(folder / "stability")}
    _measure(found["stability"])
    return found


def _command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert not left.value.code


def _measure(run: RunFolder) -> None:
    """Stability of a small model, its findings with the figures that show them."""
    view = open_model("builtin:addition-small-pre")
    sample = view.sample(None, 8, 0)
    noise = measure_noise(view, sample, disturbances([0.01, 0.1], [0.1], view.layers))
    tables = {"noise": noise, **measure_clean(view, sample, levels=(0.03, 0.1, 0.3), draws=4)}
    tables["maps"] = next(rows for _, rows in tables["maps"].groupby(["layer", "head"]))
    said = findings(view, tables)
    figures = [next((figure for start, figure in SHOWN_BY.items() if text.startswith(start)), None) for text in said]
    for name, table in {**tables, "findings": pd.DataFrame({"text": said, "figure": figures})}.items():
        run.write_table(name, table)
    write_stability_report(run, "builtin:addition-small-pre; 8 examples; seed 0", ("html", "md"))


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome here: pages are not opened")
    with chromium() as browser:
        yield browser


def figure_names(run: RunFolder) -> list[str]:
    return sorted(path.stem for path in (run.path / "figures").glob("*.png"))


def assert_readable(tab: Browser) -> None:
    found = tab.run(CONTRASTS)
    assert len(found) >= 3
    assert not [(text, contrast) for text, contrast in found if contrast < 4.5]


# In the browser


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_opens_with_all_its_figures_and_loads_nothing_else(runs: dict[str, RunFolder], tab: Browser, kind: str) -> None:
    tab.look()
    tab.open(runs[kind].path / "report.html")
    assert not tab.errors
    assert all(address.startswith(("file:", "data:")) for address in tab.loaded)
    assert [address for address in tab.loaded if address.startswith("file:")] == [(runs[kind].path / "report.html").as_uri()]
    shown = tab.run("[...document.images].map(one => [one.complete, one.naturalWidth, one.closest('figure').id])")
    assert sorted(name for _, _, name in shown) == [f"figure-{name}" for name in figure_names(runs[kind])]
    assert all(complete and width >= (300 if name == "figure-block" else 1200) for complete, width, name in shown)


@pytest.mark.parametrize("kind", KINDS)
def test_every_link_leads_somewhere(runs: dict[str, RunFolder], tab: Browser, kind: str) -> None:
    tab.open(runs[kind].path / "report.html")
    links = tab.run("[...document.links].map(one => one.getAttribute('href'))")
    files = [unquote(link) for link in links if not link.startswith("#")]
    names = figure_names(runs[kind])
    wanted = [f"figures/{name}.{suffix}" for name in names for suffix in ("csv", "png")]
    assert sorted(files) == sorted(wanted + [f"figures/{name}.html" for name in names if name not in STILL])
    assert all((runs[kind].path / file).stat().st_size > 0 for file in files)
    for link in (link for link in links if link.startswith("#")):
        assert tab.run(f"location.hash = '{link}', document.querySelector(':target') !== null"), link
    if kind in ("stability", "audit", "compare"):
        figures = runs[kind].table("findings")["figure"].dropna()
        assert len(figures) >= 4
        assert tab.run("[...document.querySelectorAll('.findings a')].map(one => one.hash)") == [
            f"#figure-{f}" for f in figures
        ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("scheme", "width", "media"), [("light", 1200, ""), ("dark", 1200, ""), ("dark", 390, ""), ("dark", 800, "print")]
)
def test_a_page_can_be_read_everywhere(
    runs: dict[str, RunFolder], tab: Browser, kind: str, scheme: str, width: int, media: str
) -> None:
    tab.look(scheme, width, media)
    tab.open(runs[kind].path / "report.html")
    assert_readable(tab)
    dark = tab.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark" and media != "print")
    assert tab.run("document.documentElement.scrollWidth") <= width
    words = {text for text, _ in tab.run(CONTRASTS)}
    figure = "document.querySelector('figure:not(#figure-block)')"  # a block has no words of its own
    caption = tab.run(f"{figure}.querySelector('figcaption').textContent.trim().split('\\n')[0]")
    assert (caption in words) == (width < 700)  # a picture's own words are repeated where its letters are small


@pytest.mark.parametrize("kind", KINDS)
def test_every_interactive_figure_is_drawn_in_light_and_dark(runs: dict[str, RunFolder], tab: Browser, kind: str) -> None:
    shown_before = figure_names(runs["stability"]) if kind == "audit" else []
    for name in set(figure_names(runs[kind])) - STILL - set(shown_before):
        tab.look()
        tab.open(runs[kind].path / "figures" / f"{name}.html")
        assert not tab.errors, name
        assert {Path(unquote(one)).name for one in tab.loaded if one.startswith("file:")} == {f"{name}.html", "plotly.min.js"}
        assert all(address.startswith(("file:", "data:", "blob:")) for address in tab.loaded)
        drawn = tab.run(DRAWN)
        assert not drawn["missing"], name
        assert drawn["flat"] == drawn["wanted"], name
        assert drawn["flat"] or drawn["scene"], name
        assert tab.run(UNCOVERED), name
        for scheme in ("light", "dark"):
            tab.look(scheme)
            tab.settle()
            assert_readable(tab)
            ground = tab.run("getComputedStyle(document.querySelector('.main-svg')).backgroundColor")
            assert (ground == "rgb(255, 255, 255)") == (scheme == "light"), name
            if drawn["scene"]:
                assert colourful_pixels(tab) > 100
        assert not tab.errors, name


def colourful_pixels(tab: Browser) -> int:
    """Of a scene without its legend: how many pixels are neither black, white nor grey."""
    tab.run("document.querySelectorAll('.main-svg').forEach(one => one.style.visibility = 'hidden')")
    with Image.open(io.BytesIO(tab.picture())) as image:
        pixels = image.convert("HSV").get_flattened_data(1)
    tab.run("document.querySelectorAll('.main-svg').forEach(one => one.style.visibility = '')")
    return sum(saturation > 100 for saturation in pixels)


@pytest.mark.parametrize("name", ["stability/figures/spread", "stability/figures/sparsity", "words/figures/journey"])
def test_interactive_figures_fit_a_phone_and_print_on_white(runs: dict[str, RunFolder], tab: Browser, name: str) -> None:
    tab.look("dark", 390)
    page = runs[name.partition("/")[0]].path.parent / f"{name}.html"
    tab.open(page)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    assert_readable(tab)
    tab.look("dark", 800, "print")
    tab.settle()
    assert tab.run("getComputedStyle(document.querySelector('.main-svg')).backgroundColor") == "rgb(255, 255, 255)"
    assert_readable(tab)


# The numbers


class Tables(HTMLParser):
    """The tables of a page: caption → rows of cells, the heading first."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._caption, self._open = "", ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in {"td", "th"}:
            self._rows[-1].append("")
        self._open = tag if tag != "span" else self._open

    def handle_endtag(self, tag: str) -> None:
        self._open = ""
        if tag == "table":
            self.found[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if self._open in {"td", "th"}:
            self._rows[-1][-1] += data
        elif self._open == "caption":
            self._caption += data


def says(cell: str, value: float) -> bool:
    """Whether a cell shows a number, to as many places as it has."""
    if not re.match(r"[-−]?\d", cell):
        return not math.isfinite(value)
    mantissa, _, exponent = cell.replace(",", "").replace("−", "-").partition("e")
    places = len(mantissa.partition(".")[2])
    step = 10.0 ** (int(exponent or 0) - places)
    return abs(float(mantissa) * 10.0 ** int(exponent or 0) - value) <= 0.5000001 * step


def csv(run: RunFolder, name: str) -> pd.DataFrame:
    return pd.read_csv(run.path / "figures" / f"{name}.csv", keep_default_na=False, na_values=[""])


def same(one: "pd.Series[float]", other: "pd.Series[float]") -> bool:
    return one.tolist() == pytest.approx(other.tolist(), rel=1e-15, abs=0, nan_ok=True)


def test_the_numbers_of_a_simulation_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["simulate"]
    heading, *rows = Tables(run.path / "report.html").found["Time to collapse"]
    assert heading == ["scheme", "half way", "90% of the way"]
    milestones = run.table("milestones")
    assert [row[0] for row in rows] == list(milestones["scheme"]) == ["post", "pre"]
    for row, half, ninety in zip(rows, milestones["half"], milestones["ninety"], strict=True):
        assert says(row[1], half)
        assert says(row[2], ninety)
    curves = run.table("trajectories")
    for figure, x, y in (
        ("cosine", "time", "cosine"),
        ("rate", "time", "cosine_rate"),
        ("phase", "cosine", "cosine_rate"),
        ("radius", "time", "radius"),
    ):
        data = csv(run, figure)
        assert data["line"].tolist() == curves["scheme"].tolist()
        assert same(data.iloc[:, 1], curves[x])
        assert same(data.iloc[:, 2], curves[y])
    assert same(csv(run, "gradient").iloc[:, 2], run.table("gradients")["relative"])


def test_the_numbers_of_an_audit_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["audit"]
    motion, writes, replay = (run.table(name) for name in ("motion", "writes", "replay"))
    radius = csv(run, "motion-radius")
    for place, column in enumerate(("layer", "radius", "radius_low", "radius_high"), 1):
        assert same(radius.iloc[:, place], motion[column])
    for figure, column in (("motion-angle", "angle"), ("motion-speed", "speed")):
        data = csv(run, figure)
        for scheme, rows in replay.groupby("scheme"):
            assert same(data[data["line"] == f"as {scheme}"].iloc[:, 2], rows[column])
    assert same(csv(run, "motion-angle").query("line == 'this model'").iloc[:, 2], motion["angle"])
    assert same(csv(run, "motion-speed").query("line == 'this model, measured'").iloc[:, 2], writes["speed"])
    assert same(csv(run, "motion-speed").query("line == 'theory for its scheme'").iloc[:, 2], writes["theory"])
    for column in ("cosine", "rank"):
        data = csv(run, f"motion-{column}")
        assert same(data[data["line"].str.startswith("without")].iloc[:, 2], motion[column])
        assert same(data[data["line"].str.startswith("with ")].iloc[:, 2], motion[f"{column}_all"])


def test_the_numbers_of_a_comparison_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["compare"]
    numbers, curves = run.table("numbers"), run.table("curves")
    heading, *rows = Tables(run.path / "report.html").found["Side by side"]
    values = dict(zip(zip(numbers["number"], numbers["subject"], strict=True), numbers["value"], strict=True))
    assert len(rows) == numbers["number"].nunique()
    for row in rows:
        for subject, shown in zip(heading[1:], row[1:], strict=True):
            assert says(shown, values.get((re.sub(r" \(.\)$", "", row[0]), subject), math.nan))
    for figure, drawn in curves.groupby("quantity"):
        data = csv(run, str(figure))
        assert data["line"].tolist() == drawn["subject"].tolist()
        assert same(data.iloc[:, 2], drawn["y"])


def test_the_numbers_of_a_journey_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["words"]
    journey, places = run.table("journey"), run.table("places")
    (heading, *rows) = next(rows for caption, rows in Tables(run.path / "report.html").found.items() if "angles" in caption)
    columns = {
        "layer": "layer",
        "cosine": "nearest_cosine",
        "P": "predicted_probability",
        "turned": "angle",
        "travelled": "travelled",
        "from start": "from_start",
        "radius": "radius",
        "rank of expected": "rank",
        "P of expected": "probability",
    }
    assert set(columns) | {"nearest word", "would say"} == set(heading)
    for name, column in columns.items():
        cells = [row[heading.index(name)] for row in rows]
        assert all(says(cell, value) for cell, value in zip(cells, journey[column].astype(float), strict=True)), name
    assert same(csv(run, "journey-angle")["degrees"], journey["angle"])
    assert same(csv(run, "journey-radius")["|x|"], journey["radius"])
    scene = csv(run, "journey")
    for kind, name in (("path", "state of the token"), ("cloud", "other words"), ("word", "start and predicted word")):
        points, wanted = scene[scene["name"].str.endswith(name)], places[places["kind"] == kind]
        assert len(points) == len(wanted) > 0
        for k, axis in enumerate("xyz"):
            assert same(points.iloc[:, 3 + k], wanted[axis])


def test_the_numbers_of_stability_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["stability"]
    for figure, table, column in (("sparsity", "sparsity", "share"), ("margins", "margins", "margin")):
        rows = run.table(table)
        rows = rows[rows["head"].notna()].sort_values(["layer", "head"])
        data = csv(run, figure)
        assert data["layer"].tolist() == rows["layer"].tolist()
        assert data["head"].tolist() == rows["head"].tolist()
        assert same(data.iloc[:, 2], rows[column])
    noise = run.table("noise")
    data, rows = csv(run, "noise-loss"), noise[(noise["noise"] > 0) & noise["layer"].isna()]
    for (perturbed, where), group in rows.groupby(["perturbed", "where"]):
        line = data[data["line"] == f"{perturbed}, {where}"]
        assert same(line["loss"], group["loss"])
        assert same(line["high"], group["loss"] + group["loss_stderr"])
    (name,) = (name for name in figure_names(run) if name.startswith("map-"))
    data, maps = csv(run, name), run.table("maps")
    weights = data.set_index(["query number", "key number"])["weight"]
    assert same(weights.loc[list(zip(maps["query"], maps["key"], strict=True))], maps["weight"])
    assert weights.notna().sum() == len(maps)


def test_the_numbers_of_subspaces_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["subspaces"]
    pd.testing.assert_frame_equal(csv(run, "circuit"), run.table("selections"), check_dtype=False)
    _, *rows = Tables(run.path / "report.html").found["Where it breaks"]
    points = run.table("points")
    assert [row[:3] for row in rows] == points[["knob", "scheme", "part"]].to_numpy().tolist()
    for row, predicted, observed in zip(rows, points["predicted"], points["observed"], strict=True):
        factor = 100 if row[3].endswith("%") else 1
        assert says(row[3].strip("°±% "), factor * predicted)
        assert says(row[4].strip("°±% "), factor * observed)
    curves = run.table("curves")
    for knob in ("angle", "spread"):
        data = csv(run, f"circuit-{knob}")
        for scheme, rows in curves[curves["knob"] == knob].groupby("scheme"):
            assert same(data[data["line"] == scheme].iloc[:, -1], 100 * rows["solved"])


def test_the_page_and_its_markdown_say_the_findings_of_the_table(runs: dict[str, RunFolder], tab: Browser) -> None:
    run = runs["stability"]
    texts = run.table("findings")["text"].tolist()
    tab.open(run.path / "report.html")
    assert tab.run("[...document.querySelectorAll('.findings li')].map(one => one.firstChild.data.trim())") == texts
    tokens = MarkdownIt("commonmark").parse((run.path / "report.md").read_text(encoding="utf-8"))
    items = [tokens[i + 2].children or [] for i, token in enumerate(tokens) if token.type == "list_item_open"]
    said = ["".join(part.content for part in item if part.type in {"text", "text_special"}) for item in items]
    assert [one.partition(" Figure: ")[0] for one in said] == texts
