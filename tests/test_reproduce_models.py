"""Entries of paper 1: models of several seeds, the stability scan, encoder-decoders and the Large model, on tiny models."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import normscope as ns
from normscope.errors import InputError
from normscope.papers import models
from normscope.papers.entry import NO_NUMBERS, NOT_REPRODUCED, NOT_RUN, WITH_REMARK, Panel, Request, Value
from normscope.papers.models import Found, MeasuredModel, Reading, comparison
from normscope.papers.subspaces import accuracy, collapse, large, norm_spread
from normscope.papers.trainings import _cell, _scan_panels, _source, encoder_decoder, scan
from normscope.sweeps.plan import read_plan

TINY: dict[str, Any] = {
    "layers": 1, "dim": 16, "heads": 2, "head": 8, "feedforward": 16, "readout": [16], "frequencies": 4,
    "batch": 32, "examples": 64, "epoch": 1, "test_examples": 16,
}  # fmt: skip
SHAPE = (1, 16, 2)
MEASURED = [
    "half-width of the 90 % interval in the widest layer, in %", "no noise, accuracy in %",
    *(f"{level} % noise on {parts}, accuracy in %" for parts in ("q, k, m", "q and k") for level in (1, 10)),
    *(f"RMS noise at which 1 % of the sparse rows switch {to}, in %" for to in ("key", "to another sparse row")),
]  # fmt: skip
SCAN: dict[str, Any] = {
    "kind": "train",
    "preset": "tiny",
    "fixed": {
        **{key: value for key, value in TINY.items() if key != "dim"},
        "integers": [3, 4, 5, 7],
        "digits": [3, 4, 5],
        "schedule": "constant",
        "warmup": 0,
        "clip": 0.0,
    },
    "grid": {"seed": [1, 2], "scheme": ["pre", "qkv"], "dim": [16, 24], "rate": [1e-2, 1e-3]},
}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Pre-Norm and QKV-Norm, two seeds each; the names are paths."""
    folder, names = tmp_path_factory.mktemp("models"), []
    for scheme in ("pre", "qkv"):
        for seed in (1, 2):
            names.append(str(folder / f"{scheme}-{seed}"))
            ns.train("tiny", scheme=scheme, set=TINY, seed=seed, device="cpu", out=names[-1], progress=False)
    return tuple(names)


def rows_of(values: tuple[Value, ...], what: str) -> list[Value]:
    return [value for value in values if value.quantity.startswith(what) and not value.source.startswith("stored")]


def measured(name: str, shape: tuple[int, ...], published: bool = True) -> MeasuredModel:
    return MeasuredModel(name, "Pre-Norm", shape, published, ())


def test_models_with_other_encoders_are_not_averaged() -> None:
    found = [
        Found(MeasuredModel(name, "Pre-Norm", SHAPE, False, (), encoder), [Value("loss", None, number, allowed=None)])
        for name, encoder, number in (("a", 1, 1.0), ("b", 2, 3.0), ("c", 1, 2.0))
    ]
    values, _ = comparison(found)
    assert [(value.measured, "mean" in value.quantity) for value in values] == [
        (1.0, False), (2.0, False), (1.5, True), (3.0, False)
    ]  # fmt: skip


def test_the_mean_over_seeds_is_compared_and_other_shapes_are_not_mixed_in() -> None:
    def found(model: MeasuredModel, number: float) -> Found:
        ours = pd.DataFrame({"x": [1.0, 2.0], "v": [number, number]})
        theirs = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 3.0]})
        reading = Reading("curve", "height", theirs, ours, ("x", "y", "v"), 0.5)
        return Found(model, [Value("height", 3.0, number, allowed=0.5)], [reading], [Panel(model.label, "", "", ())])

    one, two = found(measured("one", (2, 8, 2)), 1.0), found(measured("two", (2, 8, 2)), 4.0)
    other = found(measured("other", (4, 8, 2), published=False), 100.0)
    values, residuals = comparison([one, two, other])
    assert [(value.source, value.measured, value.agrees) for value in values] == [
        ("this run: one", 1.0, None), ("this run: two", 4.0, None), ("this run: mean", 2.5, True),
        ("this run: other", 100.0, None),
    ]  # fmt: skip
    assert values[2].measured_error == pytest.approx(statistics.stdev([1.0, 4.0]))
    assert [(r.curve, r.rms, r.agrees) for r in residuals] == [
        ("Pre-Norm: one: curve", 2.0, None), ("Pre-Norm: two: curve", 1.0, None),
        ("Pre-Norm: mean of 2 models: curve", 0.5, True), ("Pre-Norm: other: curve", 97.0, None),
    ]  # fmt: skip
    assert residuals[2].noise == pytest.approx(statistics.stdev([1.0, 4.0]))
    alone, _ = comparison([one])
    assert [(value.measured, value.agrees) for value in alone] == [(1.0, False)]


def test_accuracy_of_several_seeds(seeds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    small = accuracy(Request(models=seeds))
    assert not any(value.agrees is not None for value in rows_of(small.values, ""))
    monkeypatch.setitem(models.SHAPES, "Baseline", SHAPE)
    found = accuracy(Request(models=seeds))
    assert found.verdict == NOT_REPRODUCED
    for strategy, own in (("Pre-Norm", seeds[:2]), ("QKV-Norm", seeds[2:])):
        rows = rows_of(found.values, f"{strategy}, in distribution")
        assert [value.source for value in rows] == [*(f"this run: {name}" for name in own), "this run: mean"]
        numbers = [float(value.measured or 0) for value in rows]
        tested = [ns.evaluate(name, examples=2000, device="cpu", progress=False).tables["accuracy"] for name in own]
        assert numbers[:2] == pytest.approx([100 * float(table["accuracy"].iloc[0]) for table in tested])
        assert numbers[2] == pytest.approx(statistics.mean(numbers[:2]))
        assert rows[2].measured_error == pytest.approx(statistics.stdev(numbers[:2]))
        assert [value.agrees for value in rows] == [None, None, False]
        assert all(value.measured_error > 0 for value in rows)


def test_norm_spread_of_several_seeds_has_a_row_and_a_panel_for_each(
    seeds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.SHAPES, "Baseline", SHAPE)
    found = norm_spread("1:fig1", "Baseline", Request(models=seeds))
    assert len({panel.title for panel in found.panels}) == 4
    assert len({(r.curve, r.quantity) for r in found.residuals}) == len(found.residuals) == 12
    compared = {r.curve for r in found.residuals if r.agrees is not None}
    assert compared == {"Pre-Norm: mean of 2 models", "QKV-Norm: mean of 2 models"}
    assert all(name in found.settings for name in seeds)
    assert "128 examples" in found.settings
    assert "in each of 4 samples" in found.settings


def test_only_pre_norm_is_compared_with_the_published_collapse(seeds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "Baseline", SHAPE)
    found = collapse("1:fig3", "3", "Baseline", "loose", Request(models=(seeds[0], seeds[2])))
    (pre,), (qkv,) = (rows_of(found.values, strategy) for strategy in ("Pre-Norm", "QKV-Norm"))
    assert pre.published == pytest.approx(10.97, abs=0.02)
    assert (qkv.published, qkv.measured, qkv.agrees) == (None, "no sparse rows", None)


def test_the_large_model_is_measured_and_nothing_is_compared(seeds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(models=(seeds[0], seeds[2]))
    other = large(request)
    assert other.verdict == NOT_RUN
    assert not other.residuals
    titles = [panel.title for panel in other.panels]
    for what in ("norm spread", "noise"):
        assert sum(title.endswith(f", {what}") for title in titles) == 2
    assert f"QKV-Norm: {seeds[2]}, collapse" not in titles  # its share is 0 at every noise
    assert len(set(titles)) == len(titles)
    for strategy in ("Pre-Norm", "QKV-Norm"):
        clean = rows_of(other.values, f"{strategy}, no noise")
        assert [value.published for value in clean] == [None]
        assert clean[0].measured_error > 0
        assert rows_of(other.values, f"{strategy}, half-width")[0].measured_error > 0
        assert rows_of(other.values, f"{strategy}, 10 % noise on q, k, m,")
        assert rows_of(other.values, f"{strategy}, RMS noise at which 1 %")
    monkeypatch.setitem(models.SHAPES, "Large", SHAPE)
    assert large(request).verdict == NO_NUMBERS


def test_the_packaged_scan_has_the_task_of_the_paper() -> None:
    plan = read_plan("paper-scan")
    assert len(plan.points) == 32
    for point in plan.points:
        recipe = point.experiment.field_values
        assert (recipe["integers"], recipe["digits"]) == ([3, 4, 5, 7], [3, 4, 5])
        assert (recipe["heads"], recipe["frequencies"], recipe["readout"]) == (12, 16, [512, 512, 512])
        assert (recipe["schedule"], recipe["warmup"]) == ("constant", 0)
    assert {point.value("rate") for point in plan.points} == {1e-3, 1e-4}
    assert {point.value("seed") for point in plan.points} == {1, 2}
    widths = {point.value("dim") for point in plan.points}
    assert (min(widths), max(widths)) == (256, 2048)


def test_a_scan_reports_every_strategy_width_and_rate_and_resumes(tmp_path: Path) -> None:
    found = scan(Request(folder=tmp_path), SCAN)
    assert found.verdict == NOT_RUN
    assert "3,4,5,7 integers of 3,4,5 digits" in found.settings
    changes = {**SCAN["fixed"], "dim": 24, "rate": 1e-2}
    runs = [ns.train("tiny", scheme="qkv", set=changes, seed=seed, device="cpu", progress=False) for seed in (1, 2)]
    curves = [run.tables["metrics"]["loss"].tolist() for run in runs]
    where = "QKV-Norm, width 24, rate 0.01"
    last, rise, broken = rows_of(found.values, f"{where}:")
    assert last.measured == pytest.approx(statistics.mean(curve[-1] for curve in curves))
    assert last.measured_error == pytest.approx(abs(curves[0][-1] - curves[1][-1]) / 2)
    assert rise.measured == pytest.approx(statistics.mean(max(0.0, curve[1] - curve[0]) for curve in curves))
    assert broken.measured == "0 of 2"
    assert len(found.values) == 2 + 8 * 3
    words = rows_of(found.values, "Pre-Norm, training at width 24, rate 0.01")
    assert [(value.published, value.agrees) for value in words] == [(None, None)]
    complete = {path: path.stat().st_mtime_ns for path in tmp_path.glob("train-*/run.json")}
    assert len(complete) == 16
    assert scan(Request(folder=tmp_path), SCAN).values == found.values
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("train-*/run.json")} == complete
    assert [len(panel.curves) for panel in found.panels] == [4, 4, 4]


def test_the_full_scan_is_the_packaged_plan_and_is_compared_with_the_published_words(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {"paper-scan": {**SCAN, "grid": {**SCAN["grid"], "dim": [16], "seed": [1]}}}
    monkeypatch.setattr("normscope.papers.trainings.packaged_plan", plans.__getitem__)
    found = scan(Request(full=True))
    words = {value.quantity.partition(",")[0]: value for value in found.values if "training at" in value.quantity}
    assert {strategy: value.published for strategy, value in words.items()} == {"Pre-Norm": "unstable", "QKV-Norm": "stable"}
    agree = all(value.measured == value.published for value in words.values())
    assert found.verdict == (WITH_REMARK if agree else NOT_REPRODUCED)


def test_a_scan_calls_a_training_that_becomes_non_finite_unstable() -> None:
    one = {**SCAN, "grid": {"seed": [1], "scheme": ["pre"], "dim": [16], "rate": [1e30, 1e-3]}}
    found = scan(Request(), one)
    word, last, _, broken = found.values[:4]
    assert (word.measured, last.measured, broken.measured) == ("unstable", "non-finite", "1 of 1")


def test_table_and_chart_leave_out_seeds_that_became_non_finite() -> None:
    cell = {"strategy": "Pre-Norm", "scheme": "pre", "dim": 16, "rate": 0.1}
    runs = pd.DataFrame(
        [{**cell, "seed": 1, "diverged": True, "last": 50.0, "lowest": 2.0, "rise": 48.0},
         {**cell, "seed": 2, "diverged": False, "last": 2.0, "lowest": 2.0, "rise": 0.0}]
    )  # fmt: skip
    last, rise, broken = _cell(runs)
    assert (last.measured, rise.measured, broken.measured) == (2.0, 24.0, "1 of 2")
    assert last.quantity.endswith(", of 1 of 2 seeds")
    curves = pd.DataFrame([{**cell, "seed": seed, "step": 1, "loss": loss} for seed, loss in ((1, 50.0), (2, 2.0))])
    training, ends = _scan_panels(runs, curves.drop(columns="strategy"))
    assert [list(panel.curves[0].y) for panel in (training, ends)] == [[2.0], [2.0]]


def test_another_seed_trains_other_models() -> None:
    one = {**SCAN, "grid": {"seed": [1], "scheme": ["pre"], "dim": [16], "rate": [1e-2]}}
    first, second = (rows_of(scan(Request(seed=seed), one).values, "Pre-Norm, width")[0] for seed in (0, 1))
    assert first.measured != second.measured


def test_encoder_decoders_are_trained_and_own_ones_are_measured(tmp_path: Path) -> None:
    pair = {**TINY, "encoder_layers": 1, "examples": 960, "test_examples": 128}
    found = encoder_decoder(Request(), pair)
    assert found.verdict == NOT_RUN
    assert "1 + 1 layers" in found.settings
    for strategy in ("Pre-Norm", "QKV-Norm"):
        rows = [*rows_of(found.values, f"{strategy}, sums"), *rows_of(found.values, f"{strategy}, OOD")]
        assert sum("accuracy" in value.quantity for value in rows) == 3
        assert all(value.measured_error > 0 for value in rows if "accuracy" in value.quantity)
        assert math.isfinite(float(rows_of(found.values, f"{strategy}, loss")[0].measured or math.nan))
        encoder, decoder = (rows_of(found.values, f"{strategy}, {stream}, ") for stream in ("encoder", "decoder"))
        assert [row.quantity.partition("encoder, ")[2] for row in encoder] == MEASURED
        assert [row.quantity.partition("decoder, ")[2] for row in decoder] == MEASURED
        assert all(row.measured_error > 0 for row in (*encoder[:6], *decoder[:6]))
        assert encoder[0].measured != decoder[0].measured
        assert encoder[1].measured == decoder[1].measured  # without noise
    titles = [panel.title for panel in found.panels]
    assert titles[:2] == ["In training", "Sums like those of the training"]
    assert len(set(titles)) == len(titles)
    assert {title for title in titles if title.endswith(", noise")} == {
        f"{strategy}: tiny {scheme}, {stream}, noise"
        for scheme, strategy in models.STRATEGIES.items()
        for stream in ("encoder", "decoder")
    }
    with pytest.raises(InputError, match="has no encoder"):
        encoder_decoder(Request(models=("builtin:addition-small-pre",)))
    own = str(tmp_path / "own")
    run = ns.train("tiny", scheme="qkv", set=pair, device="cpu", out=own, progress=False)
    assert _source(replace(measured("own", SHAPE), results=(run,)), "encoder") == own  # by its folder, whose content is checked
    given = encoder_decoder(Request(models=(own,)))
    tested = ns.evaluate(own, examples=2000, device="cpu", progress=False).tables["accuracy"]
    assert given.values[0].measured == pytest.approx(100 * float(tested["accuracy"].iloc[0]))
    assert given.values[0].source == f"this run: {own}"
    assert [panel.title for panel in given.panels] == [
        "Sums like those of the training",
        *(f"QKV-Norm: {own}, {stream}, noise" for stream in ("encoder", "decoder")),
    ]
    noise = ns.stability(own, stream="encoder", examples=128, measures="noise", device="cpu", progress=False).tables["noise"]
    clean = rows_of(given.values, "QKV-Norm, encoder, no noise")[0]
    assert clean.measured == pytest.approx(100 * float(noise["accuracy"].iloc[0]))
    assert f"{own} (QKV-Norm, 1 + 1 layers, width 16, 2 heads)" in given.settings


def test_strategies_are_blocks_and_not_names(tmp_path: Path) -> None:
    for name, attention in (("pre", 'heads = "qkv"'), ("mine", 'input = "norm"')):
        file = tmp_path / f"{name}.toml"
        file.write_text(f'name = "{name}"\n[attention]\n{attention}\n[feedforward]\ninput = "norm"\n')
        ns.train("tiny", scheme=str(file), set=TINY, device="cpu", out=str(tmp_path / f"run-{name}"), progress=False)
    ns.train("tiny", set={**TINY, "norm": "layer"}, device="cpu", out=str(tmp_path / "run-layer"), progress=False)
    ns.train("tiny", scheme="dyt", set=TINY, device="cpu", out=str(tmp_path / "run-dyt"), progress=False)
    found = [models.saved_shape(str(tmp_path / f"run-{name}")) for name in ("pre", "mine", "layer", "dyt")]
    assert [each.strategy for each in found] == ["QKV-Norm", "Pre-Norm", "Pre-Norm", "dyt"]
    assert found[1].shape == SHAPE


def test_models_of_text_are_refused_by_paper_1(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("To kill two birds with one stone. " * 400)
    own = str(tmp_path / "own")
    shape = {"layers": 1, "dim": 16, "heads": 2, "head": 8, "feedforward": 16}
    changes = {**shape, "vocabulary": 280, "context": 16, "examples": 16}
    ns.train("tiny", task="text", corpus=str(tmp_path / "text.txt"), set=changes, device="cpu", out=own, progress=False)
    for make in (accuracy, lambda request: norm_spread("1:fig1", "Baseline", request), encoder_decoder):
        with pytest.raises(InputError, match=r"was trained on text; the entries of paper 1 measure models that add integers"):
            make(Request(models=(own,)))


def test_an_encoder_decoder_is_not_taken_for_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "Baseline", SHAPE)
    own = str(tmp_path / "own")
    ns.train("tiny", set={**TINY, "encoder_layers": 1}, device="cpu", out=own, progress=False)
    assert accuracy(Request(models=(own,))).verdict in (NOT_REPRODUCED, WITH_REMARK)
    assert all(value.agrees is None for value in rows_of(accuracy(Request(models=(own,))).values, ""))
    alone = ns.train("tiny", set={**TINY, "encoder_layers": 1}, device="cpu", progress=False)
    views = [_source(replace(measured("own", SHAPE), results=(alone,)), stream) for stream in ("encoder", "decoder")]
    assert [getattr(view, "stream", None) for view in views] == ["encoder", "decoder"]
    spread = norm_spread("1:fig1", "Baseline", Request(models=(own,)))
    assert not spread.residuals
    assert [value.agrees for value in rows_of(spread.values, "Pre-Norm, decoder, half-width")] == [None]
    assert "1 + 1 layers" in spread.settings
