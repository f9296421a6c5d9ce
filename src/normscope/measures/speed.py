"""Speed: by how much a token resists what attention computes, measured in the forward pass beside theory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import length, root_mean_square, tangent, unit, visible_part
from normscope.measures.base import LAYER, Measure, PassObserver, Quantity, Subject, Tables
from normscope.measures.curves import late, late_layers
from normscope.measures.rotation import replayed_lines
from normscope.measures.states import MIXING, norm_kind
from normscope.models import Model, SublayerStep
from normscope.models.model import BlockNorm
from normscope.results.figures import Chart, Line
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import by_layer, floats, plain_rows, spans_decades, table_of
from normscope.schemes.law import MEASURED

_FACTORS = ("radial_factor", "gain_factor")
_EXPLAINED = 0.05  # difference between measurement and theory from which its reason is given


def effective_speed(
    before: Float[Tensor, "*batch dim"],
    after: Float[Tensor, "*batch dim"],
    A: Float[Tensor, "*batch dim"],
    stride: float = 1.0,
    quick: bool = False,
) -> Float[Tensor, " *batch"]:
    """The speed factor s in θ̇ = (1/s) P_θ A, measured: stride·|P_θ A| / tan of the angle between before and after.

    Args:
        before: a token before a sublayer.
        after: the token after it.
        A: what the sublayer computed, before any norm or factor on it.
        stride: the time that the step took.
        quick: as that of ``unit``.
    """
    theta = unit(before, quick=quick)
    moved = length(tangent(theta, after), quick=quick) / (after * theta).sum(-1, keepdim=True)
    return (stride * length(tangent(theta, A), quick=quick) / moved).squeeze(-1)


def theory_factors(
    before: Float[Tensor, "tokens dim"], A: Float[Tensor, "tokens dim"], update: Float[Tensor, "tokens dim"]
) -> tuple[float, float]:
    """What takes the measured s away from r|A|/|u|, that of theory, where x becomes x + u: medians of two factors.

    With θ = x/|x|, tan of the angle is |P_θ u| / (r + θ·u), and so s = |P_θ A|(r + θ·u)/|P_θ u| is theory times
    1 + θ·u/r, since theory takes updates to be small, times (|P_θ A|/|A|) / (|P_θ u|/|u|), which is 1 unless the gains of
    an output norm give the update another direction than A.
    """
    theta = unit(before)
    radial = 1 + (theta * update).sum(-1) / length(before).squeeze(-1)
    across = [(length(tangent(theta, y)) / length(y)).squeeze(-1) for y in (A, update)]
    return float(radial.median()), float((across[0] / across[1]).median())


def theory_of(
    model: Model,
    layer: int,
    step: Float[Tensor, " *step"],
    carry: Float[Tensor, " *carry"],
    r: Float[Tensor, " tokens"],
    a: Float[Tensor, " tokens"],
    written: Float[Tensor, " tokens"],
) -> Float[Tensor, ""] | None:
    """The median of s by the slots of the layer's scheme, with the step and carry of now where they are learned.

    A learned step of every channel counts with its root mean square, since it may have both signs.
    Norms in theory have radius 1. An output norm of a model has that of its output, which multiplies the update (``written``);
    tokens of a normalised stream have the norm with which they enter. Theory takes A before a factor on the input, a sink and
    an inner norm, models after them.
    """
    scheme = model.schemes[layer]
    if scheme is None:
        return None
    stage = scheme.at(layer, model.layers)
    slots, values = stage.attention, stage.place(layer, model.layers).values
    if slots.learns_alpha or model.learned_scales[layer]:
        slots = replace(slots, step=float(root_mean_square(step)), carry=float(carry.mean()))
    law = stage.law_of(slots)
    if not law.known:
        return None
    theory = law.speed({**values, **MEASURED, "r": r, "A": a}) * (r if law.radius_fixed else 1.0)
    if slots.output == "norm":
        theory = theory / written
    elif "v" not in slots.heads and slots.inner == "none":
        theory = theory * slots.input_factor(values)
    return torch.as_tensor(theory, dtype=r.dtype, device=r.device).expand_as(r).median()


@dataclass(frozen=True)
class Motion:
    """The tokens of a sublayer that mixes them, as its speed is read off them.

    Attributes:
        unmoved: what the tokens would be without the update.
        radius: the tokens whose norm theory takes for r.
        A: what the sublayer computed.
        written: the same after an output norm, if there is one.
        update: what was added.
        after: the tokens after the sublayer.
    """

    unmoved: Float[Tensor, "tokens dim"]
    radius: Float[Tensor, "tokens dim"]
    A: Float[Tensor, "tokens dim"]
    written: Float[Tensor, "tokens dim"]
    update: Float[Tensor, "tokens dim"]
    after: Float[Tensor, "tokens dim"]

    @classmethod
    def of(
        cls, step: SublayerStep, chosen: Callable[[Tensor], Tensor], stream: BlockNorm | None, output: BlockNorm | None
    ) -> "Motion":
        """Of the tokens that ``chosen`` takes out of (rows, tokens, dim), with the norms of stream and output."""
        x, A, update = (chosen(y) for y in (step.before, step.output, step.update))
        kept = step.carry * x
        after = kept + update if step.after is None else chosen(step.after)
        unmoved = kept if stream is None else stream(kept)  # the gain of the norm rotates a token by itself
        radius = kept if stream is None else x  # a norm of the sum forgets the carry
        return cls(unmoved, radius, A, A if output is None else output(A), update, after)


class _Observer(PassObserver):
    def __init__(self, subject: Subject) -> None:
        self.model, self.counted_in = subject.model, subject.counted_in
        self.kind = norm_kind(subject.model)
        self.rows: list[dict[str, Any]] = []

    def sublayer(self, step: SublayerStep) -> None:
        """The speed factor of attention, from the states before and after it, and what the slots give for it."""
        if step.sublayer not in MIXING:
            return
        counted = self.counted_in(step.before)
        stream, output = (self.model.norm_at(step.layer, step.sublayer, slot) for slot in ("stream", "output"))
        motion = Motion.of(step, lambda y: y[counted], stream, output)
        before, radius, A, written, update, after = (
            visible_part(getattr(motion, field.name), self.kind).double() for field in fields(motion)
        )
        speed = float(effective_speed(before, after, A).median())
        theory = theory_of(
            self.model, step.layer, step.step, step.carry, *(length(y).squeeze(-1) for y in (radius, A, written))
        )
        row: dict[str, Any] = {
            "layer": step.layer,
            "sublayer": step.sublayer,
            "speed": speed if speed > 0 else None,
            # an update of 0 has no direction that a norm could keep
            "theory": None if theory is None or not bool(theory.isfinite()) else float(theory),
        }
        if stream is None:
            row |= dict(zip(_FACTORS, theory_factors(before, A, update), strict=True))
        self.rows.append(row)

    def tables(self) -> Tables:
        columns = ["speed", "theory", *_FACTORS]
        rows = pd.DataFrame(self.rows, columns=["layer", "sublayer", *columns])
        return {"writes": rows.astype({"layer": int, **dict.fromkeys(columns, float)})}


def _reason(rows: list[dict[str, Any]], ratio: float) -> str:
    """Why measurement and theory differ, where they do and it is known."""
    known = [[row[name] for row in rows if row.get(name) is not None] for name in _FACTORS]
    if abs(ratio - 1) < _EXPLAINED or not all(known):
        return ""
    radial, gain = (median(values) for values in known)
    reasons = {
        "because updates also change the token's norm (theory takes them to be small)": radial,
        "because the gains of the output norm give the update another direction": gain,
    }
    named = [f"{factor:.3g} {reason}" for reason, factor in reasons.items() if abs(factor - 1) >= _EXPLAINED]
    return f": a factor of {' and one of '.join(named)}" if named else ""


def _mixing(rows: list[dict[str, Any]]) -> str:
    """What mixes tokens in these layers."""
    return " and ".join(dict.fromkeys(str(row.get("sublayer") or "attention").replace("mixer", "the mixer") for row in rows))


def _curve(table: pd.DataFrame) -> pd.DataFrame:
    """Gaps where attention rotates tokens too far to have a speed; nothing where no layer has one."""
    rows = table.reindex(columns=["layer", "speed"]).set_axis(["x", "y"], axis=1)
    return rows if rows["y"].notna().any() else rows.dropna()


@dataclass(frozen=True)
class Speed(Measure):
    """The speed factor s of attention: an update A perpendicular to a token rotates it by |A|/s."""

    name: ClassVar[str] = "speed"
    title: ClassVar[str] = "Damping of attention"
    needs: ClassVar[frozenset[str]] = frozenset({"stream", "sublayers"})
    order: ClassVar[int | None] = 30
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "speed", "Damping of attention", LAYER, "s",
            "The larger, the more a token resists a rotation.",
            "writes", _curve, "damping s in the last third", late,
        ),
    )  # fmt: skip

    def observer(self, subject: Subject) -> PassObserver:
        """States before and after every attention sublayer."""
        return _Observer(subject)

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """Measured and by theory."""
        measured, theory = (by_layer(tables, "writes", column, "{:.3g}") for column in ("speed", "theory"))
        layers = sorted({*measured, *theory})
        return {"damping s / theory": {layer: f"{measured.get(layer, '–')} / {theory.get(layer, '–')}" for layer in layers}}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """How much tokens resist in late layers, beside theory."""
        rows = [row for row in plain_rows(tables["writes"]) if row.get("speed") is not None]
        in_late = [row for row in rows if row["layer"] in late_layers(about["layers"])]
        if not in_late:
            return
        number = fmean(row["speed"] for row in in_late)
        known = [row for row in rows if row.get("theory") is not None]
        comparison = ""
        if known and all(row.get("theory") is not None for row in in_late):
            ratio = median(row["speed"] / row["theory"] for row in known)
            comparison = (
                f"Theory, from the slots of {about['scheme'] or 'each layer'}: {fmean(row['theory'] for row in in_late):.3g}; "
                f"in the median layer the measured s is {ratio:.3g} times that of theory{_reason(known, ratio)}."
            )
        yield Finding(
            f"The part of the output of {_mixing(rows)} perpendicular to the residual rotates it by that length divided by the "
            f"damping s: s = {number:.3g} in the last third of layers.",
            "speed", title="Damping of rotation", severity="ok", number=number, comparison=comparison,
        )  # fmt: skip

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Measured, by theory, and by the slots of other schemes."""
        writes = table_of(tables, "writes")
        if writes is None or "speed" not in writes:
            return None
        layers = floats(writes["layer"])
        lines = [
            Line("this model, measured", layers, floats(writes["speed"])),
            Line("theory for its scheme", layers, floats(writes["theory"])),
            *replayed_lines(table_of(tables, "replay"), "speed"),
        ]
        chart = Chart(
            "Damping of attention",
            "layer",
            "s",
            tuple(lines),
            "The larger s, the less an update rotates a token, θ̇ = (1/s) P A; measured, and as theory gives it for a scheme.",
            settings,
            log_y=spans_decades([value for line in lines for value in line.y]),
        )
        text = (
            "The damping s (the speed factor of theory) is the divisor between an update and the rotation that it causes: a "
            "perpendicular update of 5 at s = 500 rotates a token by 0.6°. Measured values come from the hidden states before "
            "and after attention, or what mixes tokens in its place, in the forward pass; theory follows from the norm "
            "placement alone. In Pre-LN theory's s is the residual norm.",
        )
        return self.page(text, {"speed": chart})
