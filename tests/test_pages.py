"""Pages of real runs, opened in a browser: nothing fails, everything is drawn and can be read, and numbers are the tables'."""

import io
import math
import re

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from PIL import Image

import normscope as ns
from helpers.browser import Tab, assert_readable
from helpers.gpt2 import SENTENCE, save_gpt2
from helpers.pages import PageTables, read_page, says
from normscope.cli import main
from normscope.runs import RunFolder, open_run

pytestmark = pytest.mark.slow

KINDS = ("stability", "simulate", "words", "subspaces", "audit", "compare", "advise", "sweep")

# Draws all figures, wherever they are on the page.
DRAW = """(async () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  for (const figure of normscope.plots.values()) if (!figure.drawn) normscope.draw(figure);
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  while ([...normscope.plots.values()].some(figure => !figure.view && !figure.scene)) await frame();
  await frame();  // in which figures that got another width are drawn again
})()"""

# For each figure its name and how many marks its picture has; a canvas counts the colours of its pixels.
DRAWN = """[...normscope.plots.values()].map(figure => {
  const canvas = figure.scene ? figure.scene.picture() : figure.plot.querySelector("canvas");
  const marks = "svg [role=graphics-symbol], svg .mark-rect path, svg .mark-line path";
  if (!canvas) return [figure.name, figure.plot.querySelectorAll(marks).length];
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
  const pen = copy.getContext("2d");
  pen.drawImage(canvas, 0, 0);
  const pixels = new Uint32Array(pen.getImageData(0, 0, copy.width, copy.height).data.buffer);
  return [figure.name, new Set(pixels).size - 1];
})"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    """A run of each kind, as small as it can be."""
    folder = tmp_path_factory.mktemp("runs")
    gpt2 = save_gpt2(tmp_path_factory.mktemp("gpt2"))
    tokens = ("--tokens", "6", "--dim", "3", "--start", "uniform", "--layers", "--gradient")  # in three dimensions: spheres
    _command("simulate", "--scheme", "post,pre", *tokens, "--out", str(folder / "simulate"))
    _command("words", gpt2, "journey", SENTENCE, "--out", str(folder / "words"))
    (folder / "cache").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        _command("audit", "builtin:addition-small-pre", "--examples", "8", "--out", str(folder / "audit"))
        models = ("builtin:addition-small-pre", "builtin:addition-small-qkv")
        _command("compare", *models, "--examples", "8", "--out", str(folder / "compare"))
    shape = ("--depth", "2", "--width", "32", "--heads", "4", "--context", "16", "--runs", "2", "--schemes", "pre,post,qkv")
    _command("advise", *shape, "--out", str(folder / "advise"))
    _command("subspaces", "world", "--schemes", "pre,qkv", "--types", "5", "--out", str(folder / "subspaces"))
    noise = ("--levels", "0.03,0.1,0.3", "--noise-levels", "0.01,0.1", "--examples", "8", "--format", "html,md")
    _command("stability", "builtin:addition-small-pre", *noise, "--out", str(folder / "stability"))
    plan = {"kind": "ensemble", "tokens": 6, "dim": 8, "runs": 2, "time": 1, "samples": 3, "scheme": "pre,post"}
    plan["grid"] = {"beta": [1.0, 2.0], "heads": [1, 2]}
    ns.sweep(plan, workers=1, device="cpu", out=folder / "sweep", progress=False)
    return {kind: open_run(folder / kind) for kind in KINDS}


def _command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert not left.value.code


# In the browser


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_draws_all_its_figures_and_loads_nothing_else(runs: dict[str, RunFolder], tab: Tab, kind: str) -> None:
    page = runs[kind].path / "report.html"
    for scheme in ("light", "dark"):
        tab.open(page, scheme)
        tab.run(DRAW)
        assert not tab.errors
        assert [address for address in tab.loaded if not address.startswith("data:")] == [page.as_uri()]
        drawn = tab.run(DRAWN)
        assert len(drawn) == len(read_page(page).plots) > 0
        assert not [name for name, marks in drawn if marks < 2]
        assert_readable(tab)
        ground = tab.run("getComputedStyle(document.documentElement).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


@pytest.mark.parametrize("kind", KINDS)
def test_every_link_leads_somewhere(runs: dict[str, RunFolder], kind: str) -> None:
    page = read_page(runs[kind].path / "report.html")
    links = {str(link["href"]) for link in page.every("a")}
    assert links <= {f"#{attributes['id']}" for _, attributes in page.elements if "id" in attributes}
    if kind in ("stability", "audit", "compare"):
        figures = runs[kind].table("findings")["figure"].dropna()
        assert len(figures) >= 4
        assert {f"#figure-{figure}" for figure in figures} <= links


@pytest.mark.parametrize("kind", ["audit", "words", "subspaces", "sweep"])
@pytest.mark.parametrize(
    ("scheme", "width", "media"), [("dark", 375, "screen"), ("dark", 800, "print"), ("light", 1800, "screen")]
)
def test_a_page_fits_phones_paper_and_wide_screens(
    runs: dict[str, RunFolder], tab: Tab, kind: str, scheme: str, width: int, media: str
) -> None:
    tab.open(runs[kind].path / "report.html", scheme, width, media)
    tab.run(DRAW)
    assert not tab.errors
    assert_readable(tab)
    dark = tab.run("getComputedStyle(document.documentElement).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark" and media != "print")
    assert tab.run("document.documentElement.scrollWidth") <= width
    widths = "[...document.querySelectorAll('.plot svg, .plot canvas')].map(one => one.getBoundingClientRect().width)"
    assert max(tab.run(widths)) <= width


def test_a_print_finds_all_figures_drawn_in_light(runs: dict[str, RunFolder], tab: Tab) -> None:
    tab.open(runs["audit"].path / "report.html", "dark")
    undrawn = "[...normscope.plots.values()].filter(figure => figure.spec && figure.drawn !== 'light').length"
    assert tab.run(undrawn) > 0
    assert len(tab.page.pdf()) > 10_000
    assert tab.run("document.querySelectorAll('.plot svg').length") > 10


def test_a_head_that_is_chosen_in_one_map_is_chosen_in_all(runs: dict[str, RunFolder], tab: Tab) -> None:
    run = runs["audit"]
    tab.open(run.path / "report.html")
    tab.run(DRAW)
    tab.page.locator("#figure-sparsity svg path[aria-roledescription]").last.click(position={"x": 5, "y": 5})
    tab.settle()
    title = tab.run("document.querySelector('#head h2').textContent")
    layer, head = map(int, re.findall(r"\d+", title))
    heads = "[...normscope.plots.values()].filter(figure => figure.spec?.usermeta.layers)"
    assert set(tab.run(f"{heads}.map(figure => figure.view.signal('chosen'))")) == {f"{head},{layer}"}
    cells = "[...row.cells].slice(0, 2).map(one => one.textContent)"
    rows = dict(tab.run(f"[...document.querySelectorAll('#head tbody tr')].map(row => {cells})"))
    sparsity = run.table("sparsity")
    share = sparsity[(sparsity["layer"] == layer) & (sparsity["head"] == head)]["share"].iloc[0]
    assert float(rows["Share of near-one-hot attention by head"]) == pytest.approx(share, rel=1e-3)
    tab.page.locator("#figure-sparsity .plot").press("ArrowLeft")
    tab.settle()
    assert tab.run("document.querySelector('#head h2').textContent") == f"Layer {layer}, head {max(0, head - 1)}"
    tab.page.keyboard.press("Escape")
    assert tab.run("document.getElementById('head').hidden")


def test_spheres_side_by_side_turn_together(runs: dict[str, RunFolder], tab: Tab) -> None:
    tab.open(runs["simulate"].path / "report.html")
    tab.run(DRAW)
    one, other = tab.page.locator("#figure-spheres .scene").all()
    before = other.screenshot()
    one.press("ArrowLeft")
    tab.settle()
    assert other.screenshot() != before


def test_a_scene_turns_by_keys_and_names_what_the_pointer_is_over(runs: dict[str, RunFolder], tab: Tab) -> None:
    tab.open(runs["words"].path / "report.html")
    tab.run(DRAW)
    scene = tab.page.locator(".scene").first
    scene.scroll_into_view_if_needed()
    before = scene.screenshot()
    scene.press("ArrowLeft")
    tab.settle()
    assert scene.screenshot() != before
    with Image.open(io.BytesIO(before)) as image:
        saturated = sum(saturation > 100 for saturation in image.convert("HSV").get_flattened_data(1))
    assert saturated > 100
    left, top, width, height = (scene.bounding_box() or {}).values()
    for across, up in ((i, k) for k in range(1, 20) for i in range(1, 20)):
        tab.page.mouse.move(left + width * across / 20, top + height * up / 20)
        if not tab.run("document.getElementById('tip').hidden"):
            break
    assert tab.run("document.getElementById('tip').textContent")
    assert not tab.errors


# The numbers


def plotted(run: RunFolder, name: str) -> pd.DataFrame:
    """The numbers that the page draws, with the names of lines, rows and columns."""
    (plot,) = (plot for plot in read_page(run.path / "report.html").plots if plot["name"] == name)
    points, meta = pd.read_csv(io.StringIO(plot["spec"]["data"]["values"])), plot["spec"]["usermeta"]
    if "names" in meta:
        return points.assign(line=[meta["names"][i] for i in points["i"]])
    return points


def same(one: "pd.Series[float]", other: "pd.Series[float]") -> bool:
    """Whether five digits of both agree; gaps are not drawn."""
    wanted = [value for value in other.astype(float) if math.isfinite(value)]
    return one.tolist() == pytest.approx(wanted, rel=6e-5)


def test_the_numbers_of_a_simulation_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["simulate"]
    heading, *rows = PageTables(run.path / "report.html").found["Time to collapse"]
    assert heading == ["scheme", "time to half of collapse", "to 90 %"]
    milestones = run.table("milestones")
    assert [row[0] for row in rows] == list(milestones["scheme"]) == ["post", "pre"]
    for row, half, ninety in zip(rows, milestones["half"], milestones["ninety"], strict=True):
        assert says(row[1], half)
        assert says(row[2], ninety)
    curves = run.table("trajectories")
    for figure, x, y in (("cosine", "time", "cosine"), ("phase", "cosine", "cosine_rate"), ("radius", "time", "radius")):
        data = plotted(run, figure)
        assert data["line"].tolist() == curves["scheme"].tolist()
        assert same(data["x"], curves[x])
        assert same(data["y"], curves[y])
    assert same(plotted(run, "gradient")["y"], run.table("gradients")["relative"])


def test_the_numbers_of_an_audit_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["audit"]
    motion, updates, replay = (run.table(name) for name in ("motion", "writes", "replay"))
    norms = plotted(run, "radius")
    for column, name in zip("xylh", ("layer", "radius", "radius_low", "radius_high"), strict=True):
        assert same(norms[column], motion[name])
    for figure, column in (("angle", "angle"), ("speed", "speed")):
        data = plotted(run, figure)
        for scheme, rows in replay[~replay["own"].astype(bool)].groupby("scheme"):
            assert same(data[data["line"] == f"as {scheme}"]["y"], rows[column])
    assert same(plotted(run, "angle").query("line == 'this model'")["y"], motion["angle"])
    assert same(plotted(run, "speed").query("line == 'this model, measured'")["y"], updates["speed"])
    for column in ("cosine", "rank"):
        data = plotted(run, column)
        assert same(data[data["line"].str.startswith("without")]["y"], motion[column])
        assert same(data[data["line"].str.startswith("with ")]["y"], motion[f"{column}_all"])


def test_the_numbers_of_a_comparison_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["compare"]
    numbers, curves = run.table("numbers"), run.table("curves")
    heading, *rows = PageTables(run.path / "report.html").found["Side by side"]
    values = dict(zip(zip(numbers["number"], numbers["subject"], strict=True), numbers["value"], strict=True))
    assert len(rows) == numbers["number"].nunique()
    for row in rows:
        for subject, shown in zip(heading[1:], row[1:], strict=True):
            assert says(shown, values.get((re.sub(r" \(.\)$", "", row[0]), subject), math.nan))
    for figure, drawn in curves.groupby("quantity"):
        assert same(plotted(run, str(figure))["y"], drawn["y"])


def test_the_numbers_of_a_journey_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["words"]
    journey = run.table("journey")
    (heading, *rows) = next(rows for caption, rows in PageTables(run.path / "report.html").found.items() if "angles" in caption)
    columns = {
        "cosine": "nearest_cosine",
        "P": "predicted_probability",
        "rotation": "angle",
        "sum": "travelled",
        "from start": "from_start",
        "norm": "radius",
        "rank of target": "rank",
        "P of target": "probability",
    }
    assert set(columns) <= set(heading)
    assert [row[0] for row in rows] == ["embeddings", *(f"layer {layer}" for layer in range(len(rows) - 1))]
    for name, column in columns.items():
        cells = [row[heading.index(name)] for row in rows]
        assert all(says(cell, value) for cell, value in zip(cells, journey[column].astype(float), strict=True)), name
    assert same(plotted(run, "journey-angle")["y"], journey["angle"])
    assert same(plotted(run, "journey-radius")["y"], journey["radius"])


def test_the_numbers_of_stability_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["stability"]
    for figure, table, column in (("sparsity", "sparsity", "share"), ("margins", "margins", "margin")):
        rows = run.table(table)
        rows = rows[rows["head"].notna() & rows[column].notna()].sort_values(["layer", "head"])
        data = plotted(run, figure)
        assert data["y"].tolist() == rows["layer"].tolist()
        assert data["x"].tolist() == rows["head"].tolist()
        assert same(data["v"], rows[column])
    noise = run.table("noise")
    data, rows = plotted(run, "noise-loss"), noise[(noise["noise"] > 0) & noise["layer"].isna()]
    for (perturbed, where), group in rows.groupby(["perturbed", "where"]):
        line = data[data["line"] == f"{perturbed}, {where}"]
        assert same(line["y"], group["loss"])
        assert same(line["h"], group["loss"] + group["loss_stderr"])


def test_the_numbers_of_subspaces_are_its_tables(runs: dict[str, RunFolder]) -> None:
    run = runs["subspaces"]
    _, *rows = PageTables(run.path / "report.html").found["Where it breaks"]
    points = run.table("points")
    assert [row[:3] for row in rows] == points[["knob", "scheme", "part"]].to_numpy().tolist()
    for row, predicted, observed in zip(rows, points["predicted"], points["observed"], strict=True):
        factor = 100 if row[3].endswith("%") else 1
        assert says(row[3].strip("°±% "), factor * predicted)
        assert says(row[4].strip("°±% "), factor * observed)
    curves = run.table("curves")
    for knob in ("angle", "spread"):
        data = plotted(run, f"circuit-{knob}")
        for scheme, rows in curves[(curves["knob"] == knob) & (curves["turned"] > 0)].groupby("scheme"):
            assert same(data[data["line"] == scheme]["y"], 100 * rows["solved"])


def test_the_page_and_its_markdown_say_the_findings_of_the_table(runs: dict[str, RunFolder], tab: Tab) -> None:
    run = runs["stability"]
    texts = run.table("findings")["text"].tolist()
    assert len(texts) >= 4
    tab.open(run.path / "report.html")
    tab.run("document.querySelectorAll('details').forEach(folded => folded.open = true)")
    shown = " ".join(tab.run("document.body.innerText").split())
    tokens = MarkdownIt("commonmark").parse((run.path / "report.md").read_text(encoding="utf-8"))
    written = " ".join(part.content for token in tokens for part in token.children or [])
    for text in texts:
        assert text in shown
        assert text in " ".join(written.split())
