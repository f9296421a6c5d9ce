"""The tidy tables of a sweep, from its run folders alone: they are the same wherever and however often the runs were made."""

from typing import Any

import pandas as pd

from normscope.sweeps.plan import Point, Sweep
from normscope.sweeps.state import SweepFolder


def sweep_tables(folder: SweepFolder, sweep: Sweep) -> dict[str, pd.DataFrame]:
    """``runs``: name, state, error, the varied fields and what each run came to; ``curves``: those of all runs.

    A state is ``finished``, ``diverged``, ``failed``, or ``waiting`` for a run that is not there yet; ``error`` says why.
    """
    rows, curves = [], []
    for point in sweep.points:
        row, curve = _read(folder, sweep, point)
        rows.append(row)
        curves.append(curve)
    first = ["name", "state", "error", *sweep.varied]
    runs = pd.DataFrame(rows)
    drawn = [curve for curve in curves if len(curve)]
    return {
        "runs": runs[[*first, *(column for column in runs.columns if column not in first)]],
        "curves": pd.concat(drawn, ignore_index=True) if drawn else pd.DataFrame({"name": pd.Series(dtype=str)}),
    }


def _read(folder: SweepFolder, sweep: Sweep, point: Point) -> tuple[dict[str, Any], pd.DataFrame]:
    """A point's row and its curves; a number of the run's goes before a field of the same name."""
    fields = {name: point.shown(name) for name in sweep.varied}
    run = folder.complete(point.name)
    if run is None:
        error = folder.error(point.name)
        return {"name": point.name, "state": "waiting" if error is None else "failed", "error": error, **fields}, pd.DataFrame()
    outcome = point.job.outcome(run)
    state = "finished" if outcome.note is None else "diverged"
    row = {"name": point.name, "state": state, "error": outcome.note, **fields, **outcome.numbers}
    shown = {"name": point.name, **{name: value for name, value in fields.items() if name not in outcome.curves.columns}}
    curves = outcome.curves.copy()
    for place, (name, value) in enumerate(shown.items()):
        curves.insert(place, name, [value] * len(curves))
    return row, curves
