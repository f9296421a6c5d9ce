"""Models that normscope trained, behind a ``Model``."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normscope.core import Causal, HeadNorm, Reach
from normscope.core.norms import EPSILON
from normscope.errors import InputError
from normscope.models.checksum import checksum, tensors_of
from normscope.models.hooks import before, given_states, watch_states
from normscope.models.view import NOTHING, AttentionStep, BlockNorm, HeadProjections, Model, Observer, Sample, Watcher
from normscope.training.batches import PaddedFeed, draw_batches, one_batch
from normscope.training.recipe import task_of
from normscope.training.tasks import MASK, as_text
from normscope.transformer import Row, SavedModel
from normscope.transformer.model import Attention, Norm, Sublayer

_EXAMPLES = 256


class NormscopeModel(Model):
    """A decoder that ``normscope train`` wrote, or one that comes with the package."""

    causal, position_kind, scheme_note, context = True, "cyclic", "", None

    def __init__(self, name: str, saved: SavedModel) -> None:
        config = saved.model.config
        if config.encoder_layers:
            raise InputError(f"'{name}' is an encoder-decoder: two streams, which a view does not tell apart")
        self.name, self.model, self.about = name, saved.model, saved.about
        self.scheme, self.vocabulary = config.scheme, config.vocabulary
        self.layers, self.heads, self.dim, self.head = config.layers, config.heads, config.dim, config.head

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        found: torch.device = next(self.model.parameters()).device
        return found

    @cached_property
    def checksum(self) -> str:
        """The same for the same weights, shape and task."""
        return checksum(f"{self.model.config.values} {self.about.get('recipe')}", tensors_of(self.model))

    @torch.no_grad()
    def forward(self, sample: Sample, observe: Observer | None = None, watch: Watcher | None = None) -> Tensor:
        """Logits of the next character at every place."""
        onlooker = _Observed(self, observe)
        with ExitStack() as stack:
            blocks = list(self.model.decoder)
            if watch is not None:
                watch_states(stack, blocks, watch)
            for layer, block in enumerate(blocks):
                before(stack, block, onlooker.entering)
                before(stack, self._attention(layer), onlooker.reading)
            positions = sample.positions
            if positions is None:
                positions = torch.arange(sample.tokens.shape[1], device=sample.tokens.device).expand_as(sample.tokens)
            reach = Causal() if observe is None else onlooker
            logits: Tensor = self.model(Row(sample.tokens, positions, reach))
            return logits

    def projections(self, layer: int) -> HeadProjections:
        """Weights of a layer's heads, gains in front of them and the size of the write multiplied in; there are no biases."""
        attention = self._attention(layer)
        weights = attention.W_QKV
        if attention.input_gains is not None:
            weights = weights * attention.input_gains().T[:, :, None, None]
        W_Q, W_K, W_V = weights.detach().permute(1, 2, 0, 3).unbind()
        none = W_Q.new_zeros(self.heads, self.head)
        W_O = attention.W_O.detach()
        if not isinstance(self._sublayer(layer).output, Norm):  # else the norm in between has the size of the write
            W_O = self._sublayer(layer).write_scale.factor * W_O
        return HeadProjections(W_Q, W_K, W_V, W_O, none, none, none, none.new_zeros(self.dim))

    def heads_of(
        self,
        layer: int,
        read: Float[Tensor, "rows tokens dim"],
        rotation: tuple[Tensor, Tensor] | None = None,
        letters: str = "qkv",
    ) -> tuple[Tensor, ...]:
        """Q, k and v of what a layer reads."""
        weights, norm = self.projections(layer), self._attention(layer).head_norm
        parts = {"q": weights.W_Q, "k": weights.W_K, "v": weights.W_V}
        made = [read[:, None] @ parts[letter] for letter in letters]
        if norm is not None:
            made = [norm.one(x, y.transpose(1, 2)).transpose(1, 2) for x, y in zip(letters, made, strict=True)]
        return tuple(made)

    @property
    def normalised_heads(self) -> str:
        """The letters of q, k and v that are normalised in every layer."""
        kept = [set(self._attention(layer).norms) for layer in range(self.layers)]
        return "".join(letter for letter in "qkv" if all(letter in letters for letters in kept))

    @property
    def norms(self) -> list[BlockNorm]:
        """All norms, the final one last; gains folded into a matrix stand here as 1, those of outputs size the write."""
        found = []
        for layer, block in enumerate(self.model.decoder):
            for sublayer in ("attention", "feedforward"):
                part = getattr(block, sublayer)
                for slot in ("input", "output", "stream"):
                    of_slot = self._norm_views(getattr(part, slot), slot, layer, sublayer)
                    size = part.write_scale.factor if slot == "output" else 1.0
                    found += [replace(norm, gain=size * norm.gain) for norm in of_slot]
            norm = self._attention(layer).head_norm
            if norm is not None:
                gains = dict(zip("qkv", norm.gains.detach().flatten(1), strict=True))
                found += [BlockNorm(x, layer, "attention", norm.kind, gains[x], None, EPSILON) for x in norm.letters]
        return found + self._norm_views(self.model.readout.norm, "final", None, "")

    @property
    def embeddings(self) -> Float[Tensor, "vocabulary dim"]:
        """The types of characters as they enter the sum with positions."""
        embed = self.model.embed
        types: Tensor = embed.scale(embed.type_scale(embed.types))
        return types.detach()

    @property
    def positions(self) -> Float[Tensor, "positions dim"] | None:
        """None: positions are waves of learned frequencies, not a table."""
        return None

    @property
    def unembedding(self) -> Float[Tensor, "vocabulary dim"] | None:
        """None: the readout has hidden layers."""
        return None

    predicts = True

    def sample(self, text: str | None, size: int | None, seed: int) -> Sample:
        """Examples of the task that the model was trained on, each in a row of its own."""
        if text is not None:
            raise InputError(f"'{self.name}' adds integers: it reads examples of its task, not a text (--examples)")
        task, offsets = task_of(self.about.get("recipe", {}))
        device, feed = self.device, PaddedFeed()
        drawn = draw_batches(task.train, feed, 1, size or _EXAMPLES, offsets, seed, device)
        batch = feed.trimmed(one_batch(drawn, 0))
        characters, targets = batch["characters"], batch["targets"]
        return Sample(characters, torch.where(targets == MASK, NOTHING, targets), characters != MASK, batch["positions"])

    def words(self, tokens: Int[Tensor, " tokens"]) -> list[str]:
        """Characters."""
        return [as_text(token[None]) for token in tokens]

    def token_of(self, text: str) -> int | None:
        """The number of a character."""
        known = self.words(torch.arange(self.vocabulary))
        return known.index(text) if text in known else None

    def _norm_views(self, module: nn.Module, slot: str, layer: int | None, sublayer: str) -> list[BlockNorm]:
        """The norm in a slot, if there is one."""
        if not isinstance(module, Norm):
            return []
        gain = torch.ones(self.dim, device=self.device) if module.gain is None else module.gain().detach()
        return [BlockNorm(slot, layer, sublayer, module.kind, gain, None, EPSILON)]

    def _sublayer(self, layer: int) -> Sublayer:
        block: Any = self.model.decoder[layer]
        sublayer: Sublayer = block.attention
        return sublayer

    def _attention(self, layer: int) -> Attention:
        attention = self._sublayer(layer).f
        assert isinstance(attention, Attention)
        return attention


class _Observed:
    """A reach that hands q, k and v of every layer to an observer."""

    def __init__(self, view: NormscopeModel, observe: Observer | None) -> None:
        self.view, self.observe, self.layer = view, observe, -1
        self._causal: Reach = Causal()
        self.stream = self.read = torch.empty(0)

    def entering(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The states that come into a block."""
        self.stream, self.layer = given_states(args, kwargs), self.layer + 1

    def reading(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What attention reads."""
        self.read = given_states(args, kwargs)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        """What the observer makes of it, or the mixed values as they are."""
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
        W_O = self.view.projections(self.layer).W_O
        step = AttentionStep(self.layer, self.stream, self.read, q, k, v, float(scale), seen, W_O)
        mixed = self.observe(step) if self.observe is not None else None
        return self._causal(q, k, v, scale) if mixed is None else mixed

    def stacked(self, qkv: Tensor, scale: Tensor, norm: HeadNorm | None = None) -> Tensor:
        """The same for q, k, v in one tensor."""
        q, k, v = (x.transpose(1, 2) for x in (qkv if norm is None else norm(qkv)).unbind(2))
        return self(q, k, v, scale)

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """All scores, and which are not of later keys."""
        return self._causal.scores(q, k)
