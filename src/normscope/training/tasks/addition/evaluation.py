"""What a trained model is worth: accuracy per character with its standard error, by position, and whole answers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from normscope.core.seeds import stream_seed
from normscope.errors import InputError
from normscope.training.batches import one_batch
from normscope.training.tasks.addition.examples import MASK, Addition, Examples, as_text
from normscope.training.tasks.addition.feeds import feed_in_rows
from normscope.transformer import Transformer

TESTED_AT_A_TIME = {"cpu": 512, "cuda": 8192}
DRAWN_FOR_A_TEST = 16_384


@dataclass(frozen=True)
class Worked:
    """An example with what the model made of it: the sum, the answer, and the model's character at each of its places."""

    split: str
    asked: str
    answer: str
    given: str


@dataclass
class Evaluation:
    """The tables of an evaluation, and some examples."""

    accuracy: pd.DataFrame
    positions: pd.DataFrame
    worked: list[Worked] = field(default_factory=list)

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Accuracy by split, by position, and worked examples."""
        worked = pd.DataFrame([vars(example) for example in self.worked], columns=["split", "asked", "answer", "given"])
        return {"accuracy": self.accuracy, "positions": self.positions, "worked": worked}


def evaluate(
    model: Transformer,
    splits: Mapping[str, Addition],
    examples: int,
    offsets: int,
    seed: int,
    precision: torch.dtype,
    worked: int,
    progress: Callable[[int], None],
) -> Evaluation:
    """Every split on that many examples of its own, the right characters before each given (as in training).

    The answer that the model would write by itself is the right one exactly if all its characters are right here, so ``exact``
    is also the rate of right answers it writes. Standard errors treat characters of one answer as dependent. Sums are made of
    small differences: bfloat16 costs a trained model points of accuracy, so float32 is the default on every device.

    Raises:
        InputError: if logits of a character of an answer are NaN or infinite, or all equal.
    """
    accuracy, positions, shown, done = [], [], [], 0
    for split, task in splits.items():
        tally = Tally(task.longest_answer)
        for chunk, start in enumerate(range(0, examples, DRAWN_FOR_A_TEST)):
            count = min(DRAWN_FOR_A_TEST, examples - start)
            chunk_seed = stream_seed(seed, split, chunk)
            for part in _predict(model, task, count, chunk_seed, offsets, precision):
                tally.add(part.right, part.wanted)
                done += len(part.right)
                progress(done)
        if worked:
            some = _predict(model, task, worked, stream_seed(seed, f"{split}, worked"), offsets, precision)
            shown += [one for part in some for one in part.worked(split)]
        accuracy.append({"split": split, **tally.accuracy})
        positions += [{"split": split, **row} for row in tally.positions]
    return Evaluation(pd.DataFrame(accuracy), pd.DataFrame(positions), shown)


@dataclass(frozen=True)
class _Predicted:
    """Some rows: what was to be predicted, what was, and which characters are right, from the answer's first place on."""

    examples: Examples
    targets: Tensor
    predictions: Tensor

    @property
    def wanted(self) -> Tensor:
        return self.targets != MASK

    @property
    def right(self) -> Tensor:
        return (self.predictions == self.targets) & self.wanted

    def worked(self, split: str) -> list[Worked]:
        """Every row in words."""
        asked = [as_text(row[:end]) for row, end in zip(self.examples.characters, self.examples.answers, strict=True)]
        answers = zip(asked, self.targets, self.predictions, self.wanted, strict=True)
        return [Worked(split, question, as_text(right[w]), as_text(given[w])) for question, right, given, w in answers]


class Tally:
    """Running sums over examples: right and all characters of each, their squares, and by position."""

    def __init__(self, places: int) -> None:
        self.examples = self.exact = 0
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.by_place = torch.zeros(2, places, dtype=torch.float64)

    def add(self, right: Bool[Tensor, "rows places"], wanted: Bool[Tensor, "rows places"]) -> None:
        """Count some more examples: which places hold a character, and which of those are right."""
        hits, tokens = right.sum(1).double().cpu(), wanted.sum(1).double().cpu()
        self.examples += len(hits)
        self.exact += int((hits == tokens).sum())
        self.sums += torch.stack([x.sum() for x in (hits, tokens, hits * hits, hits * tokens, tokens * tokens)])
        self.by_place += torch.stack((right.sum(0).double().cpu(), wanted.sum(0).double().cpu()))

    @property
    def accuracy(self) -> dict[str, float | int]:
        """Accuracy per character and the share of exact answers, with standard errors."""
        hits, tokens, hit_squares, products, token_squares = self.sums.tolist()
        share, exact = hits / tokens, self.exact / self.examples
        residual = hit_squares - 2 * share * products + share**2 * token_squares
        return {
            "accuracy": share,
            "stderr": max(residual, 0.0) ** 0.5 / tokens,
            "exact": exact,
            "exact_stderr": (exact * (1 - exact) / self.examples) ** 0.5,
            "tokens": int(tokens),
            "examples": self.examples,
        }

    @property
    def positions(self) -> list[dict[str, float | int]]:
        """Accuracy at each place of the answer, the first is 1."""
        rows: list[dict[str, float | int]] = []
        for place, (hits, tokens) in enumerate(zip(*self.by_place.tolist(), strict=True), 1):
            if tokens:
                share = hits / tokens
                stderr = (share * (1 - share) / tokens) ** 0.5
                rows.append({"position": place, "accuracy": share, "stderr": stderr, "tokens": int(tokens)})
        return rows


def _predict(
    model: Transformer, task: Addition, examples: int, seed: int, offsets: int, precision: torch.dtype
) -> Iterator[_Predicted]:
    """The model's characters for examples from a seed, the shortest first, so that rows of alike length go together."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    drawn = task.draw(examples, generator)
    shifts = torch.randint(offsets + 1, (examples,), generator=generator, device=device)
    order = drawn.lengths.argsort(stable=True)
    feed = feed_in_rows(task, bool(model.config.encoder_layers))
    for rows in torch.split(order, TESTED_AT_A_TIME[device.type]):
        part = drawn[rows]
        batch = feed.trimmed(one_batch(feed.arrange(part, shifts[rows], 1), 0))
        with torch.no_grad(), torch.autocast(device.type, precision, enabled=precision != torch.float32):
            logits = feed.logits(model, batch)
        targets = batch["targets"]
        predictions = logits.argmax(-1).view_as(targets)
        _require_predictions(logits.view(*targets.shape, -1), targets != MASK)
        if not model.config.encoder_layers:
            targets, predictions = (_from_answer(part, task, x) for x in (targets, predictions))
        yield _Predicted(part, targets, predictions)


def _require_predictions(logits: Float[Tensor, "rows places characters"], wanted: Bool[Tensor, "rows places"]) -> None:
    """Refuse logits that predict no character: non-finite ones, and those that are all equal."""
    low, high = logits.aminmax(dim=-1)
    for why, undefined in (("became non-finite (NaN/Inf)", ~(high - low).isfinite()), ("are all equal", high == low)):
        rows = int((undefined & wanted).any(1).sum())
        if rows:
            raise InputError(
                f"the model's logits {why} in {rows:,} of {len(logits):,} examples: it predicts nothing there, and its "
                "accuracy is not defined"
            )


def _from_answer(examples: Examples, task: Addition, values: Tensor) -> Tensor:
    """The columns of each row from the one that predicts the answer's first character."""
    place = examples.answers[:, None] - 1 + torch.arange(task.longest_answer, device=values.device)
    there = place < values.shape[1]
    return torch.where(there, values.gather(1, place.clamp(max=values.shape[1] - 1)), MASK)
