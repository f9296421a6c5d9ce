"""Spheres: whether the part of a token that a head reads has the same norm for all tokens."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import length
from normscope.measures.base import LayerAttention, Measure, PassObserver, Subject
from normscope.measures.head_rows import HeadRows, distinct_heads, head_name, needless, side_means
from normscope.measures.head_spaces import PLACES, SIDES, layer_input
from normscope.models.describe import layers_named
from normscope.results.conventions import NORM_BAND
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import head_map, plain_rows, table_of

_MATRICES = {"queries": "W_Q", "keys": "W_K"}


@dataclass(frozen=True)
class Spheres(Measure):
    """The norm of P x relative to its median, P the projection onto what W_Q or W_K reads, before and after the norm."""

    name: ClassVar[str] = "spheres"
    title: ClassVar[str] = "Do heads read inputs of constant norm?"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "matrices"})
    order: ClassVar[int | None] = 61
    overview: ClassVar[int] = 0

    def observer(self, subject: Subject) -> PassObserver:
        """Collects a row for every head, place and side."""
        return HeadRows("spheres", lambda attention: _rows(subject, attention))

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The spread before the norm, the mean over the heads of a layer."""
        table = table_of(tables, "spheres")
        return {} if table is None else {"norm spread, q / k": side_means(table[table["place"] == "before"], "spread")}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """For queries and for keys, in how many heads the norm is nearly constant."""
        table = table_of(tables, "spheres")
        for side, rows in () if table is None else table[table["spread"].notna()].groupby("side", sort=False):
            if not (rows["place"] == "before").any():
                continue  # no head reads anything of the stream, which the rank of W_QK shows
            kind = "KV heads" if (rows["shared"] > 1).any() else "heads"
            yield _finding(str(side), distinct_heads(rows), kind, about)

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """A map of the spread for each side."""
        table = table_of(tables, "spheres")
        if table is None:
            return None
        text = (
            "All heads share one divisor, the residual norm; they are independent only if it does not depend on what other "
            "heads read. That holds if each head's part of a token is orthogonal to the others and has a constant norm before "
            "the norm layer. After it, every part is divided by the residual norm; the table has both places.",
        )
        maps = {
            f"spheres-{side}": head_map(
                rows, "spread", f"Spread of token norms, projected onto what {_MATRICES[str(side)]} reads",
                "width of the 90 % interval / median",
                "Dark heads read inputs of nearly constant norm (before the norm layer).", settings,
            )
            for side, rows in table[table["place"] == "before"].groupby("side", sort=False)
        }  # fmt: skip
        return self.page(text, maps)


def _rows(subject: Subject, attention: LayerAttention) -> Iterator[dict[str, Any]]:
    """The norm of P x over its median, and the share |P x|²/|x|² that a head reads, before the norm and after it.

    Theorem 2 requires a constant norm before the norm layer; after it, P x is divided by the norm of x.
    """
    found = layer_input(subject.model, attention)
    states = {
        "before": found.source.states[attention.counted].double(),
        "after": attention.step.input[attention.counted].double(),
    }
    for place in PLACES:
        spaces = found.spaces[place]
        for side, bases, shared in zip(SIDES, (spaces.queries, spaces.keys), (1, spaces.shared), strict=True):
            for head, values in enumerate(_spreads(states[place], bases)):
                yield (
                    {"layer": attention.layer, "head": head, "place": place, "side": side, "shared": shared}
                    | values
                    | {"width": bases.shape[-1]}
                )


def _spreads(x: Float[Tensor, "tokens dim"], bases: Float[Tensor, "heads dim width"]) -> Iterator[dict[str, float]]:
    """Of every head, with its orthonormal basis."""
    norms = length(x @ bases).squeeze(-1)
    quantiles = norms.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=x.dtype, device=x.device), dim=1)
    shares = (norms / length(x).squeeze(1)).square().mean(1)
    for share, low, median, high in torch.cat((shares[None], quantiles)).T.tolist():
        over = median or math.nan  # a head without weights reads nothing
        yield {"share": share, "median": median, "low90": low / over, "high90": high / over, "spread": (high - low) / over}


def _finding(side: str, rows: pd.DataFrame, kind: str, about: Mapping[str, Any]) -> Finding:
    """How many heads read inputs of constant norm, which, and how far the others are from it."""
    before, matrix = rows[rows["place"] == "before"], _MATRICES[side]
    after = rows[rows["place"] == "after"]
    both = before.merge(after, on=["layer", "head"])
    constant, changed = _constant(before), not np.allclose(both["spread_x"], both["spread_y"])
    normed = f"After the norm: {len(_constant(after))} of {len(before)}. " if changed else ""
    where = f", in {layers_named(constant['layer'])}" if len(constant) else ""
    ratio = before["high90"] / before["low90"]
    widest = plain_rows(before[ratio == ratio.max()])[0]
    width, fine = int(before["width"].median()), bool(needless(side, about)) or len(constant) == len(before)
    return Finding(
        f"Projected onto what {matrix} reads, token norms are nearly constant (90 % within ±20 %) in {len(constant)} of "
        f"{len(before)} {kind}{where}.",
        f"spheres-{side}",
        title=f"Token norms that {matrix} reads",
        severity="ok" if fine else "notice",
        number=len(constant) / len(before),
        comparison=(
            f"{needless(side, about)}{normed}Widest: {_name(widest, kind)}, a factor of {_factor(ratio.max())} between the "
            "ends of the 90 % interval. "
            f"In the median head {matrix} reads {100 * before['share'].median():.3g} % of the squared norm; chance is "
            f"{100 * width / about['dim']:.3g} % ({width}/{about['dim']})."
        ),
    )


def _factor(ratio: float) -> str:
    """A ratio of norms; the smaller may be 0."""
    return f"{ratio:.3g}" if math.isfinite(ratio) else "∞"


def _name(row: Mapping[Any, Any], kind: str) -> str:
    return head_name(row) if kind == "heads" else f"layer {int(row['layer'])}, KV head {int(row['head'])}"


def _constant(rows: pd.DataFrame) -> pd.DataFrame:
    """The heads in which 90 % of the norms are within ±20 % of the median."""
    return rows[(rows["low90"] >= 1 - NORM_BAND) & (rows["high90"] <= 1 + NORM_BAND)]
