"""Numbers of one probe: kept on the device until all are there, then one transfer and one reduction over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

Array = npt.NDArray[np.float64]


def _norm(values: Array) -> Array:
    root: Array = np.sqrt(values.sum(0))
    return root


_OVER_RANKS = {
    "mean": lambda values: values.mean(0),
    "max": lambda values: np.fmax.reduce(values, 0),  # a process without a part of a tensor has NaN
    "min": lambda values: np.fmin.reduce(values, 0),
    "sum": lambda values: values.sum(0),
    "norm": _norm,  # of sums of squares
}


@dataclass(frozen=True)
class _Entry:
    table: str
    rows: Sequence[Mapping[str, Any]]
    column: str
    over_ranks: str


class Packed:
    """Tables whose numbers are still on the device."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._values: list[Tensor] = []

    def add(
        self,
        table: str,
        column: str,
        values: Tensor,
        rows: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        over_ranks: str = "mean",
    ) -> None:
        """A column of a table, for the row with these keys or for several.

        ``over_ranks``: how the values of several processes become one: ``mean``, ``max``, ``min``, ``sum``, or ``norm``, the
        root of the sum of squares.
        """
        rows, values = [rows] if isinstance(rows, Mapping) else rows, values.detach().flatten()
        assert len(rows) == len(values), f"{table}.{column}: {len(values)} values for {len(rows)} rows"
        self._entries.append(_Entry(table, rows, column, over_ranks))
        self._values.append(values.double())

    def tables(self, group: "dist.ProcessGroup | None" = None, reduce: bool = False) -> dict[str, pd.DataFrame]:
        """The tables; with ``reduce``, over all processes of the group, which must have added the same entries."""
        if not self._entries:
            return {}
        device = self._values[0].device
        packed = torch.cat([values.to(device, non_blocking=True) for values in self._values])
        every = packed[None]
        if reduce:
            ranks = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
            dist.all_gather(ranks, packed, group=group)
            every = torch.stack(ranks)
        return _tables(self._entries, every.cpu().numpy())


def _tables(entries: Sequence[_Entry], every: Array) -> dict[str, pd.DataFrame]:
    tables: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    start = 0
    for entry in entries:
        end = start + len(entry.rows)
        values, table = _OVER_RANKS[entry.over_ranks](every[:, start:end]).tolist(), tables.setdefault(entry.table, {})
        for keys, value in zip(entry.rows, values, strict=True):
            table.setdefault(tuple(keys.values()), dict(keys))[entry.column] = value
        start = end
    return {name: pd.DataFrame(list(rows.values())) for name, rows in tables.items()}
