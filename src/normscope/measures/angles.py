"""Angles: how far what two heads of a layer read overlaps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.measures.base import LayerAttention, Measure, PassObserver, Subject, Tables
from normscope.measures.head_rows import HeadRows, needless, side_means
from normscope.measures.head_spaces import (
    SIDES,
    chance_cosine,
    data_roots,
    spaces_of,
    weighted_cosine,
)
from normscope.models.factors import largest_singular, singular_sum
from normscope.results.findings import Finding
from normscope.results.sections import Section
from normscope.results.tables import head_map, plain_rows, table_of

_ABOVE_CHANCE = 1.1
_HELD = 1 << 25  # numbers in the products of pairs that are held at once


@dataclass(frozen=True)
class Angles(Measure):
    """Principal angles between the input subspaces of every two heads of a layer, plain and weighted by the data."""

    name: ClassVar[str] = "angles"
    title: ClassVar[str] = "Do heads read orthogonal subspaces?"
    needs: ClassVar[frozenset[str]] = frozenset({"attention", "matrices"})
    order: ClassVar[int | None] = 62
    overview: ClassVar[int] = 0

    def observer(self, subject: Subject) -> PassObserver:
        """Collects a row for every pair of heads and side."""
        return _AngleRows("angles", lambda attention: _rows(subject, attention))

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """The weighted cosine, the mean over the heads of a layer."""
        table = table_of(tables, "overlaps")
        return {} if table is None else {"overlap, q / k": side_means(table, "weighted_cosine")}

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """For queries and for keys, the mean cosine beside that of random subspaces."""
        table = table_of(tables, "angles")
        for side, rows in () if table is None else table.dropna().groupby("side", sort=False):
            yield _finding(str(side), rows, about)

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """A map of the weighted cosine for each side."""
        table = table_of(tables, "overlaps")
        if table is None:
            return None
        text = (
            "Cosines of the principal angles between the input subspaces of two heads, weighted by where token states lie: 0 "
            "for orthogonal subspaces, 1 for the same one. Orthogonal subspaces are half of what makes heads independent "
            "under a norm at the input.",
        )
        maps = {
            f"angles-{side}": head_map(
                rows, "weighted_cosine", f"Overlap with the other heads of the layer, {side}", "mean cosine, weighted",
                "Dark heads read parts that are orthogonal to what the others read; bright heads share theirs.", settings,
            )
            for side, rows in table.groupby("side", sort=False)
        }  # fmt: skip
        return self.page(text, maps)


class _AngleRows(HeadRows):
    """The table of pairs, and ``overlaps``: for each head the means over its pairs."""

    def tables(self) -> Tables:
        tables = super().tables()
        return {**tables, "overlaps": _overlaps(tables["angles"])} if "angles" in tables else tables


def _rows(subject: Subject, attention: LayerAttention) -> Iterator[dict[str, Any]]:
    """The angles of every pair of heads on either side; query heads with the same keys are no pair on the side of keys."""
    spaces, x = spaces_of(subject.model, attention), attention.step.input[attention.counted].double()
    for side, bases, shared in zip(SIDES, (spaces.queries, spaces.keys), (1, spaces.shared), strict=True):
        values = _pair_values(x, bases[::shared])
        for head, other in combinations(range(len(bases)), 2):
            if head // shared != other // shared:
                row = {"layer": attention.layer, "head": head, "other": other, "side": side, "shared": shared}
                row["width"] = min(bases.shape[1:])
                yield row | values[head // shared, other // shared]


def _pair_values(
    x: Float[Tensor, "tokens dim"], bases: Float[Tensor, "heads dim width"]
) -> dict[tuple[int, int], dict[str, float]]:
    """Smallest angle, mean cosine and weighted cosine of every pair of subspaces; NaN where a head reads nothing."""
    heads, _, width = bases.shape
    left, right = torch.triu_indices(heads, heads, 1, device=bases.device)
    wide = bases.transpose(0, 1).flatten(1)
    gram = (wide.T @ wide).view(heads, width, heads, width)
    roots, ranks = data_roots(x, bases), bases.any(1).sum(1)
    columns = []
    for one, other in zip(left.split(_HELD // width**2), right.split(_HELD // width**2), strict=True):
        products = gram[one, :, other]
        common = torch.minimum(ranks[one], ranks[other])  # 0 where a head reads nothing, and has no angles
        angle = torch.rad2deg(largest_singular(products).clamp(max=1).acos()).masked_fill(common == 0, torch.nan)
        overlap = weighted_cosine(products, roots[one], roots[other]).masked_fill(common == 0, torch.nan)
        columns.append(torch.stack((angle, singular_sum(products) / common, overlap)))
    values = torch.cat(columns, 1).T.tolist() if columns else []
    names = ("smallest_angle", "mean_cosine", "weighted_cosine")
    return {
        (one, other): dict(zip(names, three, strict=True))
        for one, other, three in zip(left.tolist(), right.tolist(), values, strict=True)
    }


def _overlaps(angles: pd.DataFrame) -> pd.DataFrame:
    """The mean cosines of every head over its pairs."""
    mirrored = angles.rename(columns={"head": "other", "other": "head"})
    both = pd.concat([angles, mirrored])[["layer", "head", "side", "mean_cosine", "weighted_cosine"]]
    return both.groupby(["layer", "side", "head"], as_index=False, sort=False).mean().sort_values(["layer", "side", "head"])


def _finding(side: str, rows: pd.DataFrame, about: Mapping[str, Any]) -> Finding:
    """The mean cosine beside chance; heads that share their keys are named by their KV head."""
    matrix = {"queries": "W_Q", "keys": "W_K"}[side]
    mean, widths = rows["mean_cosine"].mean(), rows["width"].value_counts(normalize=True)
    chance = sum(share * chance_cosine(about["dim"], int(str(width))) for width, share in widths.items())
    weighted = rows["weighted_cosine"]
    closest = plain_rows(rows[weighted == weighted.max()])[0]
    shared = closest["shared"]
    above = mean > _ABOVE_CHANCE * chance and not needless(side, about)
    heads = f"{'KV ' * (shared > 1)}heads {closest['head'] // shared} and {closest['other'] // shared}"
    return Finding(
        f"What {matrix} reads in two heads of a layer overlaps with a mean cosine of {mean:.2f} ({chance:.2f} for random "
        "subspaces of this size).",
        f"angles-{side}",
        title=f"{matrix} reads {'overlapping' if above else 'different'} subspaces in different heads",
        severity="notice" if above else "ok",
        number=float(mean),
        comparison=(
            f"{needless(side, about)}0 is orthogonal, 1 the same subspace. Weighted by where token states lie: "
            f"{weighted.mean():.2f}. Closest: layer {closest['layer']}, {heads}, {weighted.max():.2f}. Smallest angle of the "
            f"median pair: {rows['smallest_angle'].median():.3g}°."
        ),
    )
