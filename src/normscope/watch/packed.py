"""Numbers of one probe: kept on the device until all are there, then one transfer and one reduction over ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

Array = npt.NDArray[np.float64]


def _mean(values: Array) -> Array:
    """Without NaN: a head may have near-one-hot rows on some processes only."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(known, values, 0.0).sum(0) / known.sum(0)
    return mean


def _norm(values: Array) -> Array:
    root: Array = np.sqrt(values.sum(0))
    return root


_OVER_RANKS: dict[str, Callable[[Array], Array]] = {
    "mean": _mean,
    "max": lambda values: np.fmax.reduce(values, 0),  # a process without a part of a tensor has NaN
    "min": lambda values: np.fmin.reduce(values, 0),
    "sum": lambda values: values.sum(0),
    "norm": _norm,  # of sums of squares
    "count": lambda values: np.isfinite(values).sum(0).astype(np.float64),
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

        ``over_ranks``: how the values of several processes become one: ``mean``, ``max``, ``min``, ``sum``, ``norm``, the root
        of the sum of squares, or ``count``, how many are not NaN.
        """
        rows, values = [rows] if isinstance(rows, Mapping) else rows, values.detach().flatten()
        assert len(rows) == len(values), f"{table}.{column}: {len(values)} values for {len(rows)} rows"
        self._entries.append(_Entry(table, rows, column, over_ranks))
        self._values.append(values.double())

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return sum(len(values) for values in self._values)

    def sent(self, group: "dist.ProcessGroup | None" = None, ranks: int = 1) -> "Sent":
        """The numbers on their way to this process, with those of all other processes of the group.

        All processes must have added the same entries.
        """
        device = next((values.device for values in self._values if values.is_cuda), self._values[0].device)
        packed = torch.cat([values.to(device, non_blocking=True) for values in self._values])
        return Sent(self._entries, Transfer.of(_gathered(packed, group, ranks)))

    def joined(self, sent: "Sent") -> dict[str, pd.DataFrame]:
        """The tables of numbers that were sent, and of those here."""
        here = torch.cat([torch.empty(0, dtype=torch.float64), *self._values])[None]
        there = sent.numbers.tensor
        return _tables([*sent.entries, *self._entries], torch.cat((there, here.expand(len(there), -1)), 1).numpy())


def take_part(size: int, device: torch.device, group: "dist.ProcessGroup | None", ranks: int) -> None:
    """Take part in the reduction of other processes without numbers: theirs become NaN, which says that a probe failed."""
    _gathered(torch.full((size,), torch.nan, dtype=torch.float64, device=device), group, ranks)


def _gathered(packed: Tensor, group: "dist.ProcessGroup | None", ranks: int) -> Tensor:
    """The numbers of every process, (processes, numbers): the one collective operation of a probe."""
    if ranks == 1:
        return packed[None]
    every = [torch.empty_like(packed) for _ in range(ranks)]
    dist.all_gather(every, packed, group=group)
    return torch.stack(every)


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way from a device: nothing waits for it before it is used."""

    host: Tensor
    arrived: "torch.cuda.Event | None"

    @classmethod
    def of(cls, x: Tensor) -> "Transfer":
        """Send a tensor."""
        if not x.is_cuda:
            return cls(x.cpu(), None)
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(x.device))
        return cls(host, arrived)

    @property
    def tensor(self) -> Tensor:
        """The tensor, once it is here."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host


@dataclass(frozen=True)
class Sent:
    """Packed numbers on their way."""

    entries: Sequence[_Entry]
    numbers: Transfer


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
