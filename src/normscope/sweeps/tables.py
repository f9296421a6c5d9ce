"""The tables of a sweep, from its run folders alone: they are the same wherever and however often the runs were executed."""

from typing import Any

import pandas as pd

from normscope.experiments.result import load
from normscope.sweeps.folder import SweepFolder
from normscope.sweeps.plan import Plan, Point


def sweep_tables(folder: SweepFolder, plan: Plan) -> dict[str, pd.DataFrame]:
    """``runs``: name, state, error, the varied fields and the outcome of each run; ``curves``: those of all runs.

    A state is ``finished``, ``diverged``, ``failed``, or ``waiting`` for a run that is not complete; ``error`` is the reason.
    """
    rows, curves = zip(*(_read(folder, plan, point) for point in plan.points), strict=True)
    first = ["name", "state", "error", *plan.varied]
    runs = pd.DataFrame(list(rows))
    drawn = [curve for curve in curves if len(curve)]
    return {
        "runs": runs[[*first, *(column for column in runs.columns if column not in first)]],
        "curves": pd.concat(drawn, ignore_index=True) if drawn else pd.DataFrame({"name": pd.Series(dtype=str)}),
    }


def _read(folder: SweepFolder, plan: Plan, point: Point) -> tuple[dict[str, Any], pd.DataFrame]:
    """A point's row and its curves; a number of the run replaces a field of the same name."""
    fields = {name: point.value(name) for name in plan.varied}
    if folder.complete(point.name) is None:
        error = folder.error(point.name)
        return {"name": point.name, "state": "waiting" if error is None else "failed", "error": error, **fields}, pd.DataFrame()
    result = load(folder.run(point.name))
    outcome = result.kind.outcome(result)
    state = "finished" if outcome.note is None else "diverged"
    row = {"name": point.name, "state": state, "error": outcome.note, **fields, **outcome.numbers}
    shown = {"name": point.name, **{name: value for name, value in fields.items() if name not in outcome.curves.columns}}
    curves = outcome.curves.copy()
    for place, (name, value) in enumerate(shown.items()):
        curves.insert(place, name, [value] * len(curves))
    return row, curves
