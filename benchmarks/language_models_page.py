"""The tables of docs/results/language-models.md, written from the table of runs and from what was compared with it.

    python benchmarks/language_models_compare.py --out DIR
    python benchmarks/language_models_page.py DIR

A table of the page stands below a comment ``<!-- table: NAME -->``. Its numbers are rounded once; text is not touched.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from language_models import OVERALL, PACKAGED, ROOT
from normscope.experiments.criteria import CRITERIA
from normscope.experiments.trained import RUNS, Evidence, Verdicts, failed
from normscope.results.tables import plain_rows
from normscope.schemes import find_scheme

PAGE = ROOT / "docs" / "results" / "language-models.md"
SHOWN = 1 / 3  # of the schemes, that were trained at a depth and rate with a column of its own
CHOSEN = 0.003  # of the table of blocks
LIKE_MODELS, KAIMING = "gaussian True 3 0.02", "kaiming False 0 1.0"  # simulated settings, as the comparison names them
GAUSSIAN, THEORY = "gaussian False 0 1.0", "identity False 0 1.0"
_TITLES = {
    "early": "early movement", "late": "late movement", "collapse": "diversity", "gradient": "gradient flow", "noise": "noise",
    OVERALL: "mean rank, equal weights",
}  # fmt: skip
_COUNTED, _COLUMNS = (LIKE_MODELS, "early", "loss"), ("0.001", "0.003", "best")
Cells = list[list[str]]


def losses(runs: pd.DataFrame) -> Cells:
    """Held-out loss by depth and rate; the lowest of each column is bold, schemes are ordered by their best at 24 layers."""
    judged = runs.assign(loss=runs["loss"].where(~failed(runs), math.inf))
    means = plain_rows(judged.groupby(["scheme", "depth", "rate"])["loss"].mean().reset_index())
    table = {(row["scheme"], row["depth"], row["rate"]): math.inf if row["loss"] is None else row["loss"] for row in means}
    trained = Counter(place[1:] for place in table)
    places = sorted(place for place, schemes in trained.items() if schemes >= SHOWN * runs["scheme"].nunique())
    lowest = {place: min(loss for key, loss in table.items() if key[1:] == place) for place in places}

    def best(scheme: str) -> tuple[float, float]:
        own = {place[1:]: loss for place, loss in table.items() if place[0] == scheme}
        return min((loss for place, loss in own.items() if place[0] == 24), default=math.inf), min(own.values())

    def cell(scheme: str, place: tuple[int, float]) -> str:
        loss = table.get((scheme, *place))
        text = "–" if loss is None else "failed" if math.isinf(loss) else f"{loss:.3f}"
        return f"**{text}**" if loss == lowest[place] else text

    head = ["scheme", *(f"{depth}{' layers' * (not i)}, {_rate(rate)}" for i, (depth, rate) in enumerate(places))]
    schemes = sorted({place[0] for place in table}, key=best)
    return [head, *([scheme, *(cell(scheme, place) for place in places)] for scheme in schemes)]


def verdicts(runs: pd.DataFrame) -> Cells:
    """What ``advise`` says of every scheme at every depth, with its loss and the rate of it; the order is that at 24 layers."""
    evidence, schemes = Evidence(runs, pd.DataFrame()), list(runs["scheme"].unique())
    rows = {
        (row["scheme"], depth): row
        for depth in evidence.trained[0]
        for row in plain_rows(Verdicts.of(evidence, [find_scheme(name) for name in schemes], depth).table)
    }

    def cell(row: Mapping[str, Any]) -> str:
        return row["verdict"] if row["loss"] is None else f"{row['verdict']}, {row['loss']:.3f} ({_rate(row['rate'])})"

    order = Verdicts.of(evidence, [find_scheme(name) for name in schemes], 24).order
    head = ["scheme", *(f"{depth} layers" for depth in evidence.trained[0])]
    return [head, *([name, *(cell(rows[name, depth]) for depth in evidence.trained[0])] for name in order)]


def blocks(runs: pd.DataFrame) -> Cells:
    """Cost of a block of the last third, relative to that of all after the first in brackets, and the cost of the first."""
    rows = plain_rows(runs[~failed(runs) & (runs["rate"] == CHOSEN)].sort_values("seed", ascending=False))
    learned = {(row["scheme"], row["depth"]): row for row in rows}  # with the first seed
    depths = sorted({row["depth"] for row in plain_rows(runs)})

    def share(name: str, depth: int) -> float:
        row = learned.get((name, depth))
        return row["late_block_cost"] / row["later_block_cost"] if row else math.inf

    def late(name: str, depth: int) -> str:
        row = learned.get((name, depth))
        cost = row["late_block_cost"] if row else 0.0
        return f"{cost:.{3 if cost >= 0.001 else 4}f} ({share(name, depth):.2f})" if row else "–"

    def first(name: str, depth: int) -> str:
        row = learned.get((name, depth))
        return f"{row['first_block_cost']:.2f}" if row else "–"

    names = sorted({name for name, _ in learned}, key=lambda name: -share(name, depths[0]))
    cells = [[name, *(late(name, at) for at in depths), ", ".join(first(name, at) for at in depths)] for name in names]
    return [["scheme", *(f"{depth} layers" for depth in depths), "first block"], *cells]


def predicted(correlations: pd.DataFrame) -> Cells:
    """The simulation that begins as the models do, beside the loss at each rate, at the best, and the cost of blocks."""
    columns = [("0.001", "loss"), ("0.003", "loss"), ("best", "loss"), ("best", "first_block_cost"), ("best", "late_share")]
    head = ["loss at 1e-3", "loss at 3e-3", "loss at the best rate", "cost of the first block, best rate"]
    each = [row for row in plain_rows(correlations) if (row["setting"], row["criterion"], row["outcome"]) == _COUNTED]
    counts = {rate: [str(row["schemes"]) for row in each if row["rate"] == rate and row["depth"] != "all"] for rate in _COLUMNS}
    numbers = [f"*{', '.join(counts[rate])}*" for rate in _COLUMNS]
    return [
        ["simulated as the models begin", *head, "relative cost of late blocks, best rate"],
        ["*schemes at 12, 24, 48 layers*", *numbers, "*of these, those that learned*", "*the same*"],
        *_criteria(correlations, [(LIKE_MODELS, *column) for column in columns]),
    ]


def at_best(correlations: pd.DataFrame) -> Cells:
    """The other simulations beside the loss at the best rate."""
    head = ["loss at the best rate", "Kaiming weights, attention alone", "gaussian, attention alone", "theory"]
    return [head, *_criteria(correlations, [(setting, "best", "loss") for setting in (KAIMING, GAUSSIAN, THEORY)])]


def failures(correlations: pd.DataFrame) -> Cells:
    """All simulations beside the share of failed runs."""
    head = ["failed runs", "as the models begin", "Kaiming weights, attention alone", "gaussian, attention alone", "theory"]
    settings = (LIKE_MODELS, KAIMING, GAUSSIAN, THEORY)
    return [head, *_criteria(correlations, [(setting, "best", "failed_share") for setting in settings])]


def _criteria(correlations: pd.DataFrame, columns: Sequence[tuple[str, str, str]]) -> Cells:
    """A row for every criterion: its correlation over all depths in each setting, with a rate and an outcome."""
    over_all = plain_rows(correlations[correlations["depth"] == "all"])
    by = {(row["criterion"], row["setting"], row["rate"], row["outcome"]): row for row in over_all}
    keys = [*(criterion.key for criterion in CRITERIA), OVERALL]
    return [[_TITLES[key], *(_interval(by[key, *column]) for column in columns)] for key in keys]


def fitted(weights: pd.DataFrame) -> Cells:
    """Weights of early and late movement fitted at two depths to the loss at 1e-3, and tested at the third."""
    rows = weights[(weights["setting"] == LIKE_MODELS) & (weights["rate"] == "0.001")]
    depths = [row["tested"] for row in plain_rows(rows) if row["tested"].isdigit()]
    cells = []
    for row in plain_rows(rows[rows["tested"].isin(depths)]):
        others = ", ".join(depth for depth in depths if depth != row["tested"])
        shares = [f"{row[key]:.2f}" for key in ("early", "late")]
        tests = [_interval(row, name, bold=False) for name in ("fitted", "equal")]
        cells.append([f"{others} layers", *shares, f"{row['tested']} layers", *tests])
    cells[-1][3:5] = [f"**{cell}**" for cell in cells[-1][3:5]]  # the depth that nothing was chosen on
    head = ["fitted at", "weight of early", "weight of late", "tested at", "correlation with the loss"]
    return [[*head, "plain mean of the five ranks"], *cells]


def geometry(table: pd.DataFrame) -> Cells:
    """The same quantities simulated and watched."""
    columns = [(LIKE_MODELS, "first"), (KAIMING, "first"), (LIKE_MODELS, "last")]
    titles = {"early": "early rotation", "late": "late rotation", "collapse": "diversity", "gradient": "gradient"}
    rows = {(row["criterion"], row["setting"], row["probe"]): row for row in plain_rows(table)}
    head = ["", "first step: as the models begin", "first step: Kaiming", "last probe: as the models begin"]
    return [head, *([name, *(_interval(rows[key, *at], bold=False) for at in columns)] for key, name in titles.items())]


def published(table: pd.DataFrame) -> Cells:
    """Pairs of schemes in the order of a published table, by its model and the depth trained here."""
    models: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in plain_rows(table):
        models.setdefault((row["source"].partition(",")[0], row["model"]), []).append(row)
    cells = [
        [f"{paper} {model}", *(f"{row['same_order']} of {row['pairs']}" for row in rows), rows[0]["failed_there"]]
        for (paper, model), rows in models.items()
    ]
    cells.sort(key=lambda row: row[0].rpartition(" ")[0] != "Mix-LN")
    return [["published model", *(f"{depth} layers" for depth in table["depth"].unique()), "failed in the paper"], *cells]


def _interval(row: Any, name: str = "spearman", bold: bool = True) -> str:
    """A correlation with its interval; bold where that lies above 0."""
    value, low, high = (row[key] for key in (name, f"{name}_low", f"{name}_high"))
    if value is None or math.isnan(value):
        return "–"
    signed = [f"{round(number, 2) + 0.0:+.2f}".replace("-", "−") for number in (value, low, high)]
    text = f"{signed[0]} ({signed[1]} to {signed[2]})"
    return f"**{text}**" if bold and low > 0 else text


def _rate(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def tables(runs: pd.DataFrame, compared: Path | None = None) -> dict[str, Cells]:
    """The tables of the page by name; without a comparison those that follow from the runs alone."""
    made = {"verdicts": verdicts(runs), "losses": losses(runs), "blocks": blocks(runs)}
    if compared is None:
        return made
    of: Mapping[str, tuple[str, Callable[[pd.DataFrame], Cells]]] = {
        "predicted": ("correlations", predicted), "at-best": ("correlations", at_best), "failures": ("correlations", failures),
        "fitted": ("weights", fitted), "geometry": ("geometry", geometry), "published": ("published", published),
    }  # fmt: skip
    return made | {name: make(pd.read_csv(compared / f"{file}.csv")) for name, (file, make) in of.items()}


def markdown(cells: Iterable[Sequence[str]]) -> str:
    """A table, its first row the head."""
    head, *rows = cells
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def in_page(page: str, name: str) -> re.Match[str]:
    """A table with the comment above it."""
    found = re.search(rf"(<!-- table: {name} -->\n)((?:\|.*\n)+)", page)
    assert found is not None, f"the page has no table '{name}'"
    return found


def main() -> None:
    """Write the tables into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, cells in tables(pd.read_csv(PACKAGED / RUNS), Path(sys.argv[1])).items():
        found = in_page(page, name)
        page = f"{page[: found.start(2)]}{markdown(cells)}\n{page[found.end() :]}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
