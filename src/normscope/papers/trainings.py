"""Paper 1, what is trained: the stability scan over width and learning rate, and encoder-decoder models."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from normscope.errors import InputError
from normscope.experiments.evaluate import Evaluate
from normscope.experiments.result import Result
from normscope.experiments.train import Train
from normscope.models import Model, open_model
from normscope.papers.entry import ESTIMATED, NOT_RUN, Curve, Entry, Panel, Reproduction, Request, Value, judge
from normscope.papers.models import STRATEGIES, Found, Half, MeasuredModel, comparison, mean_and_error, saved_shape
from normscope.papers.subspaces import collapse_of, noise_of, read_text, spread_of
from normscope.results.tables import plain_rows
from normscope.sweeps.plan import packaged_plan, read_plan

_PLAN = "paper-scan"
_MODEL, _STREAMS = "encoder-decoder", ("encoder", "decoder")
_CELL = ["strategy", "dim", "rate"]
_LEAST_WIDTH = 256  # of the published scan
_WORDS = {"Pre-Norm": "unstable", "QKV-Norm": "stable"}  # published, of training at large width and rate 1e-3
_TRAINED = {"in-distribution": "sums like those of the training", "ood-interpolation": "OOD interpolation",
            "ood-extrapolation": "OOD extrapolation"}  # fmt: skip
_SHORT_SCAN = {
    "kind": "train",
    "preset": "tiny",
    "fixed": {
        "integers": [3, 4, 5, 7], "interpolation": [6], "extrapolation": [8], "digits": [3, 4, 5], "layers": 2, "heads": 2,
        "feedforward": 64, "readout": [64, 64, 64], "frequencies": 16, "schedule": "constant", "warmup": 0, "clip": 0.0,
        "batch": 32, "epoch": 8, "examples": 2048, "test_examples": 64,
    },
    "grid": {"seed": [1, 2], "scheme": list(STRATEGIES), "dim": [32, 128], "rate": [1e-1, 1e-3]},
}  # fmt: skip
_SHORT_PAIR = {"encoder_layers": 1, "layers": 1, "batch": 64, "examples": 64_000, "test_examples": 2_000}
_FULL_PAIR = {"encoder_layers": 5, "layers": 5}
_SCANNED = (
    "Published in words only: training at large width and rate 1e-3 is unstable for Pre-Norm and stable for QKV-Norm. Here "
    "training at the highest rate counts as unstable if a loss becomes non-finite, or if no seed gets down to the lowest loss "
    "that the same model reaches at the lowest rate. This criterion was chosen after seeing the scan on the Baseline's task. "
    "The paper also varies depth and head width; the full scan does not (six layers, heads of 64, 1.5 million examples a run)."
)
_OTHER_TASK = (
    "A scan of 36 runs on the Baseline's task (docs/results/sweeps.md, 20 minutes on an H200) agrees in part: Pre-Norm does "
    "not learn at widths 1,024 and 2,048 with rate 1e-3; QKV-Norm learns at every width, but its loss jumps and recovers."
)
_SHORT = "This run has the paper's task and models far below the published widths, trained for too few steps to be compared."
_ENCODERS = (
    "No published numbers of encoder-decoder models were read: nothing is compared. Depths are those of the pair that is "
    "measured here, not the paper's (e, d). Norm spread, noise and collapse are those of the self-attention of each half; "
    "accuracy is always that of what the decoder predicts."
)


def scan(request: Request, short: Mapping[str, Any] = _SHORT_SCAN) -> Reproduction:
    """Loss over width and learning rate: the packaged plan in full, or a few widths of tiny models."""
    content = packaged_plan(_PLAN) if request.full else dict(short)
    seeds = [seed + request.seed for seed in content["grid"]["seed"]]
    plan = read_plan({**content, "grid": {**content["grid"], "seed": seeds}}, request.device)
    rows, curves = [], []
    for point in plan.points:
        outcome = Train.outcome(request.run(point.experiment))
        run = {name: point.value(name) for name in ("scheme", "dim", "rate", "seed")}
        losses = outcome.curves["loss"].to_numpy(float)
        rises = np.diff(losses)
        rows.append(
            {**run, "strategy": STRATEGIES.get(run["scheme"], run["scheme"]), "diverged": outcome.note is not None,
             "last": losses[-1] if len(losses) else math.nan, "lowest": losses.min() if len(losses) else math.nan,
             "rise": max(0.0, float(rises.max())) if len(rises) else 0.0}
        )  # fmt: skip
        curves.append(outcome.curves.assign(**run))
    runs = pd.DataFrame(rows)
    values = [*_words(runs, request.full), *(value for _, some in runs.groupby(_CELL, sort=False) for value in _cell(some))]
    verdict = judge(values, remark=True) if request.full else NOT_RUN
    remark = _SCANNED if request.full else f"{_SCANNED} {_SHORT} {_OTHER_TASK}"
    example = plan.points[0].experiment.summary.partition("; ")[2]
    settings = f"{plan.summary}; each like the first: {example}"
    return Reproduction(verdict, remark, settings, tuple(values), (), tuple(_scan_panels(runs, pd.concat(curves))))


def _cell(runs: pd.DataFrame) -> list[Value]:
    """The seeds of one strategy, width and rate: mean and standard error of what their losses came to."""
    first = plain_rows(runs)[0]
    where = f"{first['strategy']}, width {first['dim']:,}, rate {first['rate']:g}"
    finite, count = runs[~runs["diverged"]], len(runs)
    last, error = mean_and_error(finite["last"].tolist()) if len(finite) else ("non-finite", 0.0)
    some = "" if len(finite) in (0, count) else f", of {len(finite)} of {count} seeds"
    rise, rise_error = mean_and_error(runs["rise"].tolist())
    return [
        Value(f"{where}: loss of the last block{some}", None, last, measured_error=error, allowed=None),
        Value(
            f"{where}: largest rise of the loss from a block to the next", None, rise, measured_error=rise_error, allowed=None
        ),
        Value(f"{where}: runs that became non-finite", None, f"{count - len(finite)} of {count}", allowed=None),
    ]


def _words(runs: pd.DataFrame, compared: bool) -> list[Value]:
    """What the widest models do at the highest rate; beside it the published words, which are of the published scale alone."""
    dim, high, low = runs["dim"].max(), runs["rate"].max(), runs["rate"].min()
    values = []
    for strategy, own in runs[runs["dim"] == dim].groupby("strategy", sort=False):
        fast, slow = (own[own["rate"] == rate] for rate in (high, low))
        failed = bool(fast["diverged"].any()) or float(fast["lowest"].min()) > float(slow["lowest"].min())
        word, published = "unstable" if failed else "stable", _WORDS.get(str(strategy)) if compared else None
        values.append(Value(f"{strategy}, training at width {dim:,}, rate {high:g}", published, word))
    return values


def _scan_panels(runs: pd.DataFrame, curves: pd.DataFrame) -> list[Panel]:
    """The loss over steps of each strategy, and the last loss over width; means over seeds that stayed finite."""
    runs = runs[~runs["diverged"]]
    curves = curves.merge(runs[["scheme", "dim", "rate", "seed"]])
    curves = curves.assign(strategy=curves["scheme"].map(lambda name: STRATEGIES.get(name, name)))
    means = curves.groupby([*_CELL, "step"], sort=False, as_index=False)["loss"].mean()
    panels = []
    for strategy, own in means.groupby("strategy", sort=False):
        lines = tuple(
            Curve(f"width {dim}, rate {rate:g}", rows["step"], rows["loss"])
            for (dim, rate), rows in own.groupby(["dim", "rate"], sort=False)
        )
        panels.append(Panel(f"{strategy}: loss in training", "step", "loss", lines))
    last = runs.groupby(_CELL, sort=False)["last"].mean().reset_index().sort_values("dim", kind="stable")
    ends = tuple(
        Curve(f"{strategy}, rate {rate:g}", rows["dim"], rows["last"])
        for (strategy, rate), rows in last.groupby(["strategy", "rate"], sort=False)
    )
    return [*panels, Panel("Loss of the last block", "width", "loss", ends, log_x=True)]


def encoder_decoder(request: Request, short: Mapping[str, Any] = _SHORT_PAIR) -> Reproduction:
    """Accuracy of encoder-decoder models, given or trained now, and what norms do in each of their halves."""
    found = _given(request) if request.models else _trained(request, short)
    measured = _stability(request, [one.model for one in found])
    values, _ = comparison([*found, *measured])
    results = {one.model.label: one.model.results[0] for one in found}
    run = found[0].model.results[0].summary.split("; ")[1 if request.models else 2 :]  # names and shapes are listed already
    settings = "; ".join((", ".join(one.model.described for one in found), *run, *([read_text(measured)] if measured else [])))
    own = "" if request.models else "Trained in this run; a pair of your own is measured with --model."
    scanned = [one for one in found if one.model.shape[1] >= _LEAST_WIDTH]
    verdict = judge(values) if scanned else NOT_RUN
    curves = (panel for one in measured for panel in one.panels if len(list(panel.curves[0].x)) > 1)  # one layer is a point
    panels = [*_drawn(results), *curves]
    return Reproduction(verdict, f"{_ENCODERS} {own}".strip(), settings, tuple(values), (), tuple(panels))


def _stability(request: Request, models: Sequence[MeasuredModel]) -> list[Found]:
    """Norm spread, noise and collapse of both halves of models; none of a training that became non-finite."""
    halves = [
        Half(model, source, stream) for model in models for stream in _STREAMS if (source := _source(model, stream)) is not None
    ]
    if not halves:
        return []
    return [
        *spread_of(request, _MODEL, halves),
        *noise_of(request, _MODEL, chosen=halves),
        *collapse_of(request, _MODEL, definitions=("loose", "strict"), chosen=halves),
    ]


def _source(model: MeasuredModel, stream: str) -> str | Model | None:
    """What an experiment opens: the name of a model that was given, or what was trained."""
    run = model.results[0]
    if run.kind is not Train:
        return model.name
    if "divergence" in run.tables:
        return None
    return open_model(run.objects["model"], stream=stream) if run.path is None else str(run.path)


def _given(request: Request) -> list[Found]:
    """The models that were given, tested."""
    examples, found = 128_000 if request.full else 2_000, []
    for name in request.models:
        config = saved_shape(name)
        if not config.encoder:
            raise InputError(f"'{name}' has no encoder; this entry takes encoder-decoders (train --set encoder_layers=N)")
        run = request.run(Evaluate(model=name, examples=examples, show=0, seed=request.seed, device=request.device))
        model = MeasuredModel(name, config.strategy, config.shape, False, (run,), config.encoder)
        found.append(Found(model, _accuracies(run)))
    return found


def _trained(request: Request, short: Mapping[str, Any]) -> list[Found]:
    """A pair that is trained now, with its tests."""
    preset, changes = ("baseline", _FULL_PAIR) if request.full else ("tiny", dict(short))
    found = []
    for scheme, strategy in STRATEGIES.items():
        train = Train(preset=preset, scheme=scheme, set=changes, seed=100 + request.seed, device=request.device)
        run, recipe = request.run(train), train.found
        shape = (recipe.layers, recipe.dim, recipe.heads)
        model = MeasuredModel(f"{preset} {scheme}", strategy, shape, False, (run,), recipe.encoder_layers)
        losses = run.tables["metrics"]["loss"].tolist()
        ended = "non-finite" if "divergence" in run.tables else losses[-1]
        last = Value("loss of the last block of training", None, ended, allowed=None)
        found.append(Found(model, [*_accuracies(run), last]))
    return found


def _drawn(results: Mapping[str, Result]) -> Iterator[Panel]:
    """Accuracy in training, of models that were trained now, and by position in the answer."""
    metrics = {name: run.tables["metrics"] for name, run in results.items() if "metrics" in run.tables}
    lines = tuple(Curve(name, table["examples"], 100 * table["accuracy"]) for name, table in metrics.items())
    if lines:
        yield Panel("In training", "examples", "accuracy in %", lines)
    tested = {name: run.tables["positions"] for name, run in results.items() if "positions" in run.tables}
    rows = {name: table[table["split"] == "in-distribution"] for name, table in tested.items()}
    places = tuple(Curve(name, table["position"], 100 * table["accuracy"]) for name, table in rows.items())
    if places:
        yield Panel("Sums like those of the training", "position in the answer", "accuracy in %", places)


def _accuracies(run: Result) -> list[Value]:
    """Accuracy and exact answers of every split; none for a training that became non-finite."""
    values = []
    for row in plain_rows(run.tables["accuracy"]) if "accuracy" in run.tables else ():
        for column, error, what in (("accuracy", "stderr", "accuracy"), ("exact", "exact_stderr", "exact answers")):
            quantity = f"{_TRAINED[row['split']]}, {what} in %"
            values.append(Value(quantity, None, 100 * row[column], measured_error=100 * row[error], allowed=None))
    return values


ENTRIES = (
    Entry(
        "1:scan", "Stability scan over width and learning rate",
        "3, 4, 5 or 7 integers of 3 to 5 digits; widths 256 to 2,048, 12 heads, 16 frequencies, rates 1e-3 and 1e-4 without "
        "decay, seeds 1 and 2",
        "CPU, half a minute, 16 short trainings of tiny models", scan, f"one H200, 25 min for 32 trainings {ESTIMATED}",
        ("normscope reproduce 1:scan --full --device cuda",), ("full",),
    ),
    Entry(
        "1:encoder-decoder", "Encoder-decoder models of the scan", "depths (e, d), rates 1e-3 and 1e-4",
        "CPU, half a minute, on a tiny pair that it trains", encoder_decoder, f"one H200, training 2 × 10 min {ESTIMATED}",
        (*(f"normscope train --preset baseline --scheme {name} --set encoder_layers=5 --set layers=5 --device cuda "
           f"--out runs/e-{name}" for name in STRATEGIES),
         "normscope reproduce 1:encoder-decoder --full --model runs/e-pre,runs/e-qkv"), ("model", "full"),
    ),
)  # fmt: skip
