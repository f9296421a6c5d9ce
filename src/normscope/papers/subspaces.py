"""Paper 1, what is measured: accuracy, norm spread, noise, circuit collapse and sparsity of models that add integers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from normscope.experiments.evaluate import Evaluate
from normscope.experiments.stability import Stability
from normscope.papers.curves import measured, published
from normscope.papers.entry import ESTIMATED, NOT_RUN, Curve, Entry, Panel, Reproduction, Request, Residual, Value, judge
from normscope.papers.models import (
    SEVERAL,
    SHAPES,
    STRATEGIES,
    Found,
    Half,
    MeasuredModel,
    Reading,
    comparison,
    mean_and_error,
    saved_shape,
)
from normscope.results.tables import plain_rows

_SMALL = ("builtin:addition-small-pre", "builtin:addition-small-qkv")
_STORED = "stored: Baseline models trained by this project, 36 million examples on an H200"
_NOISE_LEVELS = "0.01,0.025,0.05,0.1,0.25"
_SAMPLES = 4  # of examples, over which the errors of quantiles and shares are taken
_COLLAPSED = "Pre-Norm"  # the strategy of the published collapse curves; keys of the other cannot be disturbed
_ALLOWED_ACCURACY = 1.0  # points
_ALLOWED_WIDTH, _ALLOWED_LEVEL = 0.2, 0.1  # shares of a width and of a noise level
_PRESET = {"Baseline": "baseline", "Alternative": "alternative", "Large": "large"}
_MINUTES = {  # of training a pair
    "Baseline": "2 × 8 min on a third of the published examples", "Alternative": f"2 × 6 min {ESTIMATED}",
    "Large": f"2 × 2 h {ESTIMATED}",
}  # fmt: skip
_PEAK = 2.0  # the last bin of a histogram over the one before it, from which there is a peak


def _stored(entry: str) -> list[Value]:
    """What was measured on trained Baseline models, and is stored."""
    table = measured("baseline")
    assert table is not None
    rows = plain_rows(table[table["entry"] == entry].drop(columns="entry"))
    return [Value(**{**row, "published": _number(row["published"]), "measured": _number(row["measured"])}, source=_STORED)
            for row in rows]  # fmt: skip


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _measure(
    request: Request, model: str, samples: int = 1, chosen: Sequence[str | Half] = (), **settings: Any
) -> list[MeasuredModel]:
    """The stability of those that are chosen, or were given, or of the small pair, on so many samples of examples."""
    found = []
    for one in chosen or request.models or _SMALL:
        half = one if isinstance(one, Half) else Half(_saved(one, model), one, "")
        given = {"examples": 1024 if request.full else 128, "device": request.device, "stream": half.stream or None, **settings}
        seeds = range(request.seed, request.seed + samples)
        results = tuple(request.run(Stability(model=half.source, seed=seed, **given)) for seed in seeds)
        stream = str(results[0].configuration["stream"]) if half.model.encoder else ""
        found.append(replace(half.model, results=results, stream=stream))
    return found


def _saved(name: str, model: str) -> MeasuredModel:
    """A model that normscope trained, compared with one of the paper if it has its shape."""
    config = saved_shape(name)
    return MeasuredModel(name, config.strategy, config.shape, config.is_of(model), (), config.encoder)


def _outcome(entry: str, model: str, found: Sequence[Found], note: str = "") -> Reproduction:
    """The verdict: of models with the published shape if some were measured, else of what is stored."""
    values, residuals = comparison(found)
    models = {one.model.name: one.model for one in found}
    shaped, stored = [one for one in models.values() if one.published_shape], _stored(entry)
    checks: list[Value | Residual] = [*residuals, *values] if shaped else [*stored]
    if shaped:
        drawn = [name for name, one in models.items() if not one.published_shape]
        others = f"Not of the shape of the {model}, and not compared: {', '.join(drawn)}." if drawn else ""
        remark = f"Weights are our own, not the authors'. {others} {SEVERAL if len(shaped) > 1 else ''}"
    else:
        others = f"The chart shows {' and '.join(models)}, not compared: the shape is not that of the {model} model."
        own = "The verdict is that of our stored Baseline pair, trained on a third of the examples (docs/results/stability.md)."
        train = "Train the pair with the commands below and give it with --model."
        remark = f"{others} {own if stored else ''} {train}"
    verdict = judge(checks, remark=True) if checks or shaped else NOT_RUN
    panels = tuple(panel for one in found for panel in one.panels)
    text = " ".join(f"{note} {remark}".split())
    return Reproduction(verdict, text, _settings(found), (*stored, *values), tuple(residuals), panels)


def _settings(found: Sequence[Found]) -> str:
    """The models, and what each reads."""
    models = {one.model.name: one.model.described for one in found}
    first = found[0].model.results[0]
    return f"{', '.join(models.values())}; {read_text(found)}; seed {first.seed}"


def read_text(found: Sequence[Found]) -> str:
    """What the first model reads for each measure: the examples of one sample or several."""
    read: dict[str, dict[str, None]] = {}
    for model in (one.model for one in found if one.model.name == found[0].model.name):
        about, several = model.results[0].configuration, len(model.results) > 1
        each, half = f" in each of {len(model.results)} samples" * several, f" of the {model.stream}" * bool(model.stream)
        examples = f"{about['rows']:,} examples ({about['tokens']:,} tokens{half}){each}"
        read.setdefault(examples, {}).update(dict.fromkeys(about["measures"]))
    return ", ".join(f"{examples} for {' and '.join(measures)}" for examples, measures in read.items())


def spread_of(request: Request, model: str, chosen: Sequence[str | Half] = ()) -> list[Found]:
    """90 % interval of the norms at the attention input relative to the median, by layer."""
    readings = published("1-fig1-norm-spread")
    readings = readings[readings["model"] == model].rename(columns={"low90_ratio": "low90", "high90_ratio": "high90"})
    found = []
    for one in _measure(request, model, _SAMPLES, chosen, measures="spread"):
        tables = [result.tables["spread"] for result in one.results]
        samples = [table[table["head"].isna()].assign(layer=lambda rows: rows["layer"].astype(float) + 1) for table in tables]
        widths = [50 * float((rows["high90"] - rows["low90"]).max()) for rows in samples]
        theirs = readings[readings["strategy"] == one.strategy]
        widest = float(theirs["half90_percent"].max()) if len(theirs) else None
        half, error = mean_and_error(widths)
        quantity = "half-width of the 90 % interval in the widest layer, in %"
        allowed = None if widest is None else _ALLOWED_WIDTH * widest
        by_layer, compared = pd.concat(samples).groupby("layer", as_index=False), []
        mean = by_layer[["low90", "high90"]].mean()
        for edge in ("low90", "high90"):
            ours = mean.assign(stderr=by_layer[edge].sem()[edge])
            size = _ALLOWED_WIDTH * float((theirs[edge] - 1).abs().max())
            compared.append(Reading("", f"{edge} of norm / median", theirs, ours, ("layer", edge, edge), size))
        curves = [Curve(edge, mean["layer"], mean[edge]) for edge in ("low90", "high90")]
        curves += [Curve(edge, theirs["layer"], theirs[edge], published=True) for edge in ("low90", "high90") if len(theirs)]
        panel = Panel(f"{one.label}, norm spread", "layer (from 1)", "norm over median", tuple(curves), log_y=True)
        value = Value(quantity, widest, half, measured_error=error, allowed=allowed)
        # layers of another model are others
        found.append(Found(one, [value], compared if one.published_shape else (), [panel]))
    return found


def norm_spread(entry: str, model: str, request: Request) -> Reproduction:
    """The norm spread of every model beside the published intervals."""
    return _outcome(entry, model, spread_of(request, model))


def noise_of(request: Request, model: str, figures: tuple[str, ...] = (), chosen: Sequence[str | Half] = ()) -> list[Found]:
    """Accuracy against the RMS of noise on the norms of q, k, m and of q, k; on all, sparse and non-sparse rows."""
    left, right = published("1-fig2-left-noise-accuracy"), published("1-fig2-right-sparse-accuracy")
    left = left[(left["tokens"] == "all") & (left["noisy"] != "v")].assign(where="all")
    right = right.assign(where=right["applied_when"].replace({"always": "all"}))
    readings = pd.concat([left, right])
    readings = readings[readings["figure"].astype(str).isin(figures) & (readings["model"] == model)]
    readings = readings.assign(perturbed=readings["noisy"].replace({"q,k,v": "q,k,m"}), noise=readings["noise_rms_percent"])
    readings = readings.drop_duplicates(["strategy", "perturbed", "where", "noise"])  # Figure 2 draws noise on q, k twice
    shown = readings[["perturbed", "where"]].drop_duplicates().itertuples(index=False, name=None)
    disturbed = list(shown) or [("q,k,m", "all"), ("q,k", "all")]
    draws: dict[str, Any] = {} if request.full else {"draws": 2}
    measured_at = {"noise_levels": _NOISE_LEVELS, "layer_noise": "none", **draws}
    models = _measure(request, model, chosen=chosen, measures="noise", **measured_at)
    found = []
    for one in models:
        table = one.table("noise")
        table = table[table["layer"].isna()].assign(noise=lambda rows: 100 * rows["noise"])
        table = table.assign(accuracy=100 * table["accuracy"], stderr=100 * table["accuracy_stderr"])
        own = readings[readings["strategy"] == one.strategy]
        values, compared, curves = [_accuracy("no noise", 0.0, own, table)], [], []
        for perturbed, where in disturbed:
            theirs, ours = (
                rows[(rows["perturbed"] == perturbed) & (rows["where"] == where) & (rows["noise"] > 0)] for rows in (own, table)
            )
            name, columns = f"{perturbed}, {where}", ("noise", "accuracy_percent", "accuracy")
            compared.append(Reading(name, "accuracy in %", theirs, ours, columns, _ALLOWED_ACCURACY))
            values += [_accuracy(_noise_name(perturbed, where, level), level, theirs, ours) for level in (1.0, 10.0)]
            curves.append(Curve(name, ours["noise"], ours["accuracy"]))
            if len(theirs):
                curves.append(Curve(name, theirs["noise"], theirs["accuracy_percent"], published=True))
        panel = Panel(f"{one.label}, noise", "RMS noise in %", "accuracy in %", tuple(curves), log_x=True)
        found.append(Found(one, values, compared if one.published_shape else (), [panel]))
    return found


def _noise_name(perturbed: str, where: str, level: float) -> str:
    letters = {"q,k,m": "q, k, m", "q,k": "q and k"}[perturbed]
    return f"{level:g} % noise on {letters}{f' of {where} rows' if where != 'all' else ''}"


def _accuracy(what: str, level: float, theirs: pd.DataFrame, ours: pd.DataFrame) -> Value:
    """Accuracy at one level of noise, published and measured."""
    read, own = (plain_rows(rows[np.isclose(rows["noise"], level)])[:1] for rows in (theirs, ours))
    known = (read[0]["accuracy_percent"], (read[0]["high"] - read[0]["low"]) / 2) if read else (None, 0.0)
    return Value(f"{what}, accuracy in %", known[0], own[0]["accuracy"], known[1], own[0]["stderr"], _ALLOWED_ACCURACY)


def noise_accuracy(entry: str, figures: tuple[str, ...], model: str, request: Request) -> Reproduction:
    """Accuracy under noise of every model beside the published curves."""
    return _outcome(entry, model, noise_of(request, model, figures))


def collapse_of(
    request: Request,
    model: str,
    figure: str = "",
    definitions: tuple[str, ...] = ("loose",),
    chosen: Sequence[str | Half] = (),
) -> list[Found]:
    """Share of sparse rows whose largest weight moves to another key, against the RMS of the noise in one layer."""
    draws: dict[str, Any] = {} if request.full else {"draws": 2}
    readings = published("1-fig3-circuit-collapse")
    readings = readings[readings["figure"].astype(str) == figure]
    readings = readings.assign(noise=readings["noise_rms_percent"], log_share=np.log10(readings["collapse_percent"]))
    models = _measure(request, model, chosen=chosen, measures="collapse", **draws)
    return [_collapsed(one, readings, definition) for one in models for definition in definitions]


def _collapsed(one: MeasuredModel, readings: pd.DataFrame, definition: str) -> Found:
    """The collapse of one model by one definition, beside readings of the published curves."""
    read = readings if one.strategy == _COLLAPSED else readings[:0]
    everywhere = read[read["layer"] == "all"].sort_values("noise")
    level = _level(everywhere["noise"], everywhere["collapse_percent"])
    table = one.table("collapse")
    table = table[(table["definition"] == definition) & table["head"].isna()]
    table = table.assign(noise=100 * table["noise"], share=100 * table["probability"], stderr=100 * table["stderr"])
    whole = table[table["layer"].isna()]
    strokes = {"all layers": (whole, everywhere)}
    if one.published_shape:  # layers of another model are others
        for layer, rows in table[table["layer"].notna()].groupby("layer"):
            number = int(str(layer)) + 1
            strokes[f"layer {number}"] = (rows, read[read["layer"] == str(number)])
    compared, curves = [], []
    for name, (ours, theirs) in strokes.items():
        above = ours[ours["share"] > 0]
        logs = above[["noise"]].assign(log_share=np.log10(above["share"]))
        columns = ("noise", "log_share", "log_share")
        compared.append(Reading(name, "log10 of the collapse in %", theirs, logs, columns, None, between=True))
        curves.append(Curve(name, ours["noise"], ours["share"]))
        if len(theirs):
            curves.append(Curve(name, theirs["noise"], theirs["collapse_percent"], published=True))
    title = f"{one.label}, {'strict ' * (definition == 'strict')}collapse"
    panel = Panel(title, "RMS noise in %", "collapse in %", tuple(curves), log_x=True, log_y=True)
    drawn = [panel] if (table["share"] > 0).any() else []  # a logarithmic axis has no zero
    return Found(one, [_collapse_level(one, whole, definition, level)], compared if one.published_shape else (), drawn)


def _collapse_level(one: MeasuredModel, whole: pd.DataFrame, definition: str, level: float) -> Value:
    """The noise at which 1 % of the sparse rows switch, published and measured."""
    if definition == "loose":
        solved = plain_rows(one.table("collapse_level"))[0]
        own, error = (math.nan if solved[name] is None else 100 * solved[name] for name in ("noise", "stderr"))
    else:
        own = _level(whole["noise"], whole["share"])
        edges = [_level(whole["noise"], whole["share"] + sign * whole["stderr"]) for sign in (1, -1)]
        error = abs(edges[1] - edges[0]) / 2
    sparse = bool(whole["sparse"].any())
    reached = own if math.isfinite(own) else f"not reached up to {whole['noise'].max():.3g} %" if sparse else "no sparse rows"
    what = "switch key" if definition == "loose" else "switch to another sparse row"
    known = level if math.isfinite(level) else None
    return Value(
        f"RMS noise at which 1 % of the sparse rows {what}, in %", known, reached,
        measured_error=error if math.isfinite(error) else 0.0,
        allowed=None if known is None else _ALLOWED_LEVEL * known,
    )  # fmt: skip


def collapse(entry: str, figure: str, model: str, definition: str, request: Request) -> Reproduction:
    """Circuit collapse of every model beside the published curves."""
    return _outcome(entry, model, collapse_of(request, model, figure, (definition,), request.models or _SMALL[:1]))


def _level(noise: pd.Series, share: pd.Series) -> float:
    """The noise at which the share passes 1 %, between points of a doubly logarithmic curve; NaN where it does not."""
    rows = share.to_numpy(float) > 0
    x, y = np.log(noise.to_numpy(float)[rows]), np.log(share.to_numpy(float)[rows])
    return math.exp(np.interp(0.0, y, x)) if len(y) and y[0] <= 0 <= y[-1] else math.nan


def sparsity(request: Request) -> Reproduction:
    """Histogram of the largest weight of attention rows."""
    found, curves = [], []
    for one in _measure(request, "Baseline", _SAMPLES, measures="sparsity"):
        tables = [result.tables["maxima"] for result in one.results]
        bins = pd.concat([table[table["layer"].isna() & table["head"].isna()] for table in tables])
        counts = bins.pivot_table(index=["low", "high"], values="count", aggfunc="sum", sort=True).reset_index()
        share = counts["count"] / counts["count"].sum()
        shape = "peak at 1" if float(share.iloc[-1]) > _PEAK * float(share.iloc[-2]) else "no peak at 1"
        expected = {"Pre-Norm": "peak at 1", "QKV-Norm": "no peak at 1"}.get(one.strategy)
        totals = [result.tables["sparsity"] for result in one.results]
        shares = [100 * float(table[table["layer"].isna()]["share"].iloc[0]) for table in totals]
        mean, error = mean_and_error(shares)
        values = [
            Value("largest attention weight", expected, shape, allowed=None if expected is None else 0.0),
            Value("rows whose largest weight is 0.95 or more, in %", None, mean, measured_error=error, allowed=None),
        ]
        found.append(Found(one, values))
        curves.append(Curve(one.label, (counts["low"] + counts["high"]) / 2, 100 * share))
    panel = Panel("Largest attention weight", "largest weight of a row", "share of rows in %", tuple(curves))
    note = "The paper shows histograms without numbers that could be read: only their shape is compared."
    return replace(_outcome("1:sparsity", "Baseline", found, note), panels=(panel,))


def large(request: Request) -> Reproduction:
    """Norm spread, noise and collapse of models, of the Large shape if such were given; nothing of it can be compared."""
    note = "The published curves of the Large model (Figures 16 and 23) were not read: nothing is compared."
    found = [
        *spread_of(request, "Large"),
        *noise_of(request, "Large"),
        *collapse_of(request, "Large"),
    ]
    return _outcome("1:large", "Large", found, note)


def accuracy(request: Request) -> Reproduction:
    """Accuracy per character in distribution and out of it."""
    splits = {"in-distribution": "in distribution", "ood-interpolation": "OOD interpolation",
              "ood-extrapolation": "OOD extrapolation"}  # fmt: skip
    stored = _stored("1:accuracy")
    expected = {value.quantity: value for value in stored}
    examples, found = 128_000 if request.full else 2_000, []
    for name in request.models or _SMALL:
        one = _saved(name, "Baseline")
        run = request.run(Evaluate(model=name, examples=examples, show=0, seed=request.seed, device=request.device))
        one, values = replace(one, results=(run,)), []
        for row in plain_rows(run.tables["accuracy"]):
            quantity = f"{splits[row['split']]}, accuracy in %"
            known = expected.get(f"{one.strategy}, {quantity}")
            error, allowed = (known.published_error, known.allowed) if known else (0.0, None)
            values.append(
                Value(quantity, known.published if known else None, 100 * row["accuracy"], error, 100 * row["stderr"], allowed)
            )
        found.append(Found(one, values))
    values, _ = comparison(found)
    compared = [value for value in values if value.allowed is not None]
    small = "" if compared else "Models of this run do not have the shape of the Baseline and are not compared. "
    several = f"{SEVERAL} " if any(value.source.endswith(": mean") for value in values) else ""
    own = (
        "Stored values are of one seed, trained on 36 million examples in batches of 512; the paper trained on about 110 "
        "million in batches of 128. In distribution both schemes are below the published values. QKV-Norm is "
        "also below them in interpolation and extrapolation. Pre-Norm agrees in interpolation and is above the published value "
        "in extrapolation."
    )
    settings = f"{', '.join(one.model.described for one in found)}; {examples:,} examples a split; seed {request.seed}"
    return Reproduction(judge(compared or stored, remark=True), f"{small}{several}{own}", settings, (*stored, *values))


def _training(model: str) -> tuple[str, ...]:
    preset = _PRESET[model]
    return tuple(
        f"normscope train --preset {preset} --scheme {name} --device cuda --out runs/{preset}-{name}" for name in STRATEGIES
    )


def _entry(id: str, title: str, model: str, make: Any, measured_on: str = "small models of the package") -> Entry:
    preset = _PRESET[model]
    commands = (*_training(model), f"normscope reproduce {id} --full --model runs/{preset}-pre,runs/{preset}-qkv")
    setting = f"the paper's {model}: {SHAPES[model][0]} layers, width {SHAPES[model][1]}, {SHAPES[model][2]} heads of 64"
    return Entry(id, title, setting, f"CPU, up to 10 s, on {measured_on}", make,
                 f"one H200, training {_MINUTES[model]}", commands, ("model", "full"))  # fmt: skip


ENTRIES = (
    _entry("1:accuracy", "Accuracy in distribution and out of it (its table)", "Baseline", accuracy),
    *(
        _entry(f"1:{name}", f"Norm spread at the attention input, {model}", model, partial(norm_spread, f"1:{name}", model))
        for name, model in (("fig1", "Baseline"), ("fig15", "Alternative"))
    ),
    *(
        _entry(f"1:{name}", f"Accuracy under noise{what}, {model}", model, partial(noise_accuracy, f"1:{name}", figures, model))
        for name, figures, model, what in (
            ("fig2", ("2 left", "2 right"), "Baseline", ""),
            ("fig17", ("17",), "Baseline", " on all rows"),
            ("fig18", ("18",), "Alternative", " on all rows"),
            ("fig19", ("19",), "Baseline", " on sparse and non-sparse rows"),
            ("fig20", ("20",), "Alternative", " on sparse and non-sparse rows"),
        )
    ),
    *(
        _entry(f"1:{name}", f"Circuit collapse, {what}, {model}", model,
               partial(collapse, f"1:{name}", figure, model, definition), "the small Pre-LN model of the package")
        for name, figure, model, definition, what in (
            ("fig3", "3", "Baseline", "loose", "argmax moves"),
            ("fig13", "13 bottom", "Baseline", "strict", "the new maximum is sparse too"),
            ("fig22", "22", "Alternative", "loose", "argmax moves"),
        )
    ),
    _entry("1:sparsity", "Histogram of the largest attention weight", "Baseline", sparsity),
    _entry("1:large", "Norm spread, noise and collapse of the Large model (Figures 16 and 23)", "Large", large),
)  # fmt: skip
