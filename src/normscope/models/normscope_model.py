"""Models that normscope trained, behind a ``Model``."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normscope.core import CausalMask, HeadNorm, PaddingMask, Scores
from normscope.core.norms import EPSILON, orthogonal_part
from normscope.errors import InputError
from normscope.machine.memory import require_memory
from normscope.models.blocks import stream_named
from normscope.models.checksum import checksum
from normscope.models.hooks import BlockSite, Running, after, before, given_states
from normscope.models.model import BlockNorm, HeadProjections, Model, TextOrIds, require_tokens
from normscope.models.observe import AttentionStep, Observer, OnAttention, Rotation, Sample, SublayerStep
from normscope.models.offload import tensors_of
from normscope.training.recipe import data_of
from normscope.training.tasks import CHARACTERS, as_text, split_rows
from normscope.transformer import Row, SavedModel
from normscope.transformer.layers import Attention, Norm
from normscope.transformer.model import Sublayer

_ENCODER, _DECODER = "encoder", "decoder"
_CROSS = "cross"
_BEGIN = "["
_EXAMPLES = 256
_ADDITION = "addition"


class NormscopeModel(Model):
    """A decoder that ``normscope train`` saved, or one of the package; or one half of an encoder-decoder.

    Both halves predict: noise in the encoder changes the logits of the decoder.
    """

    scheme_note, predicts = "", True

    def __init__(self, name: str, saved: SavedModel, tokenizer: Any = None, *, stream: str | None = None) -> None:
        config, recipe = saved.model.config, saved.about.get("recipe", {})
        self.streams = (_ENCODER, _DECODER) if config.encoder_layers else (_DECODER,)
        self.stream = _DECODER if stream is None else stream_named(stream, self.streams)
        self.name, self.model, self.about = name, saved.model, saved.about
        self.scheme, self.vocabulary, self.causal = config.scheme, config.vocabulary, self.stream == _DECODER
        self.layers, self.heads, self.dim, self.head_dim = len(self.blocks), config.heads, config.dim, config.head
        self.kv_heads = self.heads
        self.tokenizer, self.position_kind = tokenizer, "rotary" if config.positions == "rope" else config.positions
        adds = recipe.get("task", _ADDITION) == _ADDITION and config.positions == "cyclic"
        self.reads_examples = adds and tokenizer is None and config.vocabulary == len(CHARACTERS)
        self.context = None if self.reads_examples else recipe.get("context")
        self._stages = tuple(config.scheme.at(layer, self.layers) for layer in range(self.layers))
        self.schemes = self._stages

    @property
    def checksum(self) -> str:
        """The same for the same weights, shape, task and words."""
        words = "" if self.tokenizer is None else str(sorted(self.tokenizer.get_vocab().items()))
        return checksum(f"{self.model.config.values} {self.about.get('recipe')} {words}", tensors_of(self.model))

    def _run(self, sample: Sample, observer: Observer) -> Tensor:
        """Logits of the next character or token at every position that the decoder reads."""
        decoded, there = sample.predicting, PaddingMask(sample.attention_mask)
        positions = _positions(decoded)
        masks: dict[str, Any] = {_DECODER: CausalMask(), _ENCODER: there, _CROSS: there}
        with ExitStack() as stack:
            running = Running([BlockSite(block) for block in self.blocks], len(sample.tokens))
            if observer.state is not None or observer.left is not None:
                running.observe(observer.state, observer.left)
                running.install(stack)
            if observer.sublayer is not None:
                _SublayerHooks(self, observer.sublayer).install(stack)
            for mask, sublayer, observe in (
                (self.stream, "attention", observer.attention),
                (_CROSS, _CROSS, observer.cross),
            ):
                if observe is not None and sublayer in self.sublayers(0):
                    masks[mask] = _ObservedMask(self, sublayer, masks[mask], observe, self._angles(positions))
                    masks[mask].install(stack)
            asked = (Row(sample.tokens, _positions(sample), masks[_ENCODER]), masks[_CROSS]) if self._encoded else ()
            logits: Tensor = self.model(Row(decoded.tokens, positions, masks[_DECODER]), *asked)
            return logits

    @property
    def _encoded(self) -> bool:
        """Whether the model has an encoder."""
        return _ENCODER in self.streams

    @property
    def reads_out(self) -> bool:
        """Whether the view is of the decoder."""
        return self.stream == _DECODER

    def viewed(self, sample: Sample) -> Sample:
        """What the half that is viewed reads of a sample."""
        return sample.predicting if self.stream == _DECODER else sample

    def sublayers(self, layer: int) -> tuple[str, ...]:
        """Attention, attention to the encoder in a decoder that has one, and the feed-forward layer."""
        crossed = (_CROSS,) if self._encoded and self.stream == _DECODER else ()
        return "attention", *crossed, "feedforward"

    def _missing(self, name: str, layer: int) -> str:
        """Values of attention to an encoder, where there is none."""
        crossed = _CROSS in self.sublayers(layer) or not name.startswith(_CROSS)
        return "" if crossed else "it has no attention to another stream"

    def step(self, layer: int, sublayer: str) -> Tensor:
        """The branch scale with the learned α, as the forward pass uses it."""
        return self._scales(layer, sublayer)[0]

    def carry(self, layer: int, sublayer: str) -> Tensor:
        """The residual scale with the learned α, as the forward pass uses it."""
        return self._scales(layer, sublayer)[1]

    def input_scale(self, layer: int, sublayer: str) -> Tensor:
        """The factor of depth times the calibrated scale of the input."""
        return self._sublayer(layer, sublayer).read_scale.factor * self._scales(layer, sublayer)[2]

    def depth_factor(self, layer: int, sublayer: str) -> Tensor:
        """The factor of depth alone."""
        return self._scales(layer, sublayer)[2]

    @torch.no_grad()
    def _scales(self, layer: int, sublayer: str) -> tuple[Tensor, Tensor, Tensor]:
        """Step, carry and input factor."""
        step, carry, factor = (torch.as_tensor(value).to(self.device) for value in self._sublayer(layer, sublayer).values())
        return step, carry, factor

    def projections(self, layer: int) -> HeadProjections:
        """Weights of a layer's heads, with gains before them and the calibrated size of the update; there are no biases."""
        return self._projections(layer, "attention")

    def _projections(self, layer: int, name: str) -> HeadProjections:
        """Those of attention, or of attention to the encoder."""
        attention, sublayer = self._attention(layer, name), self._sublayer(layer, name)
        weights = attention.W_QKV
        if attention.input_gains is not None:
            weights = weights * attention.input_gains().T[:, :, None, None]
        W_Q, W_K, W_V = weights.detach().permute(1, 2, 0, 3).unbind()
        none = W_Q.new_zeros(self.heads, self.head_dim)
        W_O = attention.W_O.detach()
        if not isinstance(sublayer.output, Norm):  # else the norm between has the size of the update
            W_O = sublayer.write_scale.factor * W_O
        return HeadProjections(W_Q, W_K, W_V, W_O, none, none, none, none.new_zeros(self.dim))

    @torch.no_grad()
    def heads_of(
        self, layer: int, x: Float[Tensor, "rows tokens dim"], rotation: Rotation | None = None, letters: str = "qkv"
    ) -> tuple[Tensor, ...]:
        """Q, k and v of the input of a layer's attention."""
        weights, attention = self.projections(layer), self._attention(layer)
        made = tuple((x[:, None] @ W).transpose(1, 2) for W in (weights.W_Q, weights.W_K, weights.W_V))
        angles = None
        if rotation is not None:
            cos, sin = (part.expand(-1, x.shape[1], -1) for part in rotation)
            angles = cos, sin
        placed = dict(zip("qkv", attention.positioned(made, attention.head_norm, angles), strict=True))
        return tuple(placed[letter].transpose(1, 2) for letter in letters)

    def rotation(self, layer: int, positions: Int[Tensor, " positions"]) -> Rotation | None:
        """Cosines and sines at some positions; None where positions are no rotations."""
        return self._angles(positions[None].to(self.device))

    def _angles(self, positions: Int[Tensor, "rows positions"]) -> Rotation | None:
        angles: Rotation | None = self.model.rotation(Row(positions, positions, CausalMask()))
        return angles

    @property
    def normalised_heads(self) -> str:
        """The letters of q, k and v that are normalised in every layer."""
        normalised = [set(self._attention(layer).norms) for layer in range(self.layers)]
        return "".join(letter for letter in "qkv" if all(letter in letters for letters in normalised))

    @property
    def norms(self) -> list[BlockNorm]:
        """All norms, the final one last; gains folded into a matrix are 1 here, those of outputs have the size of updates."""
        norms = self._norms_in(self.model.embed.norm, "embedding", None, "")
        for layer in range(self.layers):
            for name in self.sublayers(layer):
                norms += self._sublayer_norms(layer, name)
        return norms + (self._norms_in(self.model.readout.norm, "final", None, "") if self.reads_out else [])

    def _sublayer_norms(self, layer: int, name: str) -> Iterator[BlockNorm]:
        """The norms in the slots of a sublayer, then those of q, k and v."""
        sublayer = self._sublayer(layer, name)
        for slot in ("input", "inner", "output", "stream"):
            of_slot = self._norms_in(getattr(sublayer.f if slot == "inner" else sublayer, slot), slot, layer, name)
            size = sublayer.write_scale.factor if slot == "output" else 1.0
            yield from (norm.times(size) for norm in of_slot)
        norm = sublayer.f.head_norm if isinstance(sublayer.f, Attention) else None
        if norm is not None:
            gains = dict(zip("qkv", norm.gains.detach().flatten(1), strict=True))
            yield from (BlockNorm(x, layer, name, norm.kind, gains[x], None, EPSILON) for x in norm.letters)

    @property
    def blocks(self) -> list[nn.Module]:
        """The module of every layer."""
        return list(self.model.decoder if self.stream == _DECODER else self.model.encoder)

    @property
    def norm_modules(self) -> list[nn.Module]:
        """The modules of all norms."""
        modules: list[nn.Module] = list(self.model.modules())
        return [module for module in modules if isinstance(module, Norm | HeadNorm)]

    @property
    def embeddings(self) -> Float[Tensor, "vocabulary dim"]:
        """The vectors of characters or tokens, as they enter the sum with positions where these are added."""
        embed = self.model.embed
        types: Tensor = embed.scaled(embed.type_scale(embed.types))
        return types.detach()

    @property
    def unembedding(self) -> Float[Tensor, "vocabulary dim"] | None:
        """The matrix of the logits, with the scales of logits; None where the readout has hidden layers, and of an encoder."""
        readout = self.model.readout
        if readout.hidden or not self.reads_out:
            return None
        rows: Tensor = self.model.unembedding.detach().T
        scale = None if readout.scale is None else readout.scale().detach()
        return rows if scale is None else scale[:, None] * rows

    def batch(self, x: "TextOrIds | Sample") -> Sample:
        """A text, token ids or a sample as a sample; an encoder reads examples up to ``=``, its decoder ``[`` and the rest.

        Both halves of an encoder-decoder of another vocabulary read the same token ids.
        """
        sample = super().batch(x)
        if isinstance(x, Sample) or not (self._encoded and self.reads_examples):
            return sample
        wrong = sample.tokens[:, 0] != CHARACTERS.index(_BEGIN)
        if bool(wrong.any()):
            text = as_text(sample.tokens[wrong][0])
            raise InputError(f"'{self.name}' reads examples that begin with {_BEGIN}, such as {_BEGIN}12+7=1, not '{text}'")
        return Sample.drawn(split_rows(sample.tokens))

    def sample(self, text: TextOrIds | None, size: int | None, seed: int) -> Sample:
        """Examples of the task that the model was trained on, one in each row; or the first tokens of a text, or token ids."""
        if text is not None and not self.reads_examples:
            return Sample.continued(self._first_tokens(text, size))
        if text is not None and not isinstance(text, str):
            sample = self.batch(text).with_next()
            count = int(self.viewed(sample).attention_mask.sum(1).max())
            require_tokens(count, f"the examples are too short for the {self.stream}")
            return sample
        if text is not None:
            raise InputError(f"'{self.name}' adds integers: it reads examples of its task, or token ids, not a text")
        if "recipe" not in self.about:
            raise InputError(f"'{self.name}' has no recipe, and so no examples: open its run folder, or a SavedModel with one")
        task, count = data_of(self.about), size or _EXAMPLES
        require_memory({f"examples={count}": task.drawn_bytes(count)}, str(self.device))
        return Sample.drawn(task.probe(count, seed, self.device, encoder=self._encoded))

    def encode(self, text: str) -> list[int]:
        """The ids of characters or tokens."""
        if not self.reads_examples:
            return super().encode(text)
        ids = [self.token_of(character) for character in text]
        if None in ids:
            known = "".join(self.words(torch.arange(self.vocabulary)))
            raise InputError(f"'{self.name}' reads the characters {known}, not '{text[ids.index(None)]}'")
        return [token for token in ids if token is not None]

    def words(self, tokens: Int[Tensor, " tokens"]) -> list[str]:
        """Characters or tokens."""
        return [as_text(token[None]) for token in tokens] if self.reads_examples else super().words(tokens)

    def token_of(self, text: str) -> int | None:
        """The number of a character or token."""
        if not self.reads_examples:
            return super().token_of(text)
        known = self.words(torch.arange(self.vocabulary))
        return known.index(text) if text in known else None

    def _norms_in(self, module: nn.Module, slot: str, layer: int | None, sublayer: str) -> list[BlockNorm]:
        """The norm in a slot, if there is one."""
        if not isinstance(module, Norm):
            return []
        gain = torch.ones(self.dim, device=self.device) if module.gain is None else module.gain().detach()
        bias = None if module.bias is None else module.bias.detach()
        slope, shift = (
            default if x is None else float(x.detach()) for x, default in ((module.slope, 1.0), (module.shift, 0.0))
        )
        return [BlockNorm(slot, layer, sublayer, module.kind, gain, bias, EPSILON, slope, shift)]

    def changes_mixed(self, layer: int) -> str:
        """A norm or a gate before W_O."""
        slots = self._stages[layer].attention
        parts = [name for name, there in (("a norm", slots.inner != "none"), ("a gate", slots.gate != "none")) if there]
        return f"{' and '.join(parts)} changes its mixed values before W_O" if parts else ""

    def _sublayer(self, layer: int, sublayer: str = "attention") -> Sublayer:
        part: Sublayer = getattr(self.blocks[layer], sublayer)
        return part

    def _attention(self, layer: int, sublayer: str = "attention") -> Attention:
        attention = self._sublayer(layer, sublayer).f
        assert isinstance(attention, Attention)
        return attention


def _positions(sample: Sample) -> Int[Tensor, "rows tokens"]:
    """The positions of a sample, by default from 0 on."""
    if sample.positions is not None:
        return sample.positions
    return torch.arange(sample.tokens.shape[1], device=sample.tokens.device).expand_as(sample.tokens)


class _SublayerHooks:
    """Passes states and updates of every sublayer to an observer."""

    def __init__(self, model: NormscopeModel, observe: Callable[[SublayerStep], None]) -> None:
        self.model, self.observe = model, observe
        self.before = self.computed = self.scaled = torch.empty(0)

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: observe every sublayer."""
        for layer in range(self.model.layers):
            for name in self.model.sublayers(layer):
                part = self.model._sublayer(layer, name)
                before(stack, part, self._on_input)
                after(stack, part.f, self._on_computed)
                after(stack, part.write_scale, self._on_scaled)
                after(stack, part, partial(self._on_end, layer, name))

    def _on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.before = given_states(args, kwargs)

    def _on_computed(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.computed = output

    def _on_scaled(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.scaled = output

    def _on_end(self, layer: int, name: str, module: Sublayer, args: Any, kwargs: Any, output: Tensor) -> None:
        """Without an output norm the calibrated size of the update is part of what f computed, as in ``projections``."""
        step, carry, _ = self.model._scales(layer, name)
        computed = self.computed if isinstance(module.output, Norm) else self.scaled
        added = orthogonal_part(self.scaled, self.before) if module.tangent else self.scaled
        self.observe(SublayerStep(layer, name, self.before, computed, step * added, output, step, carry))


class _ObservedMask:
    """A mask that passes q, k and v of one sublayer of every layer to an observer: ``attention`` or ``cross``."""

    def __init__(
        self,
        model: NormscopeModel,
        sublayer: str,
        mask: CausalMask | PaddingMask,
        observe: OnAttention,
        rotation: Rotation | None,
    ) -> None:
        self.model, self.sublayer, self.mask, self.observe, self.rotation = model, sublayer, mask, observe, rotation
        self.layer, self.stream, self.input = -1, torch.empty(0), torch.empty(0)

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: observe the inputs of blocks and of their attention."""
        for layer, block in enumerate(self.model.blocks):
            before(stack, block, partial(self._on_block, layer))
            before(stack, self.model._attention(layer, self.sublayer), self._on_attention)

    def _on_block(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer, self.stream = layer, given_states(args, kwargs)

    def _on_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.input = given_states(args, kwargs)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        """The mixed values that the observer returns, or those of the model."""
        mixed = self._observed(q, k, v, float(scale), Scores(), None)
        return self.mask(q, k, v, scale) if mixed is None else mixed

    def scored(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, scores: Scores, sink: Tensor | None = None) -> Tensor:
        """The same with other scores than a plain softmax."""
        factor: float | Tensor = float(scale)
        if scores.temperature is not None:
            seen = torch.arange(1, q.shape[2] + 1, device=q.device, dtype=torch.float64)
            factor = (factor * scores.temperature(seen)).to(q)[None, None, :, None]
        mixed = self._observed(q, k, v, factor, scores, sink)
        return self.mask.scored(q, k, v, scale, scores, sink) if mixed is None else mixed

    def _observed(
        self, q: Tensor, k: Tensor, v: Tensor, factor: float | Tensor, scores: Scores, sink: Tensor | None
    ) -> Tensor | None:
        W_O = None if self.model.changes_mixed(self.layer) else self.model._projections(self.layer, self.sublayer).W_O
        values = (q, k, v, factor, self.mask.seen(q, k), W_O, scores.cap, self.rotation, None, sink)
        return self.observe(AttentionStep(self.layer, self.stream, self.input, *values))

    def stacked(self, qkv: Tensor, scale: Tensor, norm: HeadNorm | None = None) -> Tensor:
        """The same for q, k, v in one tensor."""
        q, k, v = (x.transpose(1, 2) for x in (qkv if norm is None else norm(qkv)).unbind(2))
        return self(q, k, v, scale)

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """All scores, and which are of keys that a query attends to."""
        return self.mask.scores(q, k)
