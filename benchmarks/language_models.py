"""Language models under many schemes: what ``advise`` predicts of them, and what training comes to.

    python benchmarks/language_models.py predict                               # before training; minutes on two cores
    python benchmarks/language_models.py train --seconds 540 --out DIR         # as many runs as fit, on a GPU or the cores
    python benchmarks/language_models.py train --edges --seconds 540 --out DIR # the next rate where the best is at the edge
    python benchmarks/language_models.py train --close --seconds 540 --out DIR # another seed where losses are close
    python benchmarks/language_models.py merge DIR ...                         # results of several folders into the data files
    python benchmarks/language_models_compare.py                               # how far both agree

The plan is ``examples/sweeps/language-models.toml``. ``train`` executes it as one ``normscope sweep`` without the runs that
``--done`` has, ends it after ``--seconds``, and continues it when called again on the same machine. Every finished run is
collected at once into a few small files of DIR: a row for each run, its loss curve, its watch, and what skipping each block
costs on held-out text. ``--rates``, ``--layers``, ``--seeds`` and ``--schemes`` replace those of the plan.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import normscope as ns
from normscope.experiments.criteria import CRITERIA, theory_table
from normscope.experiments.trained import CELL, COSTS, PREDICTIONS, RUNS, Evidence, failed
from normscope.measures.base import Subject
from normscope.measures.removal import Removal
from normscope.models import Sample
from normscope.results.tables import plain_rows
from normscope.schemes import find_scheme
from normscope.training.recipe import task_of

ROOT = Path(__file__).parent.parent
PLAN = ROOT / "examples" / "sweeps" / "language-models.toml"
PACKAGED = ROOT / "src" / "normscope" / "experiments" / "evidence"
DATA = ROOT / "docs" / "results" / "data"
BLOCKS, CURVES, WATCHED = "language-models-blocks.csv", "language-models-curves.csv", "language-models-watch.parquet"
LADDER = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # of learning rates
OVERALL = "overall"  # the mean of the ranks in all criteria, with equal weights
SIMULATED: tuple[dict[str, Any], ...] = (
    {"weights": "kaiming", "causal": False, "feedforward": 0.0, "radius": 1.0},
    {"weights": "gaussian", "causal": False, "feedforward": 0.0, "radius": 1.0, "runs": 4},
    # as the models begin: embeddings of standard deviation 0.02, a causal mask, a feed-forward layer in every block
    {"weights": "gaussian", "causal": True, "feedforward": 3.0, "radius": 0.02, "runs": 4, "simulated_width": 128},
)
_SKIPPED_ON = 4096  # held-out tokens that every block is skipped on
_CURVE_POINTS, _PROBES = 60, 6  # of a run, in the files
_GRACE = 20.0  # seconds that a sweep has to end


def the_plan() -> dict[str, Any]:
    """The content of the plan."""
    return tomllib.loads(PLAN.read_text(encoding="utf-8"))


def _evidence(runs: Path) -> Evidence:
    return Evidence(pd.read_csv(runs), pd.read_csv(PACKAGED / PREDICTIONS))


def predict(out: Path) -> None:
    """Write what ``advise`` measures for the shapes of the plan, those that are not in the file yet: criteria with ranks."""
    plan = the_plan()
    shape = {"width": plan["fixed"]["dim"], "heads": plan["fixed"]["heads"], "context": plan["fixed"]["context"]}
    tables = [table for table in ([pd.read_csv(out)] if out.exists() else []) if len(table)]
    known = [each for table in tables for each in plain_rows(table[list(_USED)].drop_duplicates())]
    for simulated, depth in product(SIMULATED, plan["grid"]["layers"]):
        if any({**simulated, "depth": depth}.items() <= each.items() for each in known):
            continue
        started = time.monotonic()
        advice = ns.advise(
            depth=depth, **shape, **{"simulated_width": shape["width"], **simulated}, schemes=",".join(plan["grid"]["scheme"]),
            rank_by=[criterion.name for criterion in CRITERIA], device="cpu", progress=False,
        )  # fmt: skip
        criteria = advice.tables["criteria"].rename(columns={"mean": "value"})
        order = advice.tables["ranks"].assign(criterion=OVERALL)
        order = order.assign(value=order["rank"], rank=order["rank"].rank())
        columns = ["scheme", "criterion", "value", "low", "high", "rank"]
        used = {name: advice.configuration[name] for name in _USED}
        tables.append(pd.concat([criteria[columns], order[columns]], ignore_index=True).assign(**used)[[*_USED, *columns]])
        write_tables({out.name: pd.concat(tables, ignore_index=True)}, out.parent)
        print(f"{simulated} depth {depth}: {time.monotonic() - started:.0f} s", flush=True)
    if all(each["weights"] != "identity" for each in known):
        write_tables({out.name: pd.concat([*tables, predicted_by_theory(plan)], ignore_index=True)}, out.parent)


def predicted_by_theory(plan: Mapping[str, Any]) -> pd.DataFrame:
    """The criteria that the symmetric reduction has (identity weights, β = 1), at the full context; none where it has none."""
    shape = {"width": plan["fixed"]["dim"], "heads": plan["fixed"]["heads"], "context": plan["fixed"]["context"]}
    schemes, tables = [find_scheme(name) for name in plan["grid"]["scheme"]], []
    for depth in plan["grid"]["layers"]:
        table = theory_table(schemes, depth, (shape["context"],))
        for criterion in (criterion for criterion in CRITERIA if criterion.theory):
            rows = table[["scheme"]].assign(criterion=criterion.key, value=table[criterion.theory].astype(float))
            about = {"weights": "identity", "causal": False, "feedforward": 0.0, "radius": 1.0, "depth": depth, **shape}
            tables.append(rows.assign(rank=(-criterion.sign * rows["value"]).rank(), tokens=shape["context"], **about))
    return pd.concat(tables, ignore_index=True)


_USED = (
    "weights", "causal", "feedforward", "radius", "depth", "width", "heads", "context", "tokens", "simulated_width", "runs",
    "seed",
)  # fmt: skip


def cells(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of a plan's grid, in its order."""
    grid = plan["grid"]
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def key_of(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a run is known by in the tables of results: scheme, depth, rate, seed."""
    return str(point["scheme"]), int(point.get("layers", point.get("depth"))), float(point["rate"]), int(point["seed"])


def at_edges(evidence: Evidence) -> list[dict[str, Any]]:
    """Points at the next rate for every scheme and depth whose best of several rates is the highest or the lowest of them.

    Where every rate failed, that is a lower one; where a scheme lacks a compared rate that might suit it better, that rate.
    """
    points = []
    for row in plain_rows(evidence.outcomes):
        at = evidence.runs[(evidence.runs["depth"] == row["depth"]) & (evidence.runs["scheme"] == row["scheme"])]
        tried, seed = sorted(float(rate) for rate in at["rate"].unique()), int(at["seed"].min())
        learned = bool((~failed(evidence.runs)[at.index]).any())
        if row["loss"] is None:
            rates = [rate for rate in evidence.rates[row["depth"]] if rate not in tried]
        elif learned and (row["rate"] is None or len(tried) < 2 or tried[0] < row["rate"] < tried[-1]):
            rates = []
        elif row["rate"] == tried[-1]:
            rates = [rate for rate in LADDER if rate > 1.01 * tried[-1]][:1]
        else:
            rates = [rate for rate in LADDER if rate < 0.99 * tried[0]][-1:]
        points += [_point(row, rate, seed) for rate in rates]
    return points


def close_losses(evidence: Evidence, within: float = 0.05) -> list[dict[str, Any]]:
    """Points with a second seed, at the best rate of every scheme whose loss is near the lowest of its depth."""
    outcomes, runs = evidence.outcomes, evidence.runs
    near = outcomes[outcomes["loss"] <= outcomes.groupby("depth")["loss"].transform("min") + within]
    seeds: dict[Any, set[int]] = {}
    for run in plain_rows(runs):
        seeds.setdefault((run["scheme"], run["depth"], run["rate"]), set()).add(int(run["seed"]))
    cells_near = ((row, seeds[row["scheme"], row["depth"], row["rate"]]) for row in plain_rows(near))
    return [_point(row, row["rate"], max(tried) + 1) for row, tried in cells_near if len(tried) == 1]


def _point(row: Mapping[str, Any], rate: float, seed: int) -> dict[str, Any]:
    return {"seed": seed, "rate": rate, "layers": row["depth"], "scheme": row["scheme"]}


def train(arguments: argparse.Namespace) -> None:
    """Execute what is left of the plan for some seconds, and collect what has finished."""
    end = time.monotonic() + arguments.seconds
    plan = the_plan()
    plan["fixed"]["corpus"] = str((PLAN.parent / plan["fixed"]["corpus"]).resolve())
    changes = {name: _number(value) for name, _, value in (change.partition("=") for change in arguments.set)}
    plan["fixed"] |= {name: str(Path(value).resolve()) if "/" in str(value) else value for name, value in changes.items()}
    for field in ("rate", "layers", "seed", "scheme"):
        if given := getattr(arguments, field):
            plan["grid"][field] = [_number(text) for text in given.split(",")]
    done = {key_of(row) for row in plain_rows(pd.read_csv(arguments.done))} if arguments.done.exists() else set()
    planned = cells(plan)
    if arguments.points:
        if not done:
            sys.exit(f"{arguments.done}: there are no results that a next rate or seed could follow")
        given = {field: plan["grid"][field] for field in ("rate", "layers", "seed", "scheme") if getattr(arguments, field)}
        points = arguments.points(_evidence(arguments.done))
        planned = [point for point in points if all(point[field] in values for field, values in given.items())]
    plan["points"] = planned
    folder = arguments.runs / f"language-models-{hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:8]}"
    file = folder.with_suffix(".toml")
    if not file.exists():  # a sweep that has begun on this machine continues as it was planned
        left = [point for point in planned if key_of(point) not in done]
        left.sort(key=lambda point: -point["layers"])  # long runs first: what is cut off at the end is short
        if not left:
            print("nothing is left to train")
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_toml(plan, left), encoding="utf-8")
    log = arguments.out / "sweep.log"
    arguments.out.mkdir(parents=True, exist_ok=True)
    options = ["--device", arguments.device, "--per-gpu", str(arguments.per_gpu), "--retry-failed"]
    if arguments.workers:
        options += ["--workers", str(arguments.workers)]
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # of every run, several of which compile at the same time
    with log.open("a") as output:
        sweep = subprocess.Popen(
            [sys.executable, "-m", "normscope", "sweep", str(file), "--out", str(folder), *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=threads | os.environ,
        )
        collector = Collector(folder, arguments.out, arguments.device, done)
        try:
            while sweep.poll() is None and time.monotonic() < end - _GRACE:
                collector.collect()
                time.sleep(1)
        finally:
            if sweep.poll() is None:
                sweep.terminate()
                try:
                    sweep.wait(_GRACE / 2)
                except subprocess.TimeoutExpired:
                    sweep.kill()
                    sweep.wait()
            collector.collect()
    if sweep.returncode and not folder.exists():
        sys.exit(log.read_text(encoding="utf-8")[-2000:])  # the plan was refused
    status = ns.sweep("status", folder, progress=False)
    print(status.tables["status"].to_string())
    print(status.summary)


def _number(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _toml(plan: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> str:
    """The plan with explicit points."""
    top = {name: value for name, value in plan.items() if name not in ("fixed", "grid", "points")}
    tables = [("", top), ("[fixed]\n", plan["fixed"]), *(("[[points]]\n", point) for point in points)]
    return "\n".join(
        head + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items()) for head, table in tables
    )


class Collector:
    """Reads the finished runs of a sweep, once each, and keeps the files of results up to date."""

    def __init__(self, sweep: Path, out: Path, device: str, done: set[tuple[Any, ...]]) -> None:
        self.sweep, self.out, self.device, self.done = sweep, out, device, done
        self.tables: dict[str, list[pd.DataFrame]] = {RUNS: [], BLOCKS: [], CURVES: [], WATCHED: []}
        self.seen: set[str] = set()

    def collect(self) -> None:
        """Add the runs that have finished since, but for those that are done; a run that cannot be read stops no training."""
        new = [path.parent for path in sorted(self.sweep.glob("runs/*/run.json")) if path.parent.name not in self.seen]
        for path in new:
            self.seen.add(path.name)
            try:
                results = {} if cell_of(ns.load(path)) in self.done else results_of(path, self.device)
            except Exception:
                traceback.print_exc()
                continue
            for name, table in results.items():
                self.tables[name].append(table)
        if new:
            write_tables(
                {name: pd.concat(tables, ignore_index=True) for name, tables in self.tables.items() if tables}, self.out
            )


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """Write results, each file whole or not at all."""
    for name, table in tables.items():
        partial = folder / f"{name}.partial"
        if name.endswith(".parquet"):
            table.to_parquet(partial, index=False)
        else:
            table.to_csv(partial, index=False, float_format="%.6g")
        partial.rename(folder / name)


def merge(folders: Sequence[Path]) -> None:
    """Add the results of several folders to the data files; a run that is there already is replaced."""
    for name, home in ((RUNS, PACKAGED), (BLOCKS, DATA), (CURVES, DATA), (WATCHED, DATA)):
        read = pd.read_parquet if name.endswith(".parquet") else pd.read_csv
        tables = [read(path) for path in (home / name, *(folder / name for folder in folders)) if path.exists()]
        merged: list[pd.DataFrame] = []
        for table in tables:
            replaced = pd.MultiIndex.from_frame(table[list(CELL)])
            merged = [old[~pd.MultiIndex.from_frame(old[list(CELL)]).isin(replaced)] for old in merged] + [table]
        if any(len(table) for table in merged):
            whole = pd.concat([table for table in merged if len(table)], ignore_index=True)
            write_tables({name: whole.sort_values(["rate", "depth", "seed", "scheme"], kind="stable")}, home)


def cell_of(result: Any) -> tuple[Any, ...]:
    """Scheme, depth, rate and seed of a run."""
    return key_of({**result.configuration["recipe"], "scheme": result.configuration["model"]["scheme"]["name"]})


def costs_of(costs: "pd.Series[float]") -> dict[str, float]:
    """Rise of the loss without a block: the first, the mean over all others, and over the last third."""
    later, late = costs.iloc[1:], costs.tail(max(1, len(costs) // 3))
    return dict(zip(COSTS, (costs.iloc[0], later.mean(), late.mean()), strict=True))


def results_of(path: Path, device: str) -> dict[str, pd.DataFrame]:
    """The small tables of a finished run: its row, blocks, curve and watch, each with the cell of the run."""
    result = ns.load(path)
    recipe, metrics = result.configuration["recipe"], result.tables["metrics"]
    cell = dict(zip(CELL, cell_of(result), strict=True))
    diverged = result.tables["divergence"].iloc[0] if "divergence" in result.tables else None
    last = metrics.iloc[-1] if len(metrics) else {"examples": 0, "seconds": math.nan, "loss": math.nan}
    tokens = int(last["examples"]) * recipe["context"]
    row = {
        **cell,
        "width": recipe["dim"],
        "context": recipe["context"],
        "tokens": tokens,
        "train_loss": last["loss"],
        **_held_out(result),
        "diverged_step": None if diverged is None else int(diverged["step"]),
        "seconds": last["seconds"],
        "tokens_per_second": tokens / last["seconds"],
        **dict.fromkeys(COSTS),
    }
    blocks = pd.DataFrame()
    if diverged is None:
        blocks = skipped_blocks(path, device)
        row |= costs_of(blocks["loss_change"])
    tables = {
        RUNS: pd.DataFrame([row]),
        BLOCKS: blocks,
        CURVES: _thinned(metrics[["step", "loss"]], _CURVE_POINTS),
        WATCHED: _watched(path / "watch"),
    }
    return {
        name: table if name == RUNS else pd.concat([pd.DataFrame([cell] * len(table)), table.reset_index(drop=True)], axis=1)
        for name, table in tables.items()
        if len(table)
    }


def _held_out(result: Any) -> dict[str, Any]:
    """Loss and bits per byte on held-out text, and the loss of token frequencies alone; no loss where a run diverged."""
    columns = ["loss", "bits_per_byte"]
    tests = result.tables["losses"].set_index("split") if "losses" in result.tables else None
    scores = dict.fromkeys(columns) if tests is None else tests.loc["held-out", columns].to_dict()
    return {**scores, "unigram_loss": unigram_loss(_prepared(result))}


def _prepared(result: Any) -> Any:
    """The tokens that a run was trained on; read once for all runs with the same."""
    recipe = result.configuration["recipe"]
    task: Any = task_of(recipe)
    key = json.dumps([recipe[name] for name in task.keys])
    if key not in _CORPORA:
        _CORPORA[key] = task.prepare().data
    return _CORPORA[key]


_CORPORA: dict[str, Any] = {}


def unigram_loss(data: Any) -> float:
    """Cross-entropy of held-out tokens under their frequencies in the training part, each counted once more than it occurs."""
    if data.identity not in _UNIGRAMS:
        counts = {part: np.bincount(data.maps[part], minlength=data.vocabulary) for part in ("training", "held-out")}
        frequency = (counts["training"] + 1) / (counts["training"] + 1).sum()
        _UNIGRAMS[data.identity] = float(-(counts["held-out"] @ np.log(frequency)) / counts["held-out"].sum())
    return _UNIGRAMS[data.identity]


_UNIGRAMS: dict[str, float] = {}


def skipped_blocks(path: Path, device: str) -> pd.DataFrame:
    """The rise of the loss on held-out text when each block of a trained model is skipped: layer, loss, loss_change."""
    model = ns.open(path, device, dtype="float32")
    result = ns.load(path)
    context, data = result.configuration["recipe"]["context"], _prepared(result)
    rows = max(1, _SKIPPED_ON // context)
    starts = torch.linspace(0, data.count("held-out") - context - 1, rows).long()
    tokens = data.windows("held-out", starts, context + 1, model.device)
    sample = Sample(tokens[:, :-1], tokens[:, 1:], torch.ones_like(tokens[:, 1:], dtype=torch.bool))
    with torch.no_grad():
        table = Removal(predictions=rows * context).measure(Subject(model, sample))["removal"]
    return table[table["layer"].notna()][["layer", "loss", "loss_change"]].astype({"layer": int})


def _thinned(table: pd.DataFrame, count: int) -> pd.DataFrame:
    """At most so many rows, evenly spaced, with the first and the last."""
    return table.iloc[np.unique(np.linspace(0, len(table) - 1, min(count, len(table))).round().astype(int))]


def _watched(path: Path) -> pd.DataFrame:
    """Some probes of a watched run, layer by layer; ``collapse`` is the largest of the heads of a layer."""
    if not path.exists():
        return pd.DataFrame()
    tables = ns.load(path).tables
    layers, steps = tables["layers"], _thinned(tables["steps"][["step"]], _PROBES)["step"]
    layers = layers[layers["step"].isin(steps)]
    kept = layers[
        [name for name in ("step", "layer", "norm", "update", "rotation", "cosine", "rank", "gradient") if name in layers]
    ]
    if "heads" in tables:
        collapse = tables["heads"].groupby(["step", "layer"], as_index=False)["collapse"].max()
        kept = kept.merge(collapse, how="left", on=["step", "layer"])
    numbers = kept.select_dtypes("float").columns
    return kept.astype(dict.fromkeys(numbers, "float32"))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict")
    predicting.add_argument("--out", type=Path, default=PACKAGED / PREDICTIONS)
    training = commands.add_parser("train")
    training.add_argument("--seconds", type=float, required=True, help="end after so many")
    training.add_argument("--out", type=Path, required=True, help="folder of the results")
    training.add_argument("--done", type=Path, default=PACKAGED / RUNS, help="results whose runs are skipped")
    training.add_argument("--runs", type=Path, default=Path("runs"), help="where the sweep's folder is")
    training.add_argument("--device", default="cuda")
    training.add_argument("--per-gpu", type=int, default=6)
    training.add_argument("--workers", type=int, help="runs at a time on a CPU")
    training.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value of a fixed field")
    for field in ("rate", "layers", "seed", "scheme"):
        training.add_argument(f"--{field}s".replace("ss", "s"), dest=field, help="instead of those of the plan, with commas")
    chosen = training.add_mutually_exclusive_group()
    chosen.add_argument(
        "--edges", dest="points", action="store_const", const=at_edges, help="where the best rate is at the edge"
    )
    chosen.add_argument("--close", dest="points", action="store_const", const=close_losses, help="where losses are close")
    merging = commands.add_parser("merge")
    merging.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    match arguments.command:
        case "predict":
            predict(arguments.out)
        case "train":
            train(arguments)
        case "merge":
            merge(arguments.folders)


if __name__ == "__main__":
    main()
