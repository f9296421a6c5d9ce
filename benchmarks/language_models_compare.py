"""How well ``advise`` predicted the language models that were trained: the tables of docs/results/language-models.md.

    python benchmarks/language_models_compare.py                               # print them
    python benchmarks/language_models_compare.py --figures docs/results/figures --out DIR

Runs and predictions are those of ``language_models.py``. Criteria are compared with the loss at each learning rate, and with
the loss at the best of the rates that are compared at a depth (``best``).
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from language_models import BLOCKS, CURVES, DATA, OVERALL, PACKAGED, WATCHED, cells, key_of, the_plan
from normscope.dynamics.evidence import correlation, kendall, spearman, trust
from normscope.experiments.criteria import CRITERIA
from normscope.experiments.trained import PREDICTIONS, RUNS, Evidence, perplexities
from normscope.report.files import save_figure
from normscope.results.figures import Chart, Line
from normscope.results.tables import plain_rows

OUTCOMES = {  # column of the outcomes: the factor that makes small values good
    "loss": 1.0,
    "rate": -1.0,
    "failed_share": 1.0,
    "first_block_cost": -1.0,
    "late_block_cost": -1.0,
    "late_share": -1.0,
}


def compare(out: Path | None, figures: Path | None) -> None:
    """Print what training came to, and how well everything that was predicted agrees with it."""
    evidence = Evidence(pd.read_csv(PACKAGED / RUNS), pd.read_csv(PACKAGED / PREDICTIONS))
    tables = dict(comparison(evidence, the_plan()))
    watched = pd.read_parquet(DATA / WATCHED) if (DATA / WATCHED).exists() else pd.DataFrame()
    if len(watched):
        watched = best_runs(watched, evidence)
        tables["watched: the models that were trained, at their last probe"] = watched_models(watched)
        tables["geometry: what was simulated, and what trained models do"] = geometry(evidence, watched)
    for title, table in tables.items():
        print(f"\n## {title}\n\n{markdown(table)}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            table.to_csv(out / f"{title.partition(':')[0].replace(' ', '-')}.csv", index=False)
    if figures is not None:
        blocks, curves = (best_runs(pd.read_csv(DATA / name), evidence, name == BLOCKS) for name in (BLOCKS, CURVES))
        for name, chart in charts(curves, blocks, watched).items():
            save_figure(chart, figures / f"language-models-{name}.png")


def comparison(evidence: Evidence, plan: Mapping[str, Any]) -> Iterator[tuple[str, pd.DataFrame]]:
    """All tables of the comparison, with their titles."""
    yield "missing: planned runs that have no result", missing(evidence.runs, plan)
    outcomes = evidence.outcomes.sort_values(["depth", "loss"], ignore_index=True)
    yield "outcomes: at the best of the rates that were tried", outcomes
    yield "correlations: of predicted ranks with what training came to", correlations(evidence)
    yield "weights: fitted on other depths, tested on this one", weights(evidence)
    yield "published: pairs of schemes in the same order as in published tables", published(evidence)


def missing(runs: pd.DataFrame, plan: Mapping[str, Any]) -> pd.DataFrame:
    """Planned cells without a run, counted by rate, depth and seed, with their schemes."""
    there = {key_of(row) for row in plain_rows(runs)}
    left = pd.DataFrame([point for point in cells(plan) if key_of(point) not in there], columns=list(plan["grid"]))
    groups = left.groupby(["seed", "rate", "layers"])["scheme"]
    rows = [
        {**dict(zip(("seed", "rate", "depth"), key, strict=True)), "runs": len(s), "schemes": ", ".join(s)} for key, s in groups
    ]
    return pd.DataFrame(rows, columns=["seed", "rate", "depth", "runs", "schemes"])


def by_rate(evidence: Evidence) -> Iterator[tuple[str, Evidence]]:
    """The evidence of the best rates, at the depths that have several, and that of every rate alone."""
    runs = evidence.runs
    yield "best", replace(evidence, runs=runs[runs["depth"].isin(evidence.tuned)])
    for rate in sorted(runs["rate"].unique()):
        yield f"{rate:g}", replace(evidence, runs=runs[runs["rate"] == rate])


def correlations(evidence: Evidence) -> pd.DataFrame:
    """Spearman's and Kendall's correlation of every criterion's ranks with every outcome, by depth and over all depths.

    Positive means that what ranked first came out best: lowest loss, highest best rate, fewest failures, most useful late
    blocks.
    """
    keys = [*(criterion.key for criterion in CRITERIA), OVERALL]
    rows = []
    for (rate, tried), setting in product(by_rate(evidence), evidence.settings()):
        depths, schemes = tried.trained
        ranks = tried.ranks(setting, keys, depths, schemes)
        for (i, key), (outcome, sign) in product(enumerate(keys), OUTCOMES.items()):
            values = sign * tried.outcome(outcome, depths, schemes)
            for depth, where in (*((str(d), [j]) for j, d in enumerate(depths)), ("all", list(range(len(depths))))):
                rho, tau = (correlation(ranks[where, :, i], values[where], statistic) for statistic in (spearman, kendall))
                rows.append(
                    {
                        "setting": " ".join(map(str, setting)), "rate": rate, "criterion": key, "outcome": outcome,
                        "depth": depth, **_interval("spearman", rho), **_interval("kendall", tau), "schemes": rho.schemes,
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def weights(evidence: Evidence) -> pd.DataFrame:
    """Weights of the criteria that predicted the loss, fitted on all depths but one and tested there; equal ones beside."""
    keys = [criterion.key for criterion in CRITERIA]
    rows = []
    for (rate, tried), setting in product(by_rate(evidence), evidence.settings()):
        depths, schemes = tried.trained
        ranks, loss = tried.ranks(setting, keys, depths, schemes), tried.outcome("loss", depths, schemes)
        found, about = trust(ranks, loss), {"setting": " ".join(map(str, setting)), "rate": rate}
        for i, depth in enumerate(depths):
            others = [j for j in range(len(depths)) if j != i]
            equal = correlation(ranks[[i]].mean(-1), loss[[i]])
            shares = dict(zip(keys, trust(ranks[others], loss[others]).weights, strict=True)) if others else {}
            tests = {**_interval("fitted", found.tested[i]), **_interval("equal", equal)}
            rows.append({**about, "tested": str(depth), **shares, **tests})
        rows.append({**about, "tested": "none: fitted on all", **dict(zip(keys, found.weights, strict=True))})
    return pd.DataFrame(rows)


def _interval(name: str, each: Any) -> dict[str, float]:
    return {name: each.value, f"{name}_low": each.low, f"{name}_high": each.high}


def published(evidence: Evidence) -> pd.DataFrame:
    """For every published model and every depth trained here: how many pairs of schemes are in the same order.

    Schemes that failed are level with each other and worse than all others, in both.
    """
    table = perplexities()
    depths = evidence.trained[0]
    rows = []
    for (source, model), theirs in table.groupby(["source", "model"], sort=False):
        names = list(theirs["scheme"])
        perplexity = theirs["perplexity"].where(~theirs["failed"], math.inf).to_numpy()
        for depth, loss in zip(depths, evidence.outcome("loss", depths, names), strict=True):
            there = ~np.isnan(loss)
            a, b = perplexity[there], loss[there]
            tau = float(kendall(a, b, np.ones((1, len(a))))[0])
            same = [(a[i] < a[j], b[i] < b[j]) for i, j in product(range(len(a)), repeat=2) if i != j and a[i] < a[j]]
            rows.append(
                {
                    "source": source, "model": model, "depth": depth, "schemes": ", ".join(np.array(names)[there]),
                    "same_order": sum(ours for _, ours in same), "pairs": len(same), "kendall": tau,
                    "failed_there": ", ".join(np.array(names)[np.isinf(perplexity)]) or "none",
                    "failed_here": ", ".join(np.array(names)[there][np.isinf(b)]) or "none",
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def best_runs(table: pd.DataFrame, evidence: Evidence, learned: bool = False) -> pd.DataFrame:
    """The rows of the run at each scheme's best rate, with the first seed; of all, or of those that learned.

    Where every rate failed, that is the lowest.
    """
    lowest = evidence.runs.groupby(["scheme", "depth"], as_index=False)["rate"].min()
    best = evidence.outcomes.merge(lowest, on=["scheme", "depth"], suffixes=("", "_lowest"))
    best["rate"] = best["rate"].fillna(best["rate_lowest"])
    best = best[np.isfinite(best["loss"]) | (not learned)][["scheme", "depth", "rate"]]
    chosen = table.merge(best, on=["scheme", "depth", "rate"])
    return chosen[chosen["seed"] == chosen.groupby(["scheme", "depth"])["seed"].transform("min")]


def _thirds(run: pd.DataFrame, column: str) -> dict[str, float]:
    """Mean of a column over the first and the last third of the layers of a probe."""
    values = run[run["layer"] < run["layer"].max()][column].to_numpy(float)
    third = max(1, len(values) // 3)
    return {"early": float(values[:third].mean()), "late": float(values[-third:].mean())}


def watched_models(watched: pd.DataFrame) -> pd.DataFrame:
    """Residual growth, rotation, rank and collapse of every trained model, at its last probe."""
    rows = []
    for key, run in watched.groupby(["depth", "scheme"]):
        last = run[run["step"] == run["step"].max()].sort_values("layer")
        rotation, end = _thirds(last, "rotation"), last.iloc[-1]
        rows.append(
            {
                **dict(zip(("depth", "scheme"), key, strict=True)), "step": int(end["step"]),
                "growth": float(end["norm"] / last["norm"].iloc[0]), "early_rotation": rotation["early"],
                "late_rotation": rotation["late"], "cosine": float(end["cosine"]), "rank": float(end["rank"]),
                "collapse": float(last["collapse"].max()),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def geometry(evidence: Evidence, watched: pd.DataFrame) -> pd.DataFrame:
    """Rank correlations of simulated criteria with the same quantities of the models, at the first step and at the last.

    Rotation here includes what is common to all tokens, which the simulated one leaves out.
    """
    depths, schemes = evidence.trained
    measured: dict[str, dict[str, dict[tuple[Any, ...], float]]] = {"first": {}, "last": {}}
    for key, run in watched.groupby(["depth", "scheme"]):
        for moment, step in (("first", run["step"].min()), ("last", run["step"].max())):
            at = run[run["step"] == step].sort_values("layer")
            gradient = at["gradient"].dropna().to_numpy(float)
            values = _thirds(at, "rotation") | {"collapse": 1 - float(at["cosine"].iloc[-1])}
            if len(gradient) and gradient.min() > 0:
                values["gradient"] = -abs(float(np.log10(gradient[0] / gradient[-1])))
            for name, value in values.items():
                measured[moment].setdefault(name, {})[key] = value
    rows = []
    for setting, moment in product(evidence.settings(), measured):
        for name, by_model in measured[moment].items():
            ranks = evidence.ranks(setting, [name], depths, schemes)[..., 0]
            of_models = np.array([[by_model.get((depth, scheme), math.nan) for scheme in schemes] for depth in depths])
            each = correlation(-ranks, of_models)
            about = {"setting": " ".join(map(str, setting)), "criterion": name, "probe": moment}
            rows.append({**about, **_interval("spearman", each), "schemes": each.schemes})
    return pd.DataFrame(rows)


def charts(curves: pd.DataFrame, blocks: pd.DataFrame, watched: pd.DataFrame) -> dict[str, Chart]:
    """Loss by step, cost of a block by layer, and residual norm by layer, at each depth."""
    shown: dict[str, tuple[pd.DataFrame, str, str, str, str, str, str]] = {
        "loss": (
            curves, "step", "loss", "Training loss", "step", "loss",
            "Each scheme at the best of the rates that it was trained at.",
        ),
        "blocks": (
            blocks, "layer", "loss_change", "Loss without a block", "block that is skipped", "rise of the loss",
            "On held-out text. Blocks with values near 0 are hardly needed; values of 0 or less are not drawn.",
        ),
    }  # fmt: skip
    if len(watched):
        last = watched[watched["step"] == watched.groupby(["scheme", "depth"])["step"].transform("max")]
        caption = "At the last probe, before each layer and after the last."
        shown["norms"] = (last, "layer", "norm", "Residual stream norm", "layer", "mean norm", caption)
    drawn = {}
    for name, (table, x, y, title, x_label, y_label, caption) in shown.items():
        for depth, at in table.groupby("depth"):
            lines = tuple(Line(str(scheme), list(rows[x]), list(rows[y])) for scheme, rows in at.groupby("scheme"))
            drawn[f"{name}-{depth}"] = Chart(
                f"{title}, {depth} layers", x_label, y_label, lines, caption, "", log_y=name != "loss"
            )
    return drawn


def markdown(table: pd.DataFrame) -> str:
    """A table for a document."""
    shown = [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    lines = [list(map(str, table.columns)), ["---"] * len(table.columns), *shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return "–" if value is None or value != value else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the tables there")
    parser.add_argument("--figures", type=Path, help="draw figures into this folder")
    arguments = parser.parse_args()
    compare(arguments.out, arguments.figures)


if __name__ == "__main__":
    main()
