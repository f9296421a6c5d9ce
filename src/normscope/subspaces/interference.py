"""Interference observed: what a head's scores owe to the part of a token that it does not attend to.

The part of a token that a head does not see is exchanged for that of another token s(t): x'_t = P x_t + (1 − P) x_s(t), where P
projects on what the head sees. With w the scores before and w' after, over all pairs (t, u) of which t sees u,

    change² = Σ (w'_tu − w_tu)² / Σ w_tu².

After the norm this is 0, for what is exchanged lies in a null space. Before the norm the exchange leaves P x_t as it is, but
not |x_t|: a norm of the input puts the factor |x_t|/|x'_t| on the head's queries and keys.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.models import AttentionStep, Model
from normscope.subspaces.reading import Reading
from normscope.subspaces.spaces import Visible

PLACES = ("before", "after")
EXCHANGED = ("queries", "keys", "both")
_HELD = 1 << 24  # numbers in the queries or keys of exchanges that are held at once


def partners(counted: Bool[Tensor, "rows tokens"], seed: int) -> Int[Tensor, " tokens_of_all_rows"]:
    """For every token, counted through all rows, another one to exchange with; itself for those that do not count."""
    places = counted.flatten().nonzero().squeeze(1)
    order = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).to(places.device)]
    partner = torch.arange(counted.numel(), device=counted.device)
    partner[order] = order.roll(1)
    return partner


def exchange(
    x: Float[Tensor, "rows tokens dim"], basis: Float[Tensor, "dim width"], partner: Int[Tensor, " tokens_of_all_rows"]
) -> Float[Tensor, "rows tokens dim"]:
    """P x_t + (1 − P) x_s(t), with P the projection on an orthonormal basis; columns of 0 do nothing."""
    other = x.flatten(0, 1)[partner].view_as(x)
    return other + (x - other) @ basis @ basis.T


def interference_rows(
    view: Model,
    step: AttentionStep,
    reading: Reading,
    spaces: dict[str, Visible],
    counted: Bool[Tensor, "rows tokens"],
    partner: Int[Tensor, " tokens_of_all_rows"],
) -> Iterator[dict[str, Any]]:
    """A row for each head, place of the exchange and side that is exchanged: ``change``, ``kappa`` and ``moved``.

    ``kappa`` is the RMS of κ in the factors 1 + κ that the exchange puts on queries or keys; ``moved`` the share of receivers
    whose largest score is another token's afterwards.
    """
    given = {"before": reading.states.double(), "after": step.input.double()}
    made: dict[str, Callable[[Tensor], Tensor]] = {"before": reading, "after": lambda x: x}
    for place in PLACES:
        x, make, seen = given[place], made[place], spaces[place]
        q, k = view.heads_of(step.layer, make(x).to(step.input), step.rotation, "qk")
        turned_q = _turned(view, step, x, make, seen.queries, partner, 0)
        turned_k = _turned(view, step, x, make, seen.keys[:: seen.shared], partner, 1)
        keys: Tensor = torch.empty(0)
        for head, queries in enumerate(turned_q):
            keys = next(turned_k) if head % seen.shared == 0 else keys
            yield from _compared(step, head, place, (q[:, head], k[:, head]), (queries, keys), counted)


def _turned(
    view: Model,
    step: AttentionStep,
    x: Float[Tensor, "rows tokens dim"],
    make: Callable[[Tensor], Tensor],
    bases: Float[Tensor, "groups dim width"],
    partner: Int[Tensor, " tokens_of_all_rows"],
    side: int,
) -> Iterator[Float[Tensor, "rows tokens head"]]:
    """Queries (side 0) or keys (side 1) after the exchange, for each group of heads that share them those of the first.

    A model gives those of all heads at once, so several exchanges are put into one call as rows, as memory allows.
    """
    rows, group = len(x), view.heads // len(bases)
    chunk = max(1, _HELD // (x.shape[0] * x.shape[1] * view.heads * view.head_dim))
    for first in range(0, len(bases), chunk):
        some = bases[first : first + chunk]
        read = torch.cat([make(exchange(x, basis, partner)).to(step.input) for basis in some])
        rotation = step.rotation
        if rotation is not None and len(rotation[0]) > 1:
            rotation = rotation[0].repeat(len(some), 1, 1), rotation[1].repeat(len(some), 1, 1)
        (made,) = view.heads_of(step.layer, read, rotation, "qk"[side])
        for i in range(len(some)):
            yield made[i * rows : (i + 1) * rows, (first + i) * group]


def _compared(
    step: AttentionStep,
    head: int,
    place: str,
    clean: tuple[Tensor, Tensor],
    turned: tuple[Tensor, Tensor],
    counted: Bool[Tensor, "rows tokens"],
) -> Iterator[dict[str, Any]]:
    """What the exchange did to one head."""
    (q, k), (q_turned, k_turned) = clean, turned
    seen = step.mask[:, 0].expand(len(q), -1, -1)
    pairs = seen & counted[:, :, None] & counted[:, None]
    asked = counted & (seen.sum(-1) > 1)
    scores = (q @ k.mT).double()
    best = scores.masked_fill(~seen, -torch.inf).argmax(-1)
    size = scores[pairs].square().sum().sqrt()
    changes = {"queries": (q_turned, k), "keys": (q, k_turned), "both": (q_turned, k_turned)}
    kappas = {"queries": _kappa(q, q_turned, counted), "keys": _kappa(k, k_turned, counted), "both": math.nan}
    for exchanged in EXCHANGED:
        after = (changes[exchanged][0] @ changes[exchanged][1].mT).double()
        moved = after.masked_fill(~seen, -torch.inf).argmax(-1) != best
        yield {
            "layer": step.layer,
            "head": head,
            "place": place,
            "exchanged": exchanged,
            "change": float((after - scores)[pairs].square().sum().sqrt() / size),
            "kappa": kappas[exchanged],
            "moved": float(moved[asked].double().mean()),
        }


def _kappa(x: Tensor, turned: Tensor, counted: Tensor) -> float:
    """The RMS of κ, where 1 + κ is the turned vector's part along the old one over its length."""
    old, new = x[counted].double(), turned[counted].double()
    return float(((new * old).sum(-1) / old.square().sum(-1) - 1).square().mean().sqrt())
