"""A module with a list of residual blocks, of the ``transformers`` library or a user's, behind a ``Model``."""

from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models.attention_interface import observable
from normscope.models.checksum import checksum
from normscope.models.describe import layers_named, scheme_text
from normscope.models.foreign import library_errors
from normscope.models.head_reader import HeadReader
from normscope.models.hooks import Running, suspended
from normscope.models.inputs import TOKEN_INPUT, call, is_encoder_decoder, main_input, precision_of, results, tokens_known
from normscope.models.model import BlockNorm, HeadProjections, Model
from normscope.models.module_hooks import AttentionHooks, SublayerHooks
from normscope.models.norm_modules import known_norm, norm_of, width_of
from normscope.models.observe import NOTHING, AttentionStep, Observer, Rotation, Sample
from normscope.models.offload import tensors_of, weight_of
from normscope.models.pictures import features_of, position_names
from normscope.models.placement import Placement
from normscope.models.precision import HALF, all_in_float32, in_float32, wide
from normscope.models.probe import Probe, typical_weights
from normscope.models.recognise import common_scheme, scheme_of
from normscope.models.wrapped import gathered, gathered_at_once
from normscope.schemes import NORM_TITLES, Scheme

_MASKED_SHARE = 0.15
_DECODED = 16  # tokens that the decoder reads of an encoder-decoder whose encoder reads none
_FEATURES = {"image": "pictures", "sound": "sound or a spectrogram"}
_SUBLAYERS = {
    "resid_mid": "attention",
    "attn_out": "attention",
    "cross_out": "cross",
    "mixer_out": "mixer",
    "mlp_out": "feedforward",
}  # what is captured of which sublayer
_SPOKEN = {
    "attention": "attention",
    "cross": "cross-attention",
    "mixer": "the mixer",
    "feedforward": "feed-forward layer",
    "further": "a further sublayer",
}


class ModuleModel(Model):
    """One residual stream of a module: a model of the ``transformers`` library, or any module with a list of blocks."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any = None,
        *,
        stream: str | None = None,
        blocks: str | None = None,
        example: "Tensor | Sample | None" = None,
        processor: Any = None,
    ) -> None:
        self.name, self.model, self.tokenizer, self.processor = name, model, tokenizer, processor
        with ExitStack() as stack:
            stack.enter_context(observable(model))
            probe = self._probed_as(False, stream, blocks, example)
            if probe.degenerate:
                stack.enter_context(typical_weights(model))
                probe = self._probed_as(True, stream, blocks, example)
            self._take_structure(probe)

    def _probed_as(self, last: bool, *view: Any) -> Probe:
        """The structure, in float32; modules that use the weights of others need the whole model in that precision.

        Unless it is the ``last`` attempt, slots are not located where weights hide them.
        """

        def located() -> Probe:
            probe = Probe(self.model, *view)
            if last or not probe.degenerate:
                probe.locate()
            return probe

        try:
            with in_float32(self.model):
                return located()
        except RuntimeError:
            if self.dtype not in HALF:
                raise
            with all_in_float32(self.model):
                return located()

    def _take_structure(self, probe: Probe) -> None:
        """Layers, norms, scales and shape, as a forward pass of a small input shows them."""
        self.stream, self.streams = probe.stream.name, tuple(stream.name for stream in probe.streams)
        self.attentions, self.crossings, self.placements = probe.attentions, probe.crossings, probe.placements
        self._sites = [block.site for block in probe.stream.blocks]
        self.layers, self.dim = len(self._sites), probe.dim
        attended = [each.attention for each in probe.attended if each is not None]
        widest = max(attended, key=lambda call: call.q.shape[1], default=None)
        self.heads, self.kv_heads, self.head_dim = (
            (0, 0, 0) if widest is None else (widest.q.shape[1], widest.kv_heads, widest.q.shape[-1])
        )
        self._head_dims = [0 if each is None else each.attention.q.shape[-1] for each in probe.attended]
        self._layer_heads = [0 if each is None else each.attention.q.shape[1] for each in probe.attended]
        self.causal, self._outside, self.traced = probe.causal, probe.outside, probe.traced
        self._sample, self._reads_tokens = probe.sample, probe.reads_tokens
        self._followed = probe.record.unclear
        self._positions = probe.stream.blocks[0].input.shape[1]
        if not self._reads_tokens:
            given, self.tokenizer = self.tokenizer, None
            self.processor = given if hasattr(given, "preprocess") else self.processor
        self._tested: dict[tuple[Any, ...], str] = {}
        self._reader = HeadReader(self.model, {place.module for place in self.attentions if place is not None}, self._shortest)
        positioned = {each.within.module for each in probe.attended if each is not None and each.within.positioned}
        self.positioned = {module for module in positioned if self._reader.takes_positions(module)}
        self._embedding = self._find_embedding(probe)
        rows = (tokens_known(self.model) or 0) if self._reads_tokens else 0  # which may be padded to a round number
        self.vocabulary = rows if self.tokenizer is None else min(rows, len(self.tokenizer))
        states = probe.stream.blocks[-1].output
        given = tuple(probe.output.shape)
        wide_enough = len(given) == 3 and given[:2] == states.shape[:2] and given[2] >= self.vocabulary
        self._predicts = bool(rows) and wide_enough and (given[2] != self.dim or self._has_output_layer())
        context = getattr(_text_config(self.model), "max_position_embeddings", None)
        self.context = context if context is not None and context > 0 else None
        if self.positions is not None:
            self.context = len(self.positions)
        self._embedding_factor = probe.embedding_factor(self._embedding)
        rotary = probe.record.rotary or bool(self.positioned)
        self.position_kind = "rotary" if rotary else "unknown" if self.positions is None else "learned"
        self.reconstruction = tuple(None if placement.unclear else placement.error for placement in self.placements)
        following = [*self.placements[1:], self.placements[-1]]  # a final norm follows the last
        pairs = zip(self.placements, following, strict=True)
        schemes = tuple(scheme_of(place, self._norm_kind(place), after.entry is not None) for place, after in pairs)
        shared = common_scheme(schemes)
        stages = () if shared is None or shared in schemes else (shared.at(layer, self.layers) for layer in range(self.layers))
        self.schemes = tuple(stages) or schemes
        self.scheme, self.scheme_note = self._with_remarks(shared)

    @property
    def blocks(self) -> list[nn.Module]:
        """The module of every layer; one module that runs many times is as many layers."""
        return [site.module for site in self._sites]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with softmax attention."""
        return tuple(layer for layer, place in enumerate(self.attentions) if place is not None)

    @property
    def offers(self) -> frozenset[str]:
        """What can be measured; see ``Model.offers``."""
        matrices = bool(self.attention_layers) and not any(map(self._unclear_matrices, self.attention_layers))
        offered = {
            "stream": True,
            "sublayers": not any(placement.unclear for placement in self.placements),
            "attention": bool(self.attention_layers),
            "matrices": matrices,
            "vocabulary": self._embedding is not None,
            "predictions": self.predicts,
        }
        return frozenset(name for name, has in offered.items() if has)

    @property
    def reasons(self) -> dict[str, str]:
        """What modules do that is neither softmax attention nor a product of matrices."""
        matrices = map(self._unclear_matrices, self.attention_layers)
        first = {"attention": next(iter(self._followed.values()), ""), "matrices": next(filter(None, matrices), "")}
        return {name: reason.removeprefix("unsupported architecture: ") for name, reason in first.items() if reason}

    def _find_embedding(self, probe: Probe) -> nn.Module | None:
        """The table of token embeddings, whose rows are as wide as the stream; None if there is none."""
        if not self._reads_tokens:
            return None
        tables = [call.module for call in probe.record.calls if isinstance(call.module, nn.Embedding)]
        with suppress(AttributeError, NotImplementedError):
            tables.insert(0, self.model.get_input_embeddings())
        count = tokens_known(self.model)
        return next((table for table in tables if _is_table(table, count, self.dim)), None)

    def _has_output_layer(self) -> bool:
        try:
            return self.model.get_output_embeddings() is not None
        except (AttributeError, NotImplementedError):
            return False

    @property
    def checksum(self) -> str:
        """The same for the same weights, configuration and words."""
        words = "" if self.tokenizer is None else str(sorted(self.tokenizer.get_vocab().items()))
        config = {**self.model.config.to_dict(), "_name_or_path": ""} if hasattr(self.model, "config") else type(self.model)
        return checksum(f"{config} {words}", tensors_of(self.model))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    def _run(self, sample: Sample, observer: Observer) -> Tensor:
        """The forward pass of the module, with hooks for the observer."""
        running = Running(self._sites, len(sample.tokens))
        running.observe(observer.state, observer.left)
        with ExitStack() as stack:
            if observer.sublayer is not None:
                SublayerHooks(self, running, observer.sublayer).install(stack)
            if observer.attention is not None or observer.cross is not None:
                AttentionHooks(self, running, observer.attention, observer.cross).install(stack)
            running.install(stack)
            stack.enter_context(observable(self.model))
            return results(call(self.model, self._complete(sample), self._decoded(sample)))

    def _complete(self, sample: Sample) -> Sample:
        """The sample with what else the model needs: where streams read tokens and pixels, a small input for the other one."""
        probed, rows, (features, both) = self._sample, len(sample.tokens), (sample.features, self._reads_both)
        if both and self._reads_tokens and features is None and probed.features is not None:
            features = probed.features[:1].expand(rows, *probed.features.shape[1:])
        if both and not self._reads_tokens:
            sample = replace(Sample.of(probed.tokens[:1].expand(rows, -1)), features=features)
        return sample if features is None else replace(sample, features=features.to(self.device, precision_of(self.model)))

    @property
    def _reads_both(self) -> bool:
        """Whether the model reads tokens and features, in two streams of which none reads the other."""
        return self._sample.features is not None and main_input(self.model) == TOKEN_INPUT

    @property
    def modality(self) -> str:
        """What the stream reads: ``text``, ``image`` or ``sound``."""
        if self._reads_tokens:
            return "text"
        return "image" if len(self.feature_shape) > 2 or "pixel" in (main_input(self.model) or "") else "sound"

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """The shape of what the model reads besides tokens, for one row; empty if it reads tokens alone."""
        return () if self._sample.features is None else tuple(self._sample.features.shape[1:])

    def batch(self, x: Any) -> Sample:
        """A text or token ids, pictures or other features that the model reads, or a sample, as a sample on its device."""
        if isinstance(x, Sample) or self._reads_tokens:
            return super().batch(x)
        features = features_of(x, self.feature_shape, self.processor).to(self.device)
        if self._is_decoder:
            known = max(tokens_known(self.model) or 2, 2)
            tokens = 1 + torch.arange(_DECODED, device=self.device) % (known - 1)
        else:
            tokens = torch.arange(self._count_positions(features), device=self.device)
        return replace(Sample.of(tokens.expand(len(features), -1)), features=features)

    @property
    def _is_decoder(self) -> bool:
        """Whether the stream is that of the decoder of an encoder-decoder."""
        return is_encoder_decoder(self.model) and self.stream == self.streams[-1]

    def viewed(self, sample: Sample) -> Sample:
        """What the stream that is viewed reads of a sample."""
        return sample.decoded if self._is_decoder and sample.decoded is not None else sample

    def _count_positions(self, features: Tensor) -> int:
        """How many positions the stream has before its first layer."""
        if tuple(features.shape[1:]) == self.feature_shape:
            return self._positions
        counts: list[int] = []
        start = replace(Sample.of(torch.zeros(1, 1, dtype=torch.long, device=self.device)), features=features[:1])
        refused = f"'{self.name}' cannot read features of the shape {list(features.shape[1:])}: "
        with library_errors(refused):
            self.forward(start, Observer(state=lambda layer, x: None if layer else counts.append(x.shape[1])))
        return counts[0]

    def _decoded(self, sample: Sample) -> Tensor | None:
        """What the decoder of an encoder-decoder reads; one token while its encoder is viewed, if that reads no tokens."""
        if sample.decoded is not None:
            return sample.decoded.tokens
        if sample.features is None or self.stream == self.streams[-1]:
            return None
        return torch.zeros(len(sample.tokens), 1, dtype=torch.long, device=sample.tokens.device)

    def step(self, layer: int, sublayer: str) -> Tensor | None:
        """The branch scale that fitted the states when the model was opened."""
        branch = self.placements[layer].branches.get(sublayer)
        return None if branch is None else branch.scales.step

    def carry(self, layer: int, sublayer: str) -> Tensor | None:
        """The residual scale that fitted the states when the model was opened."""
        branch = self.placements[layer].branches.get(sublayer)
        return None if branch is None else branch.scales.carry

    def input_scale(self, layer: int, sublayer: str) -> float:
        """The factor of a sublayer's input, after its norm, that was seen when the model was opened."""
        branch = self.placements[layer].branches.get(sublayer)
        return 1.0 if branch is None else branch.factor

    def sublayers(self, layer: int) -> tuple[str, ...]:
        """The names of a layer's sublayers, as they run."""
        return tuple(self.placements[layer].branches)

    def changes_mixed(self, layer: int) -> str:
        """A norm, a gate or something else before W_O."""
        placement = self.placements[layer]
        branch = placement.branches.get("attention")
        parts = ["a norm"] * (branch is not None and "inner" in branch.norms) + ["a gate"] * (placement.gate != "none")
        return f"{' and '.join(parts) or 'something'} changes its mixed values before W_O" if placement.changed else ""

    def unclear(self, layer: int) -> str:
        """Why the sublayers of a layer are not identified."""
        return self.placements[layer].unclear

    def _missing(self, name: str, layer: int) -> str:
        """Why a layer has no value of this name."""
        placement, sublayer = self.placements[layer], _SUBLAYERS.get(name)
        if sublayer is None:
            places = self.crossings if name.startswith("cross") else self.attentions
            kind = "attention to another stream" if name.startswith("cross") else "softmax attention"
            return f"it has no {kind}" if not name.startswith("resid") and places[layer] is None else ""
        if placement.unclear:
            return placement.unclear
        if sublayer not in placement.branches:
            return f"it has no {_SPOKEN[sublayer].removeprefix('the ')}"
        if name == "resid_mid" and placement.shares(sublayer):
            return "attention and feed-forward layer are parallel, with no state between them"
        if name == "resid_mid" and placement.branches[sublayer].reader is None:
            return "no module reads the states between attention and feed-forward layer"
        return ""

    def projections(self, layer: int) -> HeadProjections:
        """Weights and biases of a layer's heads."""
        unclear = self._unclear_matrices(layer)
        if unclear:
            raise InputError(unclear)
        return self._weights(layer)

    def _weights(self, layer: int) -> HeadProjections:
        norms = list(self.placements[layer].head_norms.values())
        return self._reader.projections(self.attention_module(layer), self.output_projection(layer), norms)

    def _unclear_matrices(self, layer: int) -> str:
        """Why a layer's q, k and v do not follow from the input of its attention by matrices; empty if they do.

        One layer is tested for all that have the same kind of module and the same heads.
        """
        if self.attentions[layer] is None:
            return f"layer {layer} of '{self.name}' has no softmax attention"
        module = self.attention_module(layer)
        kind = type(module), self._layer_heads[layer], self._head_dims[layer], module in self.positioned
        if kind not in self._tested:
            self._tested[kind] = ""
            try:
                with in_float32(self.model):
                    step = self._step(layer, self._sample)
                self._weights(layer)
                self._reader.require(module, step)
            except InputError as error:
                self._tested[kind] = str(error)
        return self._tested[kind]

    def _shortest(self, rows: int) -> None:
        """Run the model on equal rows of the shortest input."""
        sample = self._sample
        tokens = sample.tokens[:1, : None if sample.features is not None else 1].expand(rows, -1)
        features = None if sample.features is None else sample.features[:1].expand(rows, *sample.features.shape[1:])
        shortest = replace(Sample.of(tokens), features=features)
        with library_errors("unsupported architecture: the model does not run on one token: "):
            call(self.model, shortest, self._decoded(shortest))

    def attention_module(self, layer: int) -> nn.Module:
        """The module of a layer's attention."""
        place = self.attentions[layer]
        if place is None:
            raise InputError(f"layer {layer} of '{self.name}' has no softmax attention")
        return place.module

    def output_projection(self, layer: int) -> nn.Module:
        """The module of W_O."""
        out = self.placements[layer].output_projection
        if out is None:
            raise InputError(f"unsupported architecture: the mixed values of layer {layer} enter no matrix product")
        return out

    def attentions_head(self, layer: int) -> int:
        """The width of a layer's heads, which may differ from layer to layer."""
        return self._head_dims[layer]

    @torch.no_grad()
    def heads_of(
        self, layer: int, x: Float[Tensor, "rows tokens dim"], rotation: Rotation | None = None, letters: str = "qkv"
    ) -> tuple[Tensor, ...]:
        """Q, k and v of the input of a layer's attention, as its module computes them."""
        if self._unclear_matrices(layer):
            raise InputError(self._unclear_matrices(layer))
        made = dict(zip("qkv", self._reader.heads(self.attention_module(layer), x, rotation), strict=True))
        return tuple(made[letter] for letter in letters)

    def rotation(self, layer: int, positions: Int[Tensor, " positions"]) -> Rotation | None:
        """The rotation that a layer applies, from a forward pass up to the last position; None if it has none."""
        if self.position_kind != "rotary":
            return None
        tokens = torch.ones(1, int(positions.max()) + 1, dtype=torch.long, device=self.device)
        step = self._step(layer, Sample.of(tokens))
        if step.rotation is None:
            return None
        rotated, plain = (self.heads_of(layer, step.input, rotation, "q")[0] for rotation in (step.rotation, None))
        applies = tokens.shape[1] == 1 or not torch.equal(rotated, plain)  # some layers do not apply what they receive
        return tuple(part[:, positions] for part in step.rotation) if applies else None

    def _step(self, layer: int, sample: Sample) -> AttentionStep:
        """The attention of a layer in a forward pass, which ends there."""

        def keep(step: AttentionStep) -> None:
            if step.layer == layer:
                raise _ReachedError(step)

        try:
            with torch.no_grad(), suspended():
                self._run(sample, Observer(attention=keep))
        except _ReachedError as reached:
            return reached.step
        raise InputError(f"unsupported architecture: the attention of layer {layer} did not run")

    @property
    def normalised_heads(self) -> str:
        """The letters of q, k and v that every layer normalises head by head."""

        def by_head(layer: int, letter: str) -> bool:
            norm = self.placements[layer].head_norms.get(letter)
            return norm is not None and width_of(norm) in (None, self.attentions_head(layer))

        return "".join(x for x in "qkv" if self.attention_layers and all(by_head(layer, x) for layer in self.attention_layers))

    @property
    def norms(self) -> list[BlockNorm]:
        """All norms, the final one last."""
        with gathered_at_once(parameter for module in self.norm_modules for parameter in module.parameters()):
            return self._norms()

    def _norms(self) -> list[BlockNorm]:
        norms, device = [], self.device
        for layer, placement in enumerate(self.placements):
            for (sublayer, slot), module in placement.norms.items():
                norms.append(norm_of(module, width_of(module) or self.dim, device, slot, layer, sublayer))
            for letter, module in placement.head_norms.items():
                width = width_of(module) or self.attentions_head(layer)
                if width:  # 0 for heads of attention that is none of the stream's positions
                    norms.append(norm_of(module, width, device, letter, layer, "attention"))
        outside = [known_norm(module, self.dim, device, slot) for slot, module in self._outside.items()]
        return norms + [norm for norm in outside if norm is not None]

    @property
    def norm_modules(self) -> list[nn.Module]:
        """The modules of all norms that were recognised."""
        inside = (module for place in self.placements for norms in (place.norms, place.head_norms) for module in norms.values())
        return [*inside, *self._outside.values()]

    @property
    @torch.no_grad()
    def embeddings(self) -> Float[Tensor, "vocabulary dim"]:
        """The table of token embeddings, scaled as the model scales it, plus the type of the first segment if there is one."""
        module: Any = self._embedding
        if module is None:
            raise InputError(f"'{self.name}' has no table of token embeddings as wide as its stream")
        with gathered(self.model, module):
            rows: Tensor = module(torch.arange(module.weight.shape[0], device=self.device)).detach()
        types = [part for name, part in self.model.named_modules() if name.endswith("token_type_embeddings")]
        first = weight_of(types[0]) if types else None
        return self._embedding_factor * wide(rows) + (0.0 if first is None else wide(first[0]))

    @property
    def positions(self) -> Float[Tensor, "positions dim"] | None:
        """The rows of a learned table of positions, from that of position 0 on."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and any(part in name.rsplit(".", 1)[-1] for part in ("position", "wpe")):
                padding = module.padding_idx  # where there is one, positions begin after it
                first = getattr(module, "offset", 0 if padding is None else padding + 1)
                weight = weight_of(module)
                return None if weight is None else wide(weight[int(first) :])
        return None

    @property
    def unembedding(self) -> Float[Tensor, "vocabulary dim"] | None:
        """The rows of the output layer."""
        if not self._predicts or not self._has_output_layer():
            return None
        weight = weight_of(self.model.get_output_embeddings())
        return None if weight is None or weight.shape[-1] != self.dim else wide(weight)

    @property
    def predicts(self) -> bool:
        """Whether the model gives logits of its tokens."""
        return self._predicts

    def sample(self, text: Any, size: int | None, seed: int) -> Sample:
        """The first ``size`` tokens of a text or of token ids; for an encoder some of them are masked, to be predicted.

        For a model of images or sound: the first ``size`` pictures or rows of features.
        """
        if not self._reads_tokens:
            if text is None:
                raise InputError(f"'{self.name}' reads {_FEATURES[self.modality]}: give some")
            sample = self.batch(text)
            features = None if sample.features is None else sample.features[:size]
            return replace(Sample.of(sample.tokens[:size]), features=features)
        tokens = self._first_tokens(text or "" if isinstance(text, str | None) else text, size)
        if self.causal:
            return Sample.continued(tokens)
        masks = self.predicts and getattr(self.tokenizer, "mask_token_id", None) is not None
        return self._masked(Sample.of(tokens), seed) if masks else Sample.of(tokens)

    def _masked(self, sample: Sample, seed: int) -> Sample:
        """A sample some of whose tokens are masked, to be predicted."""
        tokens, tokenizer = sample.tokens, self.tokenizer
        drawn = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
        special = [tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) for row in tokens.tolist()]
        masked = (drawn < _MASKED_SHARE) & ~torch.tensor(special, dtype=torch.bool, device=self.device)
        return replace(
            sample,
            tokens=torch.where(masked, tokenizer.mask_token_id, tokens),
            targets=torch.where(masked, tokens, NOTHING),
        )

    def words(self, tokens: Int[Tensor, " tokens"]) -> list[str]:
        """Tokens as texts; their numbers without a tokenizer; patches and frames by their place."""
        if not self._reads_tokens and not self._is_decoder:
            return position_names(tokens.tolist(), self._positions, self.feature_shape)
        return super().words(tokens)

    def _norm_kind(self, placement: Placement) -> str:
        """The kind of a layer's norms."""
        module = next(iter([*placement.norms.values(), *placement.head_norms.values()]), None)
        return "rms" if module is None else norm_of(module, width_of(module) or self.dim, self.device).kind

    def _with_remarks(self, scheme: Scheme | None) -> tuple[Scheme | None, str]:
        """The scheme of all layers with remarks on it, or why there is none."""
        unclear = next((placement.unclear for placement in self.placements if placement.unclear), "")
        if scheme is None:
            scales = "a residual scale with a number for each channel has no slot" if None in self.schemes else ""
            return None, unclear or scales or f"the layers differ: {scheme_text(self.schemes)}"
        first, notes = self.placements[0], list[str]()
        for note in dict.fromkeys(placement.note for placement in self.placements if placement.note):
            layers = [layer for layer, placement in enumerate(self.placements) if placement.note == note]
            notes.append(note if len(layers) == self.layers else f"{note} in {layers_named(layers)}")
        kinds = {norm.kind for norm in self.norms if norm.layer is not None}
        titles = [NORM_TITLES[kind] for kind in NORM_TITLES if kind in kinds]
        notes += [f"some norms are {', some '.join(titles)}"] if len(titles) > 1 else []
        if self.changes_mixed(0).startswith("something"):
            notes.append("something changes the mixed values of attention before W_O that is neither a norm nor a sigmoid gate")
        if any(placement.entry is not None for placement in self.placements[1:]):
            notes.append("blocks normalise their input and continue with that, a stream norm of the block before")
        observed = any("temperature" in placement.scores or placement.note for placement in self.placements)
        if getattr(_text_config(self.model), "attn_temperature_tuning", False) and not observed:
            notes.append("its configuration declares a temperature by position, which is 1 at the positions that were observed")
        if first.parallel:
            names = [_SPOKEN[name] for name in first.branches if first.shares(name)]
            notes.append(f"{' and '.join(names)} are parallel: both read the same states")
        if any(width_of(module) not in (None, self.attentions_head(0)) for module in first.head_norms.values()):
            notes.append("q and k are normalised over all heads together")
        return scheme, "; ".join(notes)


def _text_config(model: Any) -> Any:
    """The configuration of the part that reads text; None for a module that has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def _is_table(table: Any, count: int | None, dim: int) -> bool:
    weight = getattr(table, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[1] == dim and len(weight) >= (count or 2)


class _ReachedError(Exception):
    """Ends a forward pass at the layer of interest."""

    def __init__(self, step: AttentionStep) -> None:
        super().__init__()
        self.step = step
