"""``normscope train --watch``: the same training to the bit, with a watched run in its folder."""

import math
from pathlib import Path

import pytest
import torch

import normscope as ns
from helpers.cli import run
from normscope.experiments.train import Train
from normscope.runs import open_run
from normscope.runs.segments import read_segments
from normscope.training import Training
from normscope.training.loop import StepObserver

SMALL = {
    "layers": 2, "dim": 16, "heads": 2, "head": 8, "feedforward": 16, "readout": [8], "frequencies": 2, "batch": 8,
    "epoch": 8, "examples": 8 * 30, "test_examples": 16, "warmup": 0, "clip": 1.0,
}  # fmt: skip
SETTINGS = tuple(text for key, value in SMALL.items() for text in ("--set", f"{key}={value}"))


def train(capsys: pytest.CaptureFixture[str], out: str, *more: str) -> int:
    status, _, err = run(capsys, "train", "--preset", "tiny", *SETTINGS, "--json", "--out", out, *more)
    assert status in (0, 1), err
    return status


def test_metrics_and_weights_are_the_same_to_the_bit_and_the_folder_has_the_probes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(capsys, "runs/plain")
    train(capsys, "runs/watched", "--watch", "5")
    plain, watched = (open_run(f"runs/{name}") for name in ("plain", "watched"))
    assert not (plain.path / "watch").exists()
    metrics = ["step", "examples", "loss", "accuracy", "rate"]
    assert plain.table("metrics")[metrics].equals(watched.table("metrics")[metrics])
    models = [ns.open(f"runs/{name}").model.state_dict() for name in ("plain", "watched")]  # type: ignore[attr-defined]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    tables = read_segments(watched.path / "watch")
    assert list(tables["steps"]["step"]) == [1, 5, 10, 15, 20, 25, 30]  # blocks of steps end at multiples of 8
    assert tables["layers"]["layer"].max() == SMALL["layers"]
    assert (tables["steps"]["gradient"] > 0).all()


def test_the_probed_loss_and_gradient_are_those_of_the_step(here: Path) -> None:
    """A training of one step at a time is the reference: its gradients are in .grad when the observer is called."""
    training = Training(Train(preset="tiny", set=SMALL).found)
    seen: dict[int, tuple[float, float]] = {}

    class Reference(StepObserver):
        def due(self, step: int) -> bool:
            return True

        def step(self, loss: float, *, step: int, rate: float) -> None:
            squares = [float(p.grad.double().square().sum()) for p in training.model.parameters() if p.grad is not None]
            seen[step] = loss, math.sqrt(sum(squares))

    for _ in training.run(observer=Reference()):
        pass
    result = ns.train("tiny", set=SMALL, watch=7, device="cpu", progress=False)
    result.save("runs/saved")
    steps = read_segments(Path("runs/saved/watch"))["steps"].set_index("step")
    assert list(steps.index) == [1, 7, 14, 21, 28]
    for step, row in steps.iterrows():
        assert (row["loss"], row["gradient"]) == pytest.approx(seen[int(str(step))], rel=1e-6)


def test_a_training_that_stopped_resumes_with_its_probes(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after its second block, at step 16, with a checkpoint; the probe of step 15 is on disk by then."""
    whole, blocks = Training.run, []

    def stopped(self: Training, *args: object, **kwargs: object) -> object:
        for metrics in whole(self, *args, **kwargs):  # type: ignore[arg-type]
            blocks.append(metrics.step)
            yield metrics
            if len(blocks) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(Training, "run", stopped)
    status, _, _ = run(
        capsys, "train", "--preset", "tiny", *SETTINGS, "--out", "runs/a", "--watch", "5", "--checkpoint-every", "0"
    )
    assert status == 130
    (left,) = here.glob("runs/.a.unfinished-*")
    assert list(read_segments(left / "watch")["steps"]["step"]) == [1, 5, 10, 15]
    train(capsys, "runs/a", "--watch", "5")
    assert blocks == [8, 16, 24, 30]
    tables = read_segments(here / "runs" / "a" / "watch")
    assert list(tables["steps"]["step"]) == [1, 5, 10, 15, 20, 25, 30]
    assert not left.exists()


def test_a_training_that_diverges_leaves_its_probes_and_an_alarm(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(capsys, "runs/a", "--watch", "1", "--set", "rate=1e12", "--set", "clip=0") == 1
    tables = read_segments(here / "runs" / "a" / "watch")
    assert "non-finite values" in set(tables["alarms"]["rule"])


def test_of_an_encoder_decoder_the_decoder_is_watched(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out, more in (("runs/plain", ()), ("runs/a", ("--watch", "10"))):
        assert train(capsys, out, "--set", "encoder_layers=1", *more) == 0
    plain, watched = (open_run(f"runs/{name}") for name in ("plain", "a"))
    assert plain.table("metrics")["loss"].equals(watched.table("metrics")["loss"])
    tables = read_segments(watched.path / "watch")
    assert list(tables["steps"]["step"]) == [1, 10, 20, 30]
    assert set(tables["sublayers"]["sublayer"]) == {"attention", "cross", "feedforward"}
    assert tables["layers"]["layer"].max() == SMALL["layers"]
    assert bool((tables["layers"]["norm"] > 0).all())
