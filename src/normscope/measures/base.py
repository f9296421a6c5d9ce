"""A measure: what it needs of a model, the tables it makes, and the findings and figures that follow from them."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from normscope.errors import InputError
from normscope.results.figures import Figure
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section

if TYPE_CHECKING:
    from torch import Tensor

    from normscope.measures.faults import Fault
    from normscope.models import AttentionStep, Model, Sample, SublayerStep
    from normscope.models.model import TextOrIds

Tables = dict[str, pd.DataFrame]
Advance = Callable[[float], None]
Stages = Callable[[str, float, float], None]
LAYER = "layer"
_PATTERNS, _LOGITS = 8, 3  # copies of a layer's attention pattern and of the logits while a measure works
PASS = "one forward pass"


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, the sample that it reads, and what else a measure may ask for.

    Attributes:
        model: the model.
        sample: its input.
        seed: of everything that is drawn.
        sentence: a sentence, or its token ids, whose last token but one is followed through the layers; None for none.
    """

    model: "Model"
    sample: "Sample"
    seed: int = 0
    sentence: "TextOrIds | None" = None

    def memory(self, states: float, embeddings: float) -> dict[str, float]:
        """Bytes that measures need at most, about: so many copies of the hidden states and of the embeddings, and logits."""
        model, (rows, tokens) = self.model, self.viewed.tokens.shape
        read = rows * tokens * (states * model.dim + _PATTERNS * tokens * model.heads)
        vocabulary = model.vocabulary * (embeddings * model.dim + _LOGITS * self.sample.predicting.tokens.numel())
        return {f"reading {rows * tokens:,} tokens": 4.0 * (read + vocabulary)}

    @property
    def about(self) -> dict[str, Any]:
        """Plain facts on the model and the sample: what findings and ``run.json`` say of them."""
        from normscope.models.describe import scheme_text

        model, sample = self.model, self.viewed
        joint = {norm.slot for norm in model.norms} & {"q", "k"} - set(model.normalised_heads)
        return {
            "model": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "checksum": self.checksum,
            "stream": model.stream,
            "streams": list(model.streams),
            "scheme": None if model.scheme is None else model.scheme.name,
            "schemes": scheme_text(model.schemes),
            "description": model.summary,
            "layers": model.layers,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "normalised_heads": model.normalised_heads,
            "jointly_normalised": "".join(sorted(joint)),  # of q and k, over all heads together
            "dim": model.dim,
            "vocabulary": model.vocabulary,
            "attention_layers": list(model.attention_layers),
            "rows": sample.tokens.shape[0],
            "tokens": int(sample.attention_mask.sum()),
            "reads": "tokens" if sample.features is None else "positions",
            "sentence": self.sentence_text,
        }

    @property
    def sentence_text(self) -> str | None:
        """The sentence for people, also of token ids."""
        if self.sentence is None or isinstance(self.sentence, str):
            return self.sentence
        return " ".join(self.model.words(self.model.viewed(self.model.batch(self.sentence)).tokens[0]))

    @property
    def record(self) -> dict[str, Any]:
        """What tables may depend on besides the model, as plain values: ``sample``, ``sentence``, ``seed``."""
        digest, shapes = hashlib.sha256(), []
        for part in self.sample.parts:
            shapes.append(tuple(part.tokens.shape))
            for tensor in (part.tokens, part.targets, part.attention_mask, part.positions, part.features):
                digest.update(b"" if tensor is None else tensor.cpu().numpy().tobytes())
        read = f"{', '.join(map(str, shapes))} {digest.hexdigest()}"
        said = () if self.sentence is None else self.model.batch(self.sentence).parts
        sentence = [part.tokens.tolist() for part in said] or None
        return {"sample": read, "sentence": sentence, "seed": self.seed}

    @cached_property
    def viewed(self) -> "Sample":
        """What the residual stream that is viewed reads of the sample."""
        return self.model.viewed(self.sample)

    @cached_property
    def checksum(self) -> str:
        """That of the model, computed once: a subject is measured with the weights that it has."""
        return self.model.checksum

    @cached_property
    def lacking(self) -> dict[str, str]:
        """The capabilities that the model does not offer, with the reasons."""
        from normscope.models.describe import why_missing

        return why_missing(self.model)

    @cached_property
    def present(self) -> "Tensor":
        """Tokens (rows, tokens) that have hidden states: all but padding, and those whose embedding is 0."""
        mask = self.viewed.attention_mask
        # what a position adds is not 0
        if self.model.position_kind in ("learned", "cyclic") or "vocabulary" in self.lacking:
            return mask
        return mask & self.model.embeddings[self.viewed.tokens].any(-1)

    @property
    def without_embedding(self) -> int:
        """How many tokens have no hidden state before layer 0, since their embedding is 0."""
        return int((self.viewed.attention_mask & ~self.present).sum())

    @cached_property
    def counted(self) -> "Tensor":
        """Tokens (rows, tokens) that means are taken over: ``present`` without the first of every row, a sink or not."""
        counted = self.present.clone()
        counted[:, 0] = False
        return counted

    def present_in(self, x: "Tensor") -> "Tensor":
        """``present`` for x (rows, positions, ...); all positions where a layer has others than the sample, as pyramids do."""
        return _of_positions(self.present, x)

    def counted_in(self, x: "Tensor") -> "Tensor":
        """``counted`` likewise."""
        return _of_positions(self.counted, x)


def _of_positions(mask: "Tensor", x: "Tensor") -> "Tensor":
    """The mask on the device of x if it has the rows and positions of x; else one of True."""
    same = mask.shape == x.shape[:2]
    return mask.to(x.device) if same else x.new_ones(x.shape[:2]).bool()


class LayerAttention:
    """The attention of one layer in a clean forward pass; scores and weights are computed once for all observers.

    Attributes:
        step: queries, keys, values and hidden states of the layer.
        layer: its number; the first layer is 0.
        counted: the queries (rows, queries) that means are taken over.
    """

    def __init__(self, step: "AttentionStep", counted: "Tensor") -> None:
        self.step = step
        self.layer = step.layer
        self.counted = counted

    @cached_property
    def raw_scores(self) -> "Tensor":
        """q·k (rows, heads, queries, keys), -inf where a query does not attend; observers must not change it."""
        return self.step.raw_scores()

    @cached_property
    def weights(self) -> "Tensor":
        """Attention weights (rows, heads, queries, keys); observers must not change them."""
        return self.step.soften(self.raw_scores)

    @cached_property
    def largest(self) -> "Tensor":
        """The largest weight of every attention row (rows, heads, queries)."""
        return self.weights.amax(-1)


class PassObserver:
    """Receives what a clean forward pass shows and makes tables of it; a subclass overrides the methods that it needs."""

    def attention(self, attention: LayerAttention) -> None:
        """The attention of a layer."""

    def sublayer(self, step: "SublayerStep") -> None:
        """A sublayer: the states before it, what it computed, its update, and the states after it."""

    def state(self, layer: int, x: "Tensor") -> None:
        """The hidden states (rows, tokens, dim) before a layer; with ``layer`` the number of layers, those after the last."""

    def logits(self, logits: "Tensor") -> None:
        """The logits (rows, tokens, vocabulary) of the sample, for a model that predicts; see ``Sample.predicting``."""

    def fault(self, fault: "Fault") -> None:
        """What is 0 or non-finite; what is not ``measured`` reaches no other method."""

    def tables(self) -> Tables:
        """The tables, after the pass."""
        raise NotImplementedError


@dataclass(frozen=True)
class Quantity:
    """A curve and a number of a table, by which models and runs are compared.

    Attributes:
        name: also the name of the figure.
        title, x, y, caption: the words of the figure.
        table: the table that it comes from.
        curve: the table as columns x, y and, for several lines, line.
        number: what the number is called.
        value: the number of one line of the curve.
        unit: written after the number.
        ratio: whether values are compared by their ratio, not their difference.
        fact: what the number is called among the key figures of an audit; empty to leave it out.
        states: whether the table has a row for every state between layers, and so one more than there are layers.
    """

    name: str
    title: str
    x: str
    y: str
    caption: str
    table: str
    curve: Callable[[pd.DataFrame], pd.DataFrame]
    number: str
    value: Callable[[pd.DataFrame], float]
    unit: str = ""
    ratio: bool = True
    fact: str = ""
    states: bool = False


@dataclass(frozen=True)
class Measure(ABC):
    """One measure; a subclass is a frozen dataclass whose fields are its settings.

    A measure that observes one clean forward pass of the sample implements ``observer``: measures that are taken together share
    the pass. Any other measure implements ``measure``.

    Attributes:
        name: its name in settings; also the name of its section.
        title: the heading of its section.
        needs: the capabilities that a model must offer: ``stream``, ``sublayers``, ``attention``, ``matrices``,
            ``vocabulary``, ``predictions``.
        asks: what of the subject its tables depend on besides the model: ``sample``, ``sentence``, ``seed``.
        passes: its cost in forward passes, for people.
        order: its place in an audit; None for a measure that audits leave out.
        large: tables for pictures, which ``--json`` leaves out.
        overview: how many of its columns, from the first, the table by layer of an audit shows.
        quantities: the curves and numbers that comparisons, sweeps and reports share.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset({"stream"})
    asks: ClassVar[tuple[str, ...]] = ("sample",)
    passes: ClassVar[str] = "1, shared"
    order: ClassVar[int | None] = None
    large: ClassVar[frozenset[str]] = frozenset()
    overview: ClassVar[int] = 1
    quantities: ClassVar[tuple[Quantity, ...]] = ()

    def observer(self, subject: Subject) -> PassObserver | None:
        """What observes a clean forward pass of the sample; None if the measure runs the model by itself."""
        return None

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """The tables; ``advance`` takes how many layers are done."""
        observer = self.observer(subject)
        if observer is None:
            raise NotImplementedError(f"the measure {self.name} implements neither observer nor measure")
        (reasons,) = observe_pass(subject, [observer], advance)
        return {**observer.tables(), **self._skipped(reasons)}

    @abstractmethod
    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """What the tables come to, from the tables and plain facts (``Subject.about``) alone."""

    @abstractmethod
    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Text and figures; None where the tables have nothing to show."""

    def page(
        self, text: Sequence[str], figures: Mapping[str, Figure | None], tables: Sequence[PageTable] = ()
    ) -> Section | None:
        """Its section of text, tables and the figures that there are; None without any."""
        drawn = {name: figure for name, figure in figures.items() if figure is not None}
        return Section(self.title, tuple(text), tuple(tables), drawn, name=self.name) if drawn or tables else None

    def columns(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, dict[int, str]]:
        """Columns of the table by layer that a terminal shows, the most important first: heading → layer → cell."""
        return {}

    def totals(self, tables: Mapping[str, pd.DataFrame]) -> dict[str, float]:
        """Plain numbers of the whole model by name, for the table of a sweep."""
        return {}

    def missing(self, subject: Subject) -> str:
        """Why the subject cannot be measured, such as ``needs attention: no layer has softmax attention``; empty if it can."""
        from normscope.models import NOTHING

        lacking = [f"needs {name}: {why}" for name, why in subject.lacking.items() if name in self.needs]
        if lacking:
            return lacking[0]
        if "sentence" in self.asks and subject.sentence is None:
            return "needs a sentence: the model reads no text"
        if "predictions" in self.needs and not bool((subject.sample.predicting.targets != NOTHING).any()):
            return "needs predictions: the sample has no targets"
        return ""

    def _skipped(self, reasons: Mapping[int, str]) -> Tables:
        """The table ``skipped`` of layers that an observer could not measure."""
        rows = [{"measure": self.name, "layer": layer, "reason": reason} for layer, reason in reasons.items()]
        return {"skipped": pd.DataFrame(rows)} if rows else {}

    @property
    def settings(self) -> dict[str, Any]:
        """The values of its fields."""
        return asdict(self)


def observe_pass(
    subject: Subject, observers: Sequence[PassObserver], advance: Advance = lambda done: None
) -> list[dict[int, str]]:
    """One clean forward pass of the sample; ``advance`` takes how many layers are done.

    Observers receive what can be measured: the rest of a degenerate layer is reported by ``PassObserver.fault``.

    Returns:
        For each observer the layers whose attention it could not measure, with the reason.

    Raises:
        InputError: if no layer can be measured.
    """
    from normscope.measures.faults import Gate
    from normscope.models import Observer

    names = ("attention", "sublayer", "state", "fault", "logits")
    on_attention, on_sublayer, on_state, on_fault, on_logits = (_overriding(observers, name) for name in names)

    def report(fault: "Fault") -> None:
        for observer in on_fault:
            observer.fault(fault)

    gate = Gate(subject, report)

    reasons: dict[int, dict[int, str]] = {id(observer): {} for observer in observers}

    def attention(step: "AttentionStep") -> None:
        shared = LayerAttention(step, subject.counted_in(step.q.transpose(1, 2)))
        for observer in on_attention if gate.attention(shared) else ():
            try:
                observer.attention(shared)
            except InputError as error:  # attention of a kind that this measure cannot read
                reasons[id(observer)][step.layer] = str(error)

    def sublayer(step: "SublayerStep") -> None:
        for observer in on_sublayer if gate.sublayer(step) else ():
            observer.sublayer(step)

    def state(layer: int, x: "Tensor") -> None:
        for observer in on_state if gate.state(layer, x) else ():
            observer.state(layer, x)
        advance(layer)

    observed = Observer(attention if on_attention or on_fault else None, sublayer if on_sublayer or on_fault else None, state)
    logits = subject.model.forward(subject.sample, observed)
    gate.close()
    for observer in on_logits if subject.model.predicts else ():
        observer.logits(logits)
    return [reasons[id(observer)] for observer in observers]


def _overriding(observers: Sequence[PassObserver], method: str) -> list[PassObserver]:
    return [observer for observer in observers if getattr(type(observer), method) is not getattr(PassObserver, method)]


def measured(
    subject: Subject, measures: Sequence[Measure], progress: Stages = lambda stage, done, total: None
) -> Iterator[tuple[Measure, Tables]]:
    """Every measure with its tables, as they are complete: one forward pass for all that observe one, then the others.

    ``progress`` takes a stage, how many layers are done, and how many there are.
    """
    layers = subject.model.layers
    observers = [(measure, measure.observer(subject)) for measure in measures]
    watching = [(measure, observer) for measure, observer in observers if observer is not None]
    reasons: list[dict[int, str]] = []
    if watching:
        progress(PASS, 0, layers)
        reasons = observe_pass(subject, [observer for _, observer in watching], _of_layers(progress, PASS, layers))
    for (measure, observer), missed in zip(watching, reasons, strict=True):
        yield measure, {**observer.tables(), **measure._skipped(missed)}
    for measure in (measure for measure, observer in observers if observer is None):
        progress(measure.title, 0, layers)
        yield measure, measure.measure(subject, _of_layers(progress, measure.title, layers))


def _of_layers(progress: Stages, stage: str, layers: int) -> Advance:
    return lambda done: progress(stage, done, layers)


def measure_all(
    subject: Subject, measures: Sequence[Measure], progress: Stages = lambda stage, done, total: None
) -> dict[str, Tables]:
    """The tables of every measure by its name, in the given order; see ``measured``."""
    tables = {measure.name: found for measure, found in measured(subject, measures, progress)}
    return {measure.name: tables[measure.name] for measure in measures}


def joined(tables: Iterable[Tables]) -> Tables:
    """The tables of several measures; those of one name are joined by the columns that they share, such as the layer."""
    merged: Tables = {}
    for name, table in (item for several in tables for item in several.items()):
        if name in merged:
            shared = [column for column in merged[name] if column in table]
            table = merged[name].merge(table, on=shared, how="outer", sort=False)
        merged[name] = table
    return merged


def quantities_of(measures: Iterable[type[Measure]]) -> tuple[Quantity, ...]:
    """The quantities of measures, in order."""
    return tuple(quantity for measure in measures for quantity in measure.quantities)
