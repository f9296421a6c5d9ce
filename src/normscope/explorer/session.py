"""One open model: all that the model atlas computes of it, with a function that may stop the work between layers."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normscope.core.norms import length
from normscope.core.seeds import stream_seed
from normscope.core.threads import one_thread
from normscope.errors import InputError
from normscope.explorer.atlas_tables import curves, finite, head_grid, head_grids, journey_data
from normscope.explorer.reading import Keeper, LayerWeights, Reading
from normscope.measures import all_measures
from normscope.measures.base import Measure, PassObserver, Subject, joined, observe_pass
from normscope.measures.collapse import Collapse
from normscope.measures.collapse_probability import collapse_margin, collapse_probability
from normscope.measures.journey import trajectory_of
from normscope.measures.maps import places
from normscope.measures.noise import Disturbance, norm_noise
from normscope.measures.probes import KeyTable, key_table, moved_states, nearest_keys, reader, updates_of
from normscope.measures.readout import identity, most_probable, output_bias
from normscope.measures.sample import chosen_sample, reads_text
from normscope.measures.search import top_scores
from normscope.measures.vocabulary import Word, probe_words, texts_of
from normscope.models import HeadProjections, Model, Observer, Sample
from normscope.models.describe import scheme_text, why_missing
from normscope.results.conventions import NEAR_ONE_HOT, NOISE

MOST_TOKENS = 128
MOST_NOISE = 0.5  # RMS; uniform noise from 1/√3 on makes norms negative
PARTS = "xqkm"  # of what norm noise is put on: the input of attention, queries, keys, value outputs
_READINGS = 3  # prompts whose pass is kept
_LAYERS = 4  # whose matrices of heads are kept
_TEXTS = 1 << 14  # tokens whose text is kept
_MOST_TABLE = 1 << 30  # bytes of a table of embeddings that is kept
_SMALL = 1 << 28  # parameters of a model for whose short prompts one thread is enough: the page needs a core as well
_NEXT = 10  # tokens of a next-token distribution
_NEAREST = 6  # tokens that a head looks for
_NOUNS = 6  # common nouns that heads are probed with
_AT_ONCE = ("growth", "rotation", "speed", "clustering", "first_token", "spread", "collapse")  # observe one pass
_LATER = ("interference", "spheres", "angles", "rank")  # need the matrices of heads, and seconds
_FEW = "means leave out the first token, so that measures of heads and layers need a prompt of two tokens or more"

Check = Callable[[], None]


def _nothing() -> None:
    """A check that never stops the work."""


class ModelSession:
    """A model and the prompts that it read last; every method that runs the model takes ``check``, called between layers.

    Attributes:
        model: the open model.
        seed: of everything that is drawn.
        most_tokens: the longest prompt.
    """

    def __init__(self, model: Model, seed: int = 0, most_tokens: int = MOST_TOKENS) -> None:
        (self.model, self._linear), self.seed = _fixed(model), seed
        self.most_tokens = min(most_tokens, model.context or most_tokens)
        self._small = model.parameters <= _SMALL
        self._readings: OrderedDict[str, Reading] = OrderedDict()
        self._keys: tuple[int, KeyTable] | None = None  # of the layer whose heads were probed last

    @cached_property
    def lacking(self) -> dict[str, str]:
        """What the model does not offer, with the reasons."""
        return why_missing(self.model)

    @cached_property
    def about(self) -> dict[str, Any]:
        """Facts on the model, as an audit has them; what it reads, and how long a prompt may be."""
        model = self.model
        shape = {name: getattr(model, name) for name in ("layers", "heads", "kv_heads", "dim", "head_dim", "vocabulary")}
        return {
            "model": model.name,
            "description": model.summary,
            "scheme": None if model.scheme is None else model.scheme.name,
            "schemes": scheme_text(model.schemes),
            **shape,
            "lacking": self.lacking,
            "reads_text": self.reads_text,
            "most_tokens": self.most_tokens,
            "parts": "".join(part for part in PARTS if not self._why_no_noise(part)),
        }

    @property
    def reads_text(self) -> bool:
        """Whether a prompt can be typed: a text, or token ids for a model without a tokenizer."""
        return reads_text(self.model)

    # What a prompt shows at once

    def read(self, prompt: str, check: Check = _nothing) -> dict[str, Any]:
        """All heads and layers for a prompt, from one forward pass; see ``audits.audit_data`` for what it holds.

        Measures that need the matrices of heads are those of ``later``.
        """
        reading = self.reading(prompt, check)
        layers = self.model.layers
        missing = {name: reason for name, reason in {**self._missing_parts(), **reading.missing}.items() if reason}
        return {
            "kind": "model",
            "about": self.about,
            "prompt": {"text": prompt, "tokens": reading.tokens, "note": reading.note},
            "heads": head_grids(reading.tables, layers),
            "curves": curves(reading.tables),
            "maps": [],
            "token": None,
            "missing": missing,
        }

    def reading(self, prompt: str, check: Check = _nothing) -> Reading:
        """The pass of a prompt; one that was read a moment ago is not run again."""
        if prompt in self._readings:
            self._readings.move_to_end(prompt)
            return self._readings[prompt]
        sample, note = self.sample(prompt)
        reading = Reading(Subject(self.model, sample, self.seed), note)
        several = bool(reading.subject.counted.any())
        measures = self._measures(reading.subject, _AT_ONCE) if several else []
        if not several:
            reading.missing |= {"heads": f"{_FEW}.", "curves": f"{_FEW}."}
        self._observe(reading, measures, check, keep=True)
        self._readings[prompt] = reading
        while len(self._readings) > _READINGS:
            self._readings.popitem(last=False)
        return reading

    def sample(self, prompt: str) -> tuple[Sample, str]:
        """What the model reads of a prompt, and what to know about it.

        An empty prompt is the token that begins texts; a model without a tokenizer takes token ids; a model that reads no
        text gets the first of the samples that come with normscope.
        """
        model = self.model
        if not self.reads_text:
            what = "examples of its task" if model.modality == "text" else {"image": "pictures"}.get(model.modality, "sound")
            sample = _first_row(chosen_sample(model, None, None, 1, self.seed))
            return sample, f"This model reads {what}, not text: it is shown on one that comes with normscope."
        ids = _numbers(prompt, model.vocabulary) if model.tokenizer is None else model.encode(prompt)
        note = ""
        if not ids:
            first = getattr(model.tokenizer, "bos_token_id", None)
            first = getattr(model.tokenizer, "eos_token_id", None) if first is None else first
            ids, note = [first or 0], "The prompt is empty: the model reads the one token that begins texts."
        if len(ids) > self.most_tokens:
            raise InputError(f"the prompt has {len(ids):,} tokens, and at most {self.most_tokens} are read: shorten it")
        tokens = model.batch(ids).tokens
        return (Sample.continued(tokens) if model.causal and model.predicts else Sample.of(tokens)), note

    def _measures(self, subject: Subject, names: Sequence[str]) -> list[Measure]:
        """Those of some measures that can be taken of a subject."""
        kinds = all_measures()
        chosen = [Collapse(levels=(NOISE,), draws=0) if name == Collapse.name else kinds[name]() for name in names]
        return [measure for measure in chosen if not measure.missing(subject)]

    def _observe(self, reading: Reading, measures: Sequence[Measure], check: Check, keep: bool) -> None:
        """One pass; the tables of the measures, and with ``keep`` states and attention, are stored for later requests."""
        observers: list[PassObserver] = [Keeper(reading)] if keep else []
        for measure in measures:
            observer = measure.observer(reading.subject)
            assert observer is not None
            observers.append(observer)
        with one_thread(self._small):
            observe_pass(reading.subject, observers, lambda layer: check())
        reading.tables = joined([reading.tables, *(observer.tables() for observer in observers)])

    def _missing_parts(self) -> dict[str, str]:
        """What of the view cannot be shown of this model, in words."""
        lacking = self.lacking
        sentences = {
            "heads": ("attention", "No heads to show"),
            "map": ("attention", "No attention maps"),
            "words": ("matrices", "No words of heads"),
            "nearest": ("vocabulary", "No nearest words on the journey"),
            "lens": ("predictions", "No logit lens and no next token"),
            "noise": ("attention", "No noise on norms of attention"),
        }
        parts = {part: f"{text}: {lacking[needed]}." for part, (needed, text) in sentences.items() if needed in lacking}
        if "words" not in parts and "vocabulary" in lacking:
            parts["words"] = f"No words of heads: {lacking['vocabulary']}."
        if self.model.predicts and not self.model.reads_out:
            parts["lens"] = "No logit lens and no next token: logits are computed from the states of the decoder."
        return parts

    # What a selection shows

    def head(
        self, prompt: str, layer: int, head: int, noise: dict[str, Any] | None = None, check: Check = _nothing
    ) -> dict[str, Any]:
        """The attention map of a head, and for every query its top key, largest weight and margin.

        ``norms`` are those of the tokens before the layer over their median. With ``noise``, the map under that noise too.
        """
        reading = self.reading(prompt, check)
        self._check_layer(layer)
        norms = length(reading.states[layer]).squeeze(-1).double() if len(reading.states) > layer else torch.zeros(0)
        shown: dict[str, Any] = {
            "layer": layer,
            "head": head,
            "tokens": reading.tokens,
            "norms": [finite(value) for value in (norms / norms.median()).tolist()] if len(norms) else [],
        }
        found = reading.attention.get(layer)
        if found is None:
            reason = self.lacking.get("attention", "no softmax attention is observed there")
            return {**shown, "missing": f"Layer {layer} has no attention map: {reason}."}
        _check_head(found, layer, head)
        noisy = None if noise is None else self._noisy(reading, noise, check).get(layer)
        return {
            **shown,
            "pattern": _grid(found.weights[head]),
            "noisy": None if noisy is None else _grid(noisy[head]),
            "queries": _queries(found, head, reading.tokens),
        }

    def words(self, prompt: str, layer: int, head: int, position: int, check: Check = _nothing) -> dict[str, Any]:
        """What a head looks for in words: tokens with the largest q·k for a token, and those that its value promotes.

        Of the token at a position of the prompt, and of common nouns.
        """
        reading = self.reading(prompt, check)
        self._check_layer(layer)
        reason = self._missing_parts().get("words") or self._no_attention(layer)
        if reason:
            return {"rows": [], "missing": reason}
        _check_head(reading.attention[layer], layer, head)
        token = int(reading.subject.viewed.tokens[0, self._position(reading, position)])
        tokens = torch.tensor([token, *(word.token for word in self._common)], device=self.model.device)
        names = [*self.model.words(tokens[:1]), *(word.name for word in self._common)]
        keys, values = self._sought(layer, head, tokens, check), self._promoted(layer, head, tokens)
        rows = [
            {"word": name, "keys": sought, "values": values and values[word]}
            for word, (name, sought) in enumerate(zip(names, keys, strict=True))
        ]
        return {"rows": rows, "missing": ""}

    def token(self, prompt: str, position: int, check: Check = _nothing) -> dict[str, Any]:
        """The journey of a token: a row for every hidden state, the scene, and what the model predicts after it."""
        reading = self.reading(prompt, check)
        place = self._position(reading, position)
        same = {x.shape for x in reading.states}
        if len(same) != 1 or len(reading.states) != self.model.layers + 1:
            return {"position": place, "text": reading.tokens[place], "missing": _NO_JOURNEY}
        stream = torch.stack([x[place] for x in reading.states])
        logits = stream.new_zeros(0) if reading.logits is None else reading.logits[place]
        with one_thread(self._small):
            trajectory = trajectory_of(self.model, reading.subject.viewed, place, stream, logits, self._linear)
            check()
            mapped = places(self.model, trajectory, "sphere", self.seed)
        return {
            "position": place,
            "text": reading.tokens[place],
            **journey_data(trajectory.table, mapped),
            "next": [] if reading.logits is None else self._next(reading.logits[place]),
        }

    # Noise on norms

    def noise(self, prompt: str, noise: dict[str, Any], position: int, check: Check = _nothing) -> dict[str, Any]:
        """What relative noise on norms does: heads whose top key changes, circuits that collapse, and the next token.

        Args:
            prompt: the prompt.
            noise: ``level`` (RMS), ``parts`` (letters of x, q, k, m), ``layer`` (None for all), ``draw`` (its number).
            position: the token whose next-token distribution is compared.
            check: called between layers.

        Returns:
            ``moved``: the share of queries by layer and head whose top key changes; ``switched``: that of its near-one-hot
            rows; ``rows``, ``lost`` and ``expected``: near-one-hot rows, those that switch, and how many would by theory
            from the noise on keys of each layer alone; ``next``: before and after, with the distance between the two.
        """
        reading = self.reading(prompt, check)
        disturbance, _ = self._disturbance(noise)
        noisy = self._noisy(reading, noise, check)
        moved, switched, rows, lost, expected = [], [], 0, 0, 0.0
        for layer, weights in noisy.items():
            clean = reading.attention[layer]
            several = clean.raw.isfinite().sum(-1) > 1  # a query that sees one key has no other
            changed = (weights.argmax(-1) != clean.weights.argmax(-1)) & several
            one_hot = (clean.weights.amax(-1) >= NEAR_ONE_HOT) & several
            for head in range(len(weights)):
                moved.append((layer, head, _share(changed[head], several[head])))
                switched.append((layer, head, _share(changed[head], one_hot[head])))
            rows, lost = rows + int(one_hot.sum()), lost + int((changed & one_hot).sum())
            expected += self._expected(clean, one_hot, layer, disturbance)
        after = None if reading.noisy is None else reading.noisy[1].get(-1)
        return {
            "moved": head_grid(self.model.layers, moved),
            "switched": head_grid(self.model.layers, switched),
            "rows": rows,
            "lost": lost,
            "expected": expected if {"k", "x"} & set(disturbance.parts) else None,
            "next": self._compared(reading, after, self._position(reading, position)),
        }

    def _expected(self, clean: LayerWeights, one_hot: Tensor, layer: int, disturbance: Disturbance) -> float:
        """How many near-one-hot rows of a layer noise on its key norms alone makes switch, by theory."""
        unaffected = disturbance.layer not in (None, layer) or "k" in self.model.normalised_heads
        if unaffected or not bool(one_hot.any()) or not {"k", "x"} & set(disturbance.parts) or disturbance.level == 0:
            return 0.0
        softmax = clean.softmax.select(clean.raw.shape, lambda x: x[one_hot])
        return float(collapse_probability(clean.raw[one_hot], [disturbance.level], shift=softmax.shift)[0].double().sum())

    def _noisy(self, reading: Reading, noise: dict[str, Any], check: Check) -> dict[int, Tensor]:
        """The attention weights of every layer under noise; those of the last noise are kept, with the logits as layer −1."""
        disturbance, draw = self._disturbance(noise)
        if reading.noisy is None or reading.noisy[0] != (disturbance, draw):
            weights: dict[int, Tensor] = {}
            generator = torch.Generator(self.model.device).manual_seed(stream_seed(self.seed, "noise", draw))

            def seen(layer: int, found: Tensor) -> None:
                weights[layer] = found[0].clone()

            observer = norm_noise(disturbance, self.model.normalised_heads, generator, self.model, seen)
            with one_thread(self._small):
                logits = self.model.forward(reading.subject.sample, observer, Observer(state=lambda layer, x: check()))
            reading.noisy = (disturbance, draw), {**weights, -1: logits[0].float()}
        return {layer: weights for layer, weights in reading.noisy[1].items() if layer in reading.attention}

    def _disturbance(self, noise: dict[str, Any]) -> tuple[Disturbance, int]:
        level, parts, layer = float(noise.get("level", 0.0)), str(noise.get("parts", "qkm")), noise.get("layer")
        if not 0 <= level <= MOST_NOISE:
            raise InputError(f"level={level:g}: noise is relative, from 0 to {MOST_NOISE:g}, where all norms stay positive")
        if not parts or not set(parts) <= set(PARTS):
            raise InputError(f"parts={parts!r}: noise is put on x (input norms), q, k and m (values)")
        reasons = [reason for part in parts if (reason := self._why_no_noise(part))]
        if reasons:
            raise InputError(reasons[0])
        if layer is not None:
            self._check_layer(int(layer))
        return Disturbance(level, parts, layer=None if layer is None else int(layer)), int(noise.get("draw", 0))

    def _why_no_noise(self, part: str) -> str:
        """Why a part cannot get noise; empty if it can."""
        if "attention" in self.lacking:
            return f"no noise on norms of attention: {self.lacking['attention']}"
        if part == "x" and "matrices" in self.lacking:
            return f"no noise on input norms: {self.lacking['matrices']}"
        return ""

    def _compared(self, reading: Reading, after: Tensor | None, place: int) -> dict[str, Any] | None:
        """The most probable next tokens before and after noise, and half the sum of absolute differences over all tokens."""
        if reading.logits is None or after is None:
            return None
        before, changed = (logits[place, : self.model.vocabulary].softmax(-1) for logits in (reading.logits, after))
        if not bool(changed.isfinite().all()):
            return {"rows": [], "distance": None}
        chosen = torch.cat((before.topk(min(_NEXT, len(before))).indices, changed.topk(min(_NEXT, len(before))).indices))
        ids = list(dict.fromkeys(chosen.tolist()))
        ids = sorted(ids, key=lambda token: -max(float(before[token]), float(changed[token])))[:_NEXT]
        texts = self.model.words(torch.tensor(ids))
        rows = [
            {"token": token, "text": text, "before": float(before[token]), "after": float(changed[token])}
            for token, text in zip(ids, texts, strict=True)
        ]
        return {"rows": rows, "distance": float((before - changed).abs().sum() / 2)}

    # What is measured on request

    def later(self, prompt: str, check: Check = _nothing) -> dict[str, Any]:
        """``read`` with the measures that need the matrices of heads as well: interference, subspaces, ranks."""
        reading = self.reading(prompt, check)
        wanted = self._measures(reading.subject, _LATER)
        if wanted and not reading.missing and not reading.whole:
            self._observe(reading, wanted, check, keep=False)
            reading.whole = True
        return self.read(prompt, check)

    @cached_property
    def _common(self) -> list[Word]:
        """Common nouns that heads are probed with; none in a vocabulary without English nouns."""
        try:
            return probe_words(self.model)[:_NOUNS]
        except InputError:
            return []

    def _sought(self, layer: int, head: int, tokens: Int[Tensor, " words"], check: Check) -> list[list[str]]:
        """The tokens whose keys have the largest q·k with every token in a head."""
        model = self.model
        if 4 * model.vocabulary * model.dim > _MOST_TABLE:
            found = nearest_keys(model, layer, tokens, _NEAREST, progress=lambda share: check()).tokens[head]
        else:
            if self._keys is None or self._keys[0] != layer:
                self._keys = layer, key_table(model, layer, lambda share: check())
            (q,) = model.heads_of(layer, reader(model, layer)(model.embeddings[tokens])[1][None], None, "q")
            found = top_scores(self._keys[1].scores(head, q[0, head]), _NEAREST)[1]
        return self._named(found)

    def _promoted(self, layer: int, head: int, tokens: Int[Tensor, " words"]) -> list[list[str]] | None:
        """The tokens that a head makes most probable when a token attends to itself; None without updates by head."""
        model = self.model
        try:
            moved = moved_states(model, layer, updates_of(model, layer, tokens))[head]
        except InputError:  # a gate or norm between the heads and W_O
            return None
        if model.reads_out:
            return self._named(top_scores(model.read_out(moved)[:, : model.vocabulary], _NEAREST)[1])
        return self._named(most_probable(model, moved, _NEAREST)[1])

    def _named(self, tokens: Int[Tensor, "words count"]) -> list[list[str]]:
        texts = texts_of(self.model, tokens)
        return [[texts[token] for token in row] for row in tokens.tolist()]

    def _next(self, logits: Float[Tensor, " vocabulary"]) -> list[dict[str, Any]]:
        probabilities = logits[: self.model.vocabulary].softmax(-1)
        best, tokens = probabilities.topk(min(_NEXT, len(probabilities)))
        texts = self.model.words(tokens)
        return [
            {"token": token, "text": text, "probability": finite(value)}
            for token, text, value in zip(tokens.tolist(), texts, best.tolist(), strict=True)
        ]

    def _no_attention(self, layer: int) -> str:
        known = layer in self.model.attention_layers
        return "" if known else f"Layer {layer} has no heads to probe: no softmax attention is observed there."

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.model.layers:
            raise InputError(f"layer={layer}: the model has layers 0 to {self.model.layers - 1}")

    def _position(self, reading: Reading, position: int) -> int:
        count = len(reading.tokens)
        if not -count <= position < count:
            raise InputError(f"token={position}: the prompt has tokens 0 to {count - 1}")
        return position % count


_NO_JOURNEY = "The journey of a token needs hidden states of one shape before every layer, finite and not 0; these are not."


def _fixed(model: Model) -> tuple[Model, bool]:
    """The model as one whose weights no longer change: what it otherwise computes at every use is computed once.

    Also whether logits of states are a product, which is tested (``output_bias``), and not a pass through all layers.
    """
    kind, names = type(model), ["norms"]
    names += [] if 4 * model.vocabulary * model.dim > _MOST_TABLE else ["embeddings", "unembedding"]

    def once(name: str) -> Any:
        return cached_property(lambda self: getattr(kind, name).fget(self))

    rows = model.unembedding
    bias = output_bias(model) if rows is not None and len(rows) == model.vocabulary else None

    def read_out(self: Model, states: Float[Tensor, "states dim"]) -> Float[Tensor, "states vocabulary"]:
        rows = self.unembedding
        if bias is None or rows is None:
            return kind.read_out(self, states)
        return (self.final_norm or identity)(states) @ rows.T + bias

    kept, texts = lru_cache(_LAYERS)(model.projections), lru_cache(_TEXTS)(lambda token: model.words(torch.tensor([token]))[0])

    def projections(self: Model, layer: int) -> HeadProjections:
        return kept(layer)

    def words(self: Model, tokens: Int[Tensor, " tokens"]) -> list[str]:
        return [texts(token) for token in tokens.tolist()]

    methods = {"read_out": read_out, "projections": projections, "words": words, **{name: once(name) for name in names}}
    fixed = copy(model)
    fixed.__class__ = type(kind.__name__, (kind,), methods)
    return fixed, bias is not None


def _first_row(sample: Sample) -> Sample:
    """The first row of a sample, without its padding, in both halves of an encoder-decoder."""
    present = int(sample.attention_mask[0].sum()) if sample.features is None else sample.tokens.shape[1]

    def cut(name: str, x: Tensor) -> Tensor:
        return x[:1] if name == "features" else x[:1, :present]

    decoded = None if sample.decoded is None else _first_row(sample.decoded)
    return replace(replace(sample, decoded=None).mapped(cut), decoded=decoded)


def _numbers(prompt: str, vocabulary: int) -> list[int]:
    """Token ids in a prompt for a model without a tokenizer."""
    words = prompt.replace(",", " ").split()
    if not all(word.isdecimal() and int(word) < vocabulary for word in words):
        raise InputError(f"this model has no tokenizer: type token ids from 0 to {vocabulary - 1}, such as 5 12 7")
    return [int(word) for word in words]


def _grid(weights: Float[Tensor, "queries keys"]) -> list[list[float]]:
    """An attention map with four decimals, which is what colours show."""
    return [[round(value, 4) for value in row] for row in weights.tolist()]


def _queries(found: LayerWeights, head: int, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """For every query its top key, the largest weight, and the margin of its row."""
    raw, weights = found.raw[head], found.weights[head]
    softmax = found.softmax.select(found.raw.shape, lambda x: x[head])
    margins = collapse_margin(raw, softmax.shift).tolist()
    largest, keys = (part.tolist() for part in weights.max(-1))
    return [
        {"key": key, "text": tokens[key] if key < len(tokens) else str(key), "weight": finite(weight), "margin": finite(margin)}
        for key, weight, margin in zip(keys, largest, margins, strict=True)
    ]


def _check_head(found: LayerWeights, layer: int, head: int) -> None:
    if not 0 <= head < len(found.weights):
        raise InputError(f"head={head}: layer {layer} has heads 0 to {len(found.weights) - 1}")


def _share(changed: Tensor, of: Tensor) -> float:
    """The share of some rows that changed; NaN without rows."""
    count = int(of.sum())
    return int((changed & of).sum()) / count if count else float("nan")
