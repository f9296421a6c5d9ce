"""Snapshots of a training that never happened, and run folders of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from normscope.watch.destinations import destination_of
from normscope.watch.snapshot import Snapshot

ABOUT = {
    "model": "tiny", "layers": 3, "heads": 2, "dim": 8, "parameters": 1234, "scheme": "pre", "every": 10, "noise": 0.1,
    "rows": 2, "tokens": 16, "device": "cpu",
}  # fmt: skip


def snapshot(step: int, layers: int = 3, heads: int = 2, seed: int = 0, alarm: str = "") -> Snapshot:
    """Numbers that follow from the step and the seed."""
    draw = np.random.default_rng((seed, step))

    def numbers(rows: int, *names: str) -> dict[str, Any]:
        return {name: draw.uniform(0.1, 1.0, rows) for name in names}

    of_states = numbers(layers + 1, "norm", "cosine", "rank", "massive")
    of_layers = {
        name: [*values, np.nan] for name, values in numbers(layers, "update", "rotation", "speed", "theory", "gradient").items()
    }
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    tables = {
        "steps": pd.DataFrame({"step": [step], "seconds": [step / 10], "loss": [1 + 10 / (step + 1)], "gradient": [0.5]}),
        "layers": pd.DataFrame({"step": step, "layer": range(layers + 1), **of_states, **of_layers}),
        "sublayers": pd.DataFrame({
            "step": step, "layer": [layer for layer in range(layers) for _ in range(2)],
            "sublayer": ["attention", "feedforward"] * layers, **numbers(2 * layers, "update", "scale", "carry"),
        }),
        "heads": pd.DataFrame({
            "step": step, "layer": [layer for layer, _ in places], "head": [head for _, head in places],
            **numbers(len(places), "logit", "entropy", "sink", "sparse", "collapse"),
        }),
        "norms": pd.DataFrame({
            "step": step, "norm": [f"layer {layer} attention input" for layer in range(layers)], "layer": range(layers),
            **numbers(layers, "gain", "gain_min", "gain_max"),
        }),
        "scales": pd.DataFrame({"step": [step], "name": ["alpha"], "layer": [0], **numbers(1, "mean", "min", "max")}),
    }  # fmt: skip
    if alarm:
        tables["alarms"] = pd.DataFrame(
            {"step": [step], "rule": [alarm], "layer": [1], "head": [-1], "number": [7.5], "text": [f"{alarm} at layer 1."]}
        )
    return Snapshot(step, tables)


def watched_folder(
    path: Path, steps: Iterable[int], *, layers: int = 3, resume: bool = False, seed: int = 0, alarms: Any = ()
) -> Path:
    """A run folder of a training that has ended."""
    destination = destination_of(path, resume=resume)
    destination.begin(ABOUT)
    for step in steps:
        destination.write(snapshot(step, layers, seed=seed, alarm="logits grow" if step in alarms else ""))
    destination.close()
    return path
