"""An audit: the labs' measurements of a model one after the other, and what they say."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from normscope import stability, subspaces
from normscope.audit.findings import Finding, journey_findings, motion_findings, of_lab
from normscope.audit.motion import measure_motion
from normscope.errors import InputError
from normscope.models import Model, Sample
from normscope.models.normscope_model import NormscopeModel
from normscope.runs import KeptTables, code_fingerprint
from normscope.schemes import NAMED, block_records
from normscope.words import follow, places

Tables = dict[str, pd.DataFrame]
Progress = Callable[[int], None]
TOKENS = 256  # that are read of our own text
SENTENCE = "To kill two birds with one stone"
COMPARED = ("post", "pre", "peri", "ngpt", "ln-scaling", "sqrt-scaling")  # what the model's writes are replayed with
# Measures of the labs, and the figures that show what is said of them, sentence by sentence; the last for all that follow.
_STABILITY = {"spread": ("spread",), "collapse": ("collapse", "collapse-heads"), "sparsity": ("sparsity",)}
_SUBSPACES = {
    "interference": ("interference",),
    "spheres": ("spheres-queries", "spheres-keys"),
    "angles": ("angles-queries", "angles-keys"),
    "rank": ("rank",),
}


@dataclass(frozen=True)
class Question:
    """What an audit asks a model.

    Attributes:
        view: the model.
        sample: what it reads.
        sentence: whose last token but one is followed; None for a model that reads no sentences.
        seed: of what is drawn.
    """

    view: Model
    sample: Sample
    sentence: str | None = None
    seed: int = 0

    @classmethod
    def of(
        cls,
        view: Model,
        content: str | None = None,
        tokens: int | None = None,
        examples: int | None = None,
        sentence: str | None = None,
        seed: int = 0,
    ) -> "Question":
        """A text or examples for the model to read, by default some of ours, and a sentence unless it only adds."""
        sample = stability.chosen_sample(view, content, tokens, examples, seed, ours=TOKENS)
        if isinstance(view, NormscopeModel):
            return cls(view, sample, None, seed)
        sentence = SENTENCE if sentence is None else sentence
        try:
            view.sample(sentence, None, seed)
        except InputError as error:  # now, not after minutes of measuring
            raise InputError(f"--sentence {sentence!r}: {error}") from error
        return cls(view, sample, sentence, seed)

    @property
    def about(self) -> dict[str, Any]:
        """What a run folder says of it."""
        view, sample = self.view, self.sample
        return {
            "model": view.name,
            "checksum": view.checksum,
            "scheme": None if view.scheme is None else view.scheme.name,
            "layers": view.layers,
            "heads": view.heads,
            "dim": view.dim,
            "rows": sample.tokens.shape[0],
            "tokens": int(sample.attention_mask.sum()),
            "sentence": self.sentence,
        }

    @property
    def record(self) -> dict[str, Any]:
        """What is asked, as plain values."""
        read = hashlib.sha256()
        for tensor in (self.sample.tokens, self.sample.targets, self.sample.attention_mask, self.sample.positions):
            read.update(b"" if tensor is None else tensor.cpu().numpy().tobytes())
        sample = f"{tuple(self.sample.tokens.shape)} {read.hexdigest()}"
        return {"sample": sample, "sentence": self.sentence, "seed": self.seed}


@dataclass(frozen=True)
class Part:
    """A measurement that can be taken, kept and read again by itself.

    Attributes:
        title: what it looks at.
        asks: what of the question its tables depend on, besides the model, the device and the code.
        measure: its tables, from the question and a function that is told how many layers are done.
        findings: what the tables say.
    """

    title: str
    asks: tuple[str, ...]
    measure: Callable[[Question, Progress], Tables]
    findings: Callable[[Question, Mapping[str, pd.DataFrame]], Iterator[Finding]]

    def key(self, question: Question) -> dict[str, Any]:
        """All that its tables depend on."""
        asked = {name: value for name, value in question.record.items() if name in self.asks}
        return {
            "part": self.title,
            "model": question.view.checksum,
            "device": question.view.device.type,
            "code": code_fingerprint(),
            "torch": torch.__version__,
            **asked,
        }


def _motion(question: Question, progress: Progress) -> Tables:
    return measure_motion(question.view, question.sample, [NAMED[name] for name in COMPARED], progress)


def _stability(question: Question, progress: Progress) -> Tables:
    return stability.measure_clean(question.view, question.sample, draws=0, progress=progress)  # nothing is drawn


def _subspaces(question: Question, progress: Progress) -> Tables:
    return subspaces.measure_subspaces(question.view, question.sample, tuple(_SUBSPACES), question.seed, progress)


def _journey(question: Question, progress: Progress) -> Tables:
    if question.sentence is None:
        return {}
    journey = follow(question.view, question.sentence, -2)
    return {"journey": journey.table, "places": places(question.view, journey, "sphere", question.seed)}


PARTS: dict[str, Part] = {
    "motion": Part("motion", ("sample",), _motion, motion_findings),
    "stability": Part("norm spread, collapse, sparsity", ("sample",), _stability, of_lab(stability.findings, _STABILITY)),
    "subspaces": Part("interference of heads", ("sample", "seed"), _subspaces, of_lab(subspaces.findings, _SUBSPACES)),
    "journey": Part("the journey of a token", ("sentence", "seed"), _journey, journey_findings),
}


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        tables: those of all parts; ``findings`` (text, figure); ``blocks``, the block of the scheme, if that is known.
        reused: the parts that were measured before.
    """

    tables: Tables
    reused: tuple[str, ...]


def audit(
    question: Question,
    kept: KeptTables | None = None,
    progress: Callable[[str, int, int], None] = lambda part, done, total: None,
) -> Audit:
    """Measure all parts, or take what was measured before of the same model, text, settings and code.

    Args:
        question: the model, and what it reads.
        kept: where tables of parts are kept.
        progress: told the part, how many layers are done, and how many there are.
    """
    view = question.view
    tables: Tables = {} if view.scheme is None else {"blocks": pd.DataFrame(block_records(view.scheme))}
    said, reused = [Finding(view.summary, "block")], []
    for name, part in PARTS.items():
        key = part.key(question) if kept else {}
        found = kept.load(key) if kept else None
        if found is None:

            def layers_done(done: int, title: str = part.title) -> None:
                progress(title, done, view.layers)

            layers_done(0)
            found = part.measure(question, layers_done)
            if kept:
                kept.save(key, found)
        else:
            reused.append(name)
        said += part.findings(question, found)
        tables |= found
    findings = pd.DataFrame({"text": [one.text for one in said], "figure": [one.figure for one in said]})
    return Audit({"findings": findings, **tables}, tuple(reused))
