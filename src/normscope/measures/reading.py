"""Reading: what of the sample reaches the model, and whether it predicts it: special tokens, unknown tokens, clean loss."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from normscope.measures.base import Measure, PassObserver, Subject, Tables
from normscope.measures.curves import percent
from normscope.models import NOTHING, Sample
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows, table_of

_MOST_UNKNOWN = 0.05  # share of unknown tokens above which a text is not one for this tokenizer
_FEWEST = 128  # predictions from which the loss is compared with the frequencies of the sample's tokens
_TOGETHER = 1 << 26  # logits that are made float32 at a time


def token_scores(
    logits: Float[Tensor, "rows tokens vocabulary"], sample: Sample
) -> tuple[Bool[Tensor, " predicted"], Float[Tensor, " predicted"]]:
    """Whether each predicted token is right, and its loss in nats; NaN where a logit is not finite."""
    targets = sample.predicting.targets
    wanted = targets != NOTHING
    rows, targets = logits[wanted], targets[wanted]
    right, losses = [], []
    for part, target in zip(*(torch.split(x, max(1, _TOGETHER // logits.shape[-1])) for x in (rows, targets)), strict=True):
        wide = part.float()
        loss = F.cross_entropy(wide, target, reduction="none").double()
        right.append(wide.argmax(-1) == target)
        losses.append(loss.masked_fill(~wide.isfinite().all(-1), torch.nan))
    return torch.cat(right), torch.cat(losses)


def unigram_loss(sample: Sample) -> float:
    """Mean −log p(target) with p the frequencies of the sample's own tokens: what a model without any context would lose."""
    sample = sample.predicting
    wanted = sample.targets != NOTHING
    read = torch.where(wanted & ~_is_next(sample), sample.targets, sample.tokens)[sample.attention_mask]
    known, counts = torch.unique(read, return_counts=True)
    places = torch.searchsorted(known, sample.targets[wanted]).clamp(max=len(known) - 1)
    found = torch.where(known[places] == sample.targets[wanted], counts[places], 1)
    return float(-(found.double() / len(read)).log().mean())


def _is_next(sample: Sample) -> Bool[Tensor, "rows tokens"]:
    """Where a target is the next token, and not what a mask hides."""
    following = torch.full_like(sample.tokens, NOTHING)
    following[:, :-1] = sample.tokens[:, 1:]
    return sample.targets == following


class _Observer(PassObserver):
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.row: dict[str, Any] = {"tokens": int(subject.viewed.attention_mask.sum()), **special_facts(subject)}

    def logits(self, logits: Tensor) -> None:
        sample = self.subject.sample
        if not bool((sample.predicting.targets != NOTHING).any()):
            return
        right, losses = token_scores(logits, sample)
        self.row |= {
            "predictions": len(losses),
            "loss": float(losses.mean()),
            "loss_stderr": float(losses.std()) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan,
            "accuracy": float(right.double().mean()),
            "unigram_loss": unigram_loss(sample),
            "uniform_loss": math.log(self.subject.model.vocabulary),
        }

    def tables(self) -> Tables:
        return {"reading": pd.DataFrame([self.row])}


def special_facts(subject: Subject) -> dict[str, Any]:
    """The special tokens before and after the text, of its first row, and the share of unknown tokens.

    None without a tokenizer.
    """
    model, sample = subject.model, subject.viewed
    if model.tokenizer is None:
        return {"special_before": None, "special_after": None, "unknown": None}
    rows = [row[mask] for row, mask in zip(sample.tokens, sample.attention_mask, strict=True)]
    before, after = model.special_ends(rows[0])
    counts = [model.unknown(row) for row in rows]
    unknown = None if None in counts else sum(count or 0 for count in counts) / max(1, sum(map(len, rows)))
    return {"special_before": " ".join(before), "special_after": " ".join(after), "unknown": unknown}


@dataclass(frozen=True)
class Reading(Measure):
    """Special tokens, unknown tokens and the clean loss of the sample: whether the model reads what it is made for."""

    name: ClassVar[str] = "reading"
    title: ClassVar[str] = "What the model reads"
    order: ClassVar[int | None] = 1
    overview: ClassVar[int] = 0

    def observer(self, subject: Subject) -> PassObserver:
        """The logits of the forward pass."""
        return _Observer(subject)

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """A loss that no trained model has on its own kind of text, and too many unknown tokens."""
        row = reading_of(tables)
        if row.get("loss") is not None:
            yield from _implausible(row)
        if row.get("unknown") is not None and row["unknown"] > _MOST_UNKNOWN:
            yield Finding(
                f"{percent(row['unknown'])} of the {row['tokens']:,} tokens are the unknown token: the tokenizer cannot "
                "represent this text, and the model reads something else.",
                None, "Many tokens are unknown", "warning", row["unknown"],
                f"At most {percent(_MOST_UNKNOWN)} are plausible for a text in the model's language.",
                "Give a text of the kind that the model was trained on (text=…), or the right tokenizer.", 270,
            )  # fmt: skip

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """The facts as a table."""
        facts = reading_facts(tables)
        if not facts:
            return None  # pixels have neither special tokens nor a loss
        text = (
            "Special tokens are those that the tokenizer adds, as its file states (bos=True and bos=False override it). The "
            "clean loss is the mean of −log p(token) in nats. It is implausible if it is no better than guessing (log of the "
            f"vocabulary) or, with {_FEWEST} predictions or more, worse than the frequencies of the sample's own tokens.",
        )
        return self.page(text, {}, [PageTable("", ("", ""), tuple(facts))])


def _implausible(row: dict[str, Any]) -> Iterator[Finding]:
    """The rule: no better than guessing, or, with enough predictions, worse than the frequencies of the sample's tokens."""
    bounds = {"guessing (the log of the vocabulary)": row["uniform_loss"]}
    if row["predictions"] >= _FEWEST:
        bounds["the frequencies of the sample's own tokens, without any context"] = row["unigram_loss"]
    beaten = {name: bound for name, bound in bounds.items() if row["loss"] >= bound}
    if beaten:
        name, bound = min(beaten.items(), key=lambda item: item[1])
        before = row["special_before"]
        special = f"; the sample begins with {before}" if before else "; no special token comes before the text"
        yield Finding(
            f"The clean loss is {_loss(row)}, and {name} give{'s' * name.startswith('guess')} {bound:.2f}: the model does not "
            f"predict this sample, and what is measured here is not how it works{special if before is not None else ''}.",
            None, "The loss is implausible", "warning", row["loss"],
            "A trained language model has 2 to 4 nats on plain English.",
            "Check BOS (bos=True or bos=False), the tokenizer, the language of the text, and whether the weights are trained.",
            280,
        )  # fmt: skip


def reading_of(tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """The row of the table ``reading``; empty without one."""
    table = table_of(tables, "reading")
    return {} if table is None else plain_rows(table)[0]


def reading_facts(tables: Mapping[str, pd.DataFrame]) -> list[tuple[str, str]]:
    """Special tokens, unknown tokens and clean loss for people, as far as they are known."""
    row = reading_of(tables)
    facts = []
    if row.get("special_before") is not None:
        ends = [f"{row[f'special_{where}']} {where}" for where in ("before", "after") if row[f"special_{where}"]]
        facts.append(("special tokens", ", ".join(ends) or "none"))
    if row.get("unknown") is not None:
        facts.append(("unknown tokens", percent(row["unknown"])))
    if row.get("loss") is not None:
        facts.append(("clean loss", _loss(row)))
    return facts


def _loss(row: dict[str, Any]) -> str:
    error = "" if row["loss_stderr"] is None else f" ± {row['loss_stderr']:.2f}"
    return f"{row['loss']:.2f}{error}"
