"""subspaces: What each head reads, and how the rest changes its attention.

Look into a model: normscope subspaces builtin:addition-small-pre
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import AfterValidator, model_validator

from normscope.errors import InputError
from normscope.experiments.experiment import Shown
from normscope.experiments.on_model import (
    ALWAYS,
    MODEL,
    MODEL_HELP,
    OnModel,
    as_model,
    description,
    layer_table,
    measure_records,
    measure_sections,
    named_measures,
)
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Names, Schemes, as_schemes, one_of, setting
from normscope.results.figures import Chart, Figure, Line, Panels
from normscope.results.findings import Finding, card_text
from normscope.results.sections import PageTable, Section
from normscope.results.tables import floats, plain_rows
from normscope.schemes import Scheme

if TYPE_CHECKING:
    from normscope.models.worlds import InductionCircuit

WORLD = "world"
MEASURES = ("rank", "spheres", "angles", "interference")
KINDS = {
    "orthogonal spheres": (90.0, 0.0),
    "orthogonal, norms ±50 %": (90.0, 0.5),
    "spheres at 60°": (60.0, 0.0),
    "at 60°, norms ±50 %": (60.0, 0.5),
}  # angle between subspaces in degrees, and spread of norms
SHOWN = {"orthogonal spheres": (90.0, 0.0), "80° between subspaces": (80.0, 0.0), "norms ±20 %": (90.0, 0.2)}
_RECORDS = {
    **{name: name for name in ALWAYS},
    "rank": "rank",
    "spheres": "sphere",
    "angles": "angle",
    "interference": "interference",
}
_WORLD_RECORDS = {"worlds": "interference", "points": "breaking point", "curves": "solved"}
_SCHEMES, _TYPES = "none,pre,qkv", 12
_WIDTHS, _TOKENS, _DIM = (3, 4, 5), 64, 32  # of the constructed worlds
_CLOSEST = {"angle": 0.5, "spread": 0.005}  # to what Pre-LN needs, where curves begin
_CURVE = 61  # points of a curve
_KNOBS = {
    "angle": ("Without orthogonality", "degrees away from orthogonal", 90.0, -1.0),
    "spread": ("Without constant norm", "spread of norms", 0.0, 1.0),
}  # title, label, the value that Pre-LN needs, and the direction in which it changes
_AGREES = 1e-9  # measured and computed values differ by rounding


def _source(value: Any) -> Any:
    return value if isinstance(value, str) and value == WORLD else as_model(value)


class Subspaces(OnModel):
    """What each head reads, and how the rest changes its attention.

    Also whether heads are independent: whether they read orthogonal parts of a token, and parts of constant norm.
    The model ``world`` stands for constructed worlds and a hand-built induction circuit, where theory gives the numbers.

    Example:
        >>> import normscope as ns
        >>> found = ns.subspaces("builtin:addition-small-pre", examples=4, measures="interference", progress=False)
        >>> found.tables["interference"].columns.tolist()[:5]
        ['layer', 'head', 'place', 'resampled', 'change']
    """

    command: ClassVar[str] = "subspaces"
    title: ClassVar[str] = "Input subspaces of heads"
    copies: ClassVar[tuple[float, float]] = (110, 0)
    bundled_tokens: ClassVar[int | None] = 128
    usage: ClassVar[tuple[str, ...]] = (
        "normscope subspaces builtin:addition-small-pre",
        "normscope subspaces package:smollm2 --tokens 128 --measure interference",
        "normscope subspaces world",
        "normscope subspaces world --schemes none,pre,peri,qkv --types 20 --json",
    )

    model: Annotated[Any, AfterValidator(_source), MODEL] = setting(
        ..., f"{MODEL_HELP[:-1]}; or 'world' for constructed worlds and the induction circuit, where theory gives the numbers.",
        argument=True,
    )  # fmt: skip
    tokens: int | None = setting(None, "Number of tokens to read.", shown="all of text=; 128 of the bundled text", ge=3)
    measures: Annotated[Names | None, one_of(*MEASURES)] = setting(
        None, f"Comma-separated measures: {', '.join(MEASURES)}.", shown="all", option="--measure"
    )
    schemes: Schemes | None = setting(
        None, "For a world: comma-separated schemes, names or paths of TOML files.", shown=_SCHEMES
    )
    types: int | None = setting(
        None, "For a world: number of token types that the circuit repeats.", shown=str(_TYPES), ge=3, le=200
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Subspaces":
        refused = (
            ("text", "token_ids", "images", "tokens", "examples", "bos", "measures")
            if self.constructed
            else ("schemes", "types")
        )
        why = "a constructed world has its own tokens" if self.constructed else "it is for a world; a model has its own scheme"
        for name in refused:
            if getattr(self, name) is not None:
                raise InputError(f"{name}= does not apply here: {why}")
        for scheme in self.schemes or ():
            for depth in (1, 2):  # worlds have one layer, the circuit two
                scheme.check(depth)
        return self

    @property
    def constructed(self) -> bool:
        """Whether the model is ``world``."""
        return isinstance(self.model, str) and self.model == WORLD

    @property
    def summary(self) -> str:
        """One line for people."""
        about = f"constructed worlds; {self.types or _TYPES} types" if self.constructed else self.model_name
        return f"{about}; seed {self.seed}"

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """The measures of a model from one forward pass, or theory beside measurement in constructed worlds."""
        from normscope.measures.base import joined, measure_all

        if self.constructed:
            return self._of_world(progress)
        subject = self.subject(progress)
        measures = [measure for measure in named_measures(MEASURES) if measure.name in (self.measures or MEASURES)]
        measures = self.offered(subject, measures, self.measures is not None, progress)
        names = [measure.name for measure in measures]
        measures = [*named_measures(ALWAYS), *measures]
        tables = joined(measure_all(subject, measures, progress).values())
        return self.measured_result(subject, measures, tables, {"measures": names})

    def _of_world(self, progress: Progress) -> Result:
        schemes, types = self.schemes or as_schemes(_SCHEMES), self.types or _TYPES
        tables = {"worlds": interference_table(schemes, self.seed)}
        tables |= circuit_tables(schemes, types, self.seed, progress.stage("circuit", len(schemes)))
        findings = pd.DataFrame([finding.record for finding in _world_findings(tables)])
        configuration = {"model": WORLD, "schemes": [scheme.name for scheme in schemes], "types": types}
        return Result(type(self), configuration, {"findings": findings, **tables}, self.summary, self.seed, "cpu")

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """A record for every row: its measure, layer and head where it has them, and its other fields."""
        return measure_records(result, _WORLD_RECORDS if "worlds" in result.tables else _RECORDS)

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """A line for each layer, or theory beside measurement; then the findings."""
        if "worlds" in result.tables:
            means = result.tables["worlds"].groupby(["world", "scheme"], as_index=False, sort=False)
            yield _worlds_table(means[["before", "predicted", "after"]].mean(), ())
            yield _points_table(result.tables["points"])
        else:
            yield description(result)
            yield layer_table(named_measures(MEASURES), result)
        yield from map(card_text, result.findings)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The circuit and constructed worlds, or interference, spheres, angles and ranks, as far as they were measured."""
        if "worlds" in result.tables:
            yield _circuit_section(result)
            yield _worlds_section(result)
        else:
            measures = named_measures([*ALWAYS, *MEASURES])
            yield from measure_sections(sorted(measures, key=lambda measure: measure.order or 0), result)


def interference_table(schemes: Sequence[Scheme], seed: int = 0) -> pd.DataFrame:
    """Interference in worlds of every kind, a row for each world, scheme and head: measured, and by theory."""
    return pd.DataFrame([row for name in KINDS for scheme in schemes for row in _world_rows(name, scheme, seed)])


def _world_rows(name: str, scheme: Scheme, seed: int) -> Iterator[dict[str, Any]]:
    from normscope.measures.base import Subject
    from normscope.measures.interference import Interference, partners
    from normscope.models.worlds import World, WorldModel, predicted_change

    angle, spread = KINDS[name]
    world = World.make(_TOKENS, _WIDTHS, angle=angle, spread=spread, dim=_DIM, seed=seed)
    model = WorldModel(world, scheme)
    subject = Subject(model, model.sample(), seed)
    table = Interference().measure(subject)["interference"].query("resampled == 'both'")
    observed = table.set_index(["place", "head"])["change"]
    partner = partners(subject.counted, seed)
    counted = subject.counted[0]
    pairs = (counted[:, None] & counted).tril()
    for part in range(len(_WIDTHS)):
        scores, factors = predicted_change(world, scheme, part, partner)
        change = ((factors - 1) * scores)[pairs].norm() / scores[pairs].norm()
        row = {"world": name, "angle": angle, "spread": spread, "scheme": scheme.name, "head": part}
        yield row | {
            "before": observed["before", part],
            "after": observed["after", part],
            "predicted": float(change),
        }


def circuit_tables(
    schemes: Sequence[Scheme], types: int = _TYPES, seed: int = 0, advance: Callable[[float], None] = lambda done: None
) -> dict[str, pd.DataFrame]:
    """The induction circuit under every scheme: ``points``, ``curves`` and ``selections``.

    ``points``: where each head and the circuit break as a knob is turned, predicted by Theorem 7 and observed; NaN for never.
    ``curves``: the share of correct predictions, by how far the knob is from what Pre-LN needs.
    ``selections``: the key that each query of the prefix-matching head selects, in three worlds.

    Args:
        schemes: any, by their slots.
        types: how many token types are repeated.
        seed: of the circuit.
        advance: takes how many schemes are done.
    """
    from normscope.models.worlds import KNOBS, InductionCircuit, breaking_points

    circuit = InductionCircuit(types, seed=seed)
    tables: dict[str, list[dict[str, Any]]] = {"points": [], "curves": [], "selections": []}
    for done, scheme in enumerate(schemes, 1):
        for knob, ends in KNOBS.items():
            for part, (predicted, observed) in breaking_points(circuit, scheme, knob).items():
                row = {"knob": knob, "scheme": scheme.name, "part": part}
                tables["points"].append(row | {"predicted": predicted, "observed": observed})
            tables["curves"] += _curve(circuit, scheme, knob, *ends)
        tables["selections"] += _selections(circuit, scheme)
        advance(done)
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def _curve(circuit: "InductionCircuit", scheme: Scheme, knob: str, first: float, last: float) -> Iterator[dict[str, Any]]:
    """The share that is solved at places evenly spaced by the logarithm of how far the knob is turned."""
    low, high = _CLOSEST[knob], abs(last - first)
    for i in range(_CURVE):
        turned = low * (high / low) ** (i / (_CURVE - 1))
        value = first + math.copysign(turned, last - first)
        solved = circuit.with_knob(knob, value).solved(scheme)
        yield {"knob": knob, "scheme": scheme.name, "value": value, "turned": turned, "solved": solved}


def _selections(circuit: "InductionCircuit", scheme: Scheme) -> Iterator[dict[str, Any]]:
    for name, (angle, spread) in SHOWN.items():
        turned = circuit.with_knob("angle", angle).with_knob("spread", spread)
        selected, wanted = turned.run(scheme).selected[1].tolist(), turned.wanted[1].tolist()
        for query, (chosen, right) in enumerate(zip(selected, wanted, strict=True)):
            if right >= 0:
                row = {"world": name, "scheme": scheme.name, "receiver": query}
                yield row | {"selected": chosen, "wanted": right}


def _world_findings(tables: Mapping[str, pd.DataFrame]) -> Iterator[Finding]:
    """For each scheme where its circuit breaks, and how much heads interfere in constructed worlds."""
    points = tables["points"]
    for scheme, rows in points[points["part"] == "circuit"].groupby("scheme", sort=False):
        broken = "; it ".join(_broken(row) for row in plain_rows(rows))
        breaks = bool(rows["observed"].notna().any())
        yield Finding(
            f"It {broken}.",
            "circuit",
            title=f"{scheme}: the induction circuit {'breaks' if breaks else 'holds'}",
            severity="notice" if breaks else "ok",
            weight=2.0,
        )
    for scheme, rows in tables["worlds"].groupby("scheme", sort=False):
        yield _world_finding(str(scheme), rows)


def _world_finding(scheme: str, rows: pd.DataFrame) -> Finding:
    from normscope.measures.interference import ROUNDING

    largest, error = rows.groupby("world", sort=False)["before"].max(), float((rows["before"] - rows["predicted"]).abs().max())
    free = list(largest[largest < ROUNDING].index)
    agrees = f"The closed form {'agrees to within' if error < _AGREES else 'differs by'} {error:.1g}."
    free_everywhere = len(free) == len(largest)
    text = (
        f"Attention logits change by {largest.max():.1g} at most."
        if free_everywhere
        else f"No interference in {', '.join(free) or 'no world'}; elsewhere attention logits change by up to "
        f"{100 * largest.max():.3g} %."
    )
    return Finding(
        text,
        title=f"{scheme}: {'no interference in any world' if free_everywhere else 'heads interfere'}",
        severity="warning" if error >= _AGREES else "ok" if free_everywhere else "notice",
        number=float(largest.max()),
        comparison=agrees,
        weight=1.0,
    )


def _broken(row: Mapping[str, Any]) -> str:
    """Where a knob breaks the circuit, and where Theorem 7 predicts it."""
    from normscope.models.worlds import KNOBS

    knob = row["knob"]
    place = "{} between subspaces" if knob == "angle" else "norms of {}"
    if row["observed"] is None and row["predicted"] is None:
        return f"holds {'down' if knob == 'angle' else 'up'} to {place.format(_point(knob, KNOBS[knob][1], 5))}"
    return f"breaks at {place.format(_point(knob, row['observed'], 5))} (Theorem 7: {_point(knob, row['predicted'], 5)})"


def _point(knob: str, value: float | None, digits: int = 6) -> str:
    """A knob's value as people write it; a circuit without one never breaks."""
    if value is None or math.isnan(value):
        return "never"
    return f"{value:.{digits}g}°" if knob == "angle" else f"±{100 * value:.{digits}g} %"


def _points_table(points: pd.DataFrame) -> PageTable:
    rows = tuple(
        (row["knob"], row["scheme"], row["part"], *(_point(row["knob"], row[name]) for name in ("predicted", "observed")))
        for row in plain_rows(points)
    )
    return PageTable("Where it breaks", ("knob", "scheme", "part", "by Theorem 7", "observed"), rows)


def _worlds_table(table: pd.DataFrame, more: tuple[str, ...] = ("head",)) -> PageTable:
    names = ("world", "scheme", *more)
    rows = tuple(
        (*(str(row[name]) for name in names), f"{row['before']:.6g}", f"{row['predicted']:.6g}", f"{row['after']:.2g}")
        for row in plain_rows(table)
    )
    return PageTable("Change of attention logits", (*names, "before the norm", "by theory", "after the norm"), rows)


def _worlds_section(result: Result) -> Section:
    text = (
        "Embeddings are sums of parts in three subspaces, and each part is read by one head. The parts that a head cannot "
        "read are replaced by another token's; the change of its attention logits is measured as in any model and computed in "
        "closed form.",
    )
    findings = tuple(finding for finding in result.findings if not finding.figure)
    return Section("Constructed worlds", text, (_worlds_table(result.tables["worlds"]),), findings=findings, name="worlds")


def _circuit_section(result: Result) -> Section:
    tables, settings = result.tables, result.summary
    text = (
        "A previous-token head writes each token's previous type, and a prefix-matching head looks up where a type occurred "
        "before. Each head reads one of four subspaces: position, type, previous type, prediction. While these are orthogonal "
        "and token norms in them are constant, every scheme solves the task. Without orthogonality or constant norms the "
        "circuit breaks only where a norm is applied between residual stream and heads, since it divides every part by the "
        "norm of the whole.",
    )
    knobs = {f"circuit-{knob}": _knob_chart(knob, tables["points"], tables["curves"], settings) for knob in _KNOBS}
    caption = (
        "Each dot is the key that a query of the prefix-matching head selects; missed is the correct key where it selects a "
        "wrong one. With orthogonal subspaces and constant norms every scheme is correct. Otherwise a norm at the input "
        "changes the selection although nothing that the head reads has changed, from where Theorem 7 predicts it (vertical "
        "lines)."
    )
    title = "Normalization and the independence of subspaces at a glance"
    panels = [*_selection_charts(tables["selections"]), *knobs.values()]
    figures: dict[str, Figure] = {"circuit": Panels(title, panels, caption, settings, columns=len(SHOWN)), **knobs}
    findings = tuple(finding for finding in result.findings if finding.figure)
    return Section("The induction circuit", text, (_points_table(tables["points"]),), figures, findings, name="circuit")


def _selection_charts(selections: pd.DataFrame) -> Iterator[Chart]:
    """For each scheme and world the selected keys beside the correct ones."""
    for (scheme, world), rows in selections.groupby(["scheme", "world"], sort=False):
        right = rows["selected"] == rows["wanted"]
        groups = {
            "correct": (rows[right], "selected"),
            "wrong": (rows[~right], "selected"),
            "missed": (rows[~right], "wanted"),
        }
        lines = tuple(
            Line(name, floats(own[column]), floats(own["receiver"]), dots=True) for name, (own, column) in groups.items()
        )
        title = f"{scheme}, {world}: {int(right.sum())} of {len(rows)} correct"
        yield Chart(title, "key position", "query position", lines, "")


def _knob_chart(knob: str, points: pd.DataFrame, curves: pd.DataFrame, settings: str) -> Chart:
    """The share that is solved against how far the knob is turned, with a vertical line at the prediction of Theorem 7."""
    title, label, needed, direction = _KNOBS[knob]
    lines = [
        Line(str(scheme), floats(rows["turned"]), floats(100 * rows["solved"]))
        for scheme, rows in curves[curves["knob"] == knob].groupby("scheme", sort=False)
    ]
    for row in plain_rows(points[(points["knob"] == knob) & (points["part"] == "circuit") & points["predicted"].notna()]):
        place = direction * (row["predicted"] - needed)
        lines.append(Line(f"{row['scheme']}: Theorem 7", [place, place], [0.0, 100.0]))
    caption = "A vertical line is where Theorem 7 predicts that the first head collapses; lines that stay at 100 % overlap."
    return Chart(title, label, "correct predictions, in %", tuple(lines), caption, settings, log_x=True)
