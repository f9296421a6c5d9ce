"""What theory says of constructed worlds and of the induction circuit, beside what is seen when they run."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import unit
from normscope.schemes import Scheme
from normscope.subspaces.circuit import KNOBS, InductionCircuit, breaking_points
from normscope.subspaces.interference import partners
from normscope.subspaces.measure import measure_subspaces
from normscope.subspaces.world_view import WorldView
from normscope.subspaces.worlds import World, update_at

KINDS = {
    "orthogonal spheres": (90.0, 0.0),
    "orthogonal, lengths ±50 %": (90.0, 0.5),
    "spheres at 60°": (60.0, 0.0),
    "at 60°, lengths ±50 %": (60.0, 0.5),
}  # angle in degrees and spread of lengths
SHOWN = {"orthogonal spheres": (90.0, 0.0), "80° between subspaces": (80.0, 0.0), "lengths ±20 %": (90.0, 0.2)}
_CLOSEST = {"angle": 0.5, "spread": 0.005}  # to what Pre-Norm needs, where curves begin
_CURVE = 61
_WIDTHS, _TOKENS, _DIM = (3, 4, 5), 64, 32


def predicted_change(
    world: World, scheme: Scheme, part: int, partner: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, "tokens tokens"], Float[Tensor, "tokens tokens"]]:
    """Scores of the head of a part, and by which factor an exchange of all that it does not see changes them, in closed form.

    The head sees x by D_αᵀ, so the projection on what it sees has |P x|² = aᵀ(D_αᵀD_α)⁻¹a, and D_αᵀD_α is a block of the
    inverse of G = EᵀE. An exchange gives |x'_t|² = |P x_t|² + |x_s|² − |P x_s|², and a norm of what is read, or of the stream,
    turns that into the factor |x_t|/|x'_t| on queries and on keys, unless these are normalised themselves.
    """
    update, heads = update_at(scheme, 0, 1), scheme.at(0, 1).attention.heads
    own, length2 = world.coordinates[part], world.interference_factors.pow(-2)
    start = sum(world.subspaces.widths[:part])
    block = slice(start, start + own.shape[1])
    seen2 = ((own @ torch.linalg.inv(torch.linalg.inv(world.subspaces.products)[block, block])) * own).sum(1)
    if update.stream is not None:
        own, seen2, length2 = own / length2.sqrt()[:, None], seen2 / length2, torch.ones_like(length2)
    exchanged2 = seen2 + (length2 - seen2)[partner]
    normed = update.input is not None or update.stream is not None
    factors = (length2 / exchanged2).sqrt() if normed else torch.ones_like(length2)
    states = own * (update.factor / length2.sqrt())[:, None] if update.input is not None else own
    q, k = (unit(states) if letter in heads else states for letter in "qk")
    factor_q, factor_k = (torch.ones_like(factors) if letter in heads else factors for letter in "qk")
    return q @ k.T, factor_q[:, None] * factor_k


def interference_table(schemes: Sequence[Scheme], seed: int = 0) -> pd.DataFrame:
    """Interference in worlds of every kind, a row for each world, scheme and head: measured, and by theory."""
    return pd.DataFrame([row for name in KINDS for scheme in schemes for row in _world_rows(name, scheme, seed)])


def _world_rows(name: str, scheme: Scheme, seed: int) -> Iterator[dict[str, Any]]:
    angle, spread = KINDS[name]
    world = World.make(_TOKENS, _WIDTHS, angle=angle, spread=spread, dim=_DIM, seed=seed)
    view = WorldView(world, scheme)
    sample = view.sample()
    found = measure_subspaces(view, sample, ["interference"], seed)["interference"]
    found = found[found["exchanged"] == "both"]
    observed = dict(zip(zip(found["place"], found["head"], strict=True), found["change"], strict=True))
    counted = sample.attention_mask.clone()
    counted[:, 0] = False
    partner = partners(counted, seed)
    pairs = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()
    pairs[:, 0] = pairs[0] = False
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
    schemes: Sequence[Scheme], types: int = 12, seed: int = 0, progress: Callable[[int], None] = lambda done: None
) -> dict[str, pd.DataFrame]:
    """The induction circuit under every scheme: ``points``, ``curves`` and ``selections``.

    ``points``: where each head and the circuit break as a knob is turned, predicted by Theorem 7 and seen; NaN for never.
    ``curves``: the share of tokens that predict right, by how far the knob is from what Pre-Norm needs.
    ``selections``: the token that each receiver of the prefix-matching head selects, in three worlds.

    Args:
        schemes: any, by their slots.
        types: how many types are repeated.
        seed: of the circuit.
        progress: told the number of schemes that are done.
    """
    circuit = InductionCircuit(types, seed=seed)
    tables: dict[str, list[dict[str, Any]]] = {"points": [], "curves": [], "selections": []}
    for done, scheme in enumerate(schemes, 1):
        for knob in KNOBS:
            for part, (predicted, observed) in breaking_points(circuit, scheme, knob).items():
                row = {"knob": knob, "scheme": scheme.name, "part": part}
                tables["points"].append(row | {"predicted": predicted, "observed": observed})
            tables["curves"] += _curve(circuit, scheme, knob)
        tables["selections"] += _selections(circuit, scheme)
        progress(done)
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def _curve(circuit: InductionCircuit, scheme: Scheme, knob: str) -> Iterator[dict[str, Any]]:
    """The share that is solved at places evenly spaced by the logarithm of how far the knob is turned."""
    first, last = KNOBS[knob]
    low, high = _CLOSEST[knob], abs(last - first)
    for i in range(_CURVE):
        turned = low * (high / low) ** (i / (_CURVE - 1))
        value = first + math.copysign(turned, last - first)
        solved = circuit.with_knob(knob, value).solved(scheme)
        yield {"knob": knob, "scheme": scheme.name, "value": value, "turned": turned, "solved": solved}


def _selections(circuit: InductionCircuit, scheme: Scheme) -> Iterator[dict[str, Any]]:
    for name, (angle, spread) in SHOWN.items():
        turned = circuit.with_knob("angle", angle).with_knob("spread", spread)
        selected, wanted = turned.run(scheme).selected[1].tolist(), turned.wanted[1].tolist()
        for receiver, (chosen, right) in enumerate(zip(selected, wanted, strict=True)):
            if right >= 0:
                row = {"world": name, "scheme": scheme.name, "receiver": receiver}
                yield row | {"selected": chosen, "wanted": right}
