"""A constructed world as a ``Model``, so that every measure can be compared with theory."""

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core import normalise_heads, project, unproject
from normscope.errors import InputError
from normscope.models import AttentionStep, BlockNorm, HeadProjections, Model, Observer, Sample, SublayerStep
from normscope.models.checksum import checksum
from normscope.models.model import TextOrIds
from normscope.models.observe import Rotation
from normscope.models.worlds.world import World, update_at
from normscope.schemes import Scheme, scheme_values


class WorldModel(Model):
    """One layer of attention over a world, a head for each part, by the slots of a scheme; norms have radius 1."""

    causal, position_kind, scheme_note, context, layers, predicts = True, "none", "", None, 1, False

    def __init__(self, world: World, scheme: Scheme) -> None:
        self.name, self.world, self.scheme, self.schemes = "world", world, scheme, (scheme,)
        self._weights = world.weights
        self._update, self._normalised = update_at(scheme, 0, 1), scheme.at(0, 1).attention.heads
        self.heads, self.dim, self.head_dim = self._projections[0].shape
        self.kv_heads = self.heads
        self.vocabulary = len(world.coordinates[0])

    @property
    def device(self) -> torch.device:
        """The device of its matrices."""
        return self._projections[0].device

    @property
    def checksum(self) -> str:
        """The same for the same world and scheme."""
        parts = (*self._projections, *self.world.coordinates)
        assert self.scheme is not None
        return checksum(str(scheme_values(self.scheme)), ((str(place), part) for place, part in enumerate(parts)))

    @property
    def _projections(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w = self._weights
        assert w.W_Q is not None
        assert w.W_K is not None
        assert w.W_V is not None
        assert w.W_O is not None
        return w.W_Q, w.W_K, w.W_V, w.W_O

    @property
    def parameters(self) -> int:
        """The number of entries of its matrices."""
        return sum(part.numel() for part in self._projections)

    def _run(self, sample: Sample, observer: Observer) -> Tensor:
        """The states after the layer."""

        def observed(layer: int, x: Tensor) -> Tensor:
            replaced = None if observer.state is None else observer.state(layer, x)
            return x if replaced is None else replaced

        x = observed(0, self._update.settle(self.embeddings[sample.tokens]))
        states = self._update.read(x)
        q, k, v = self.heads_of(0, states)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        attention = AttentionStep(0, x, states, q, k, v, 1.0, mask, self._projections[3])
        mixed = None if observer.attention is None else observer.attention(attention)
        output = unproject(attention.weights() @ v if mixed is None else mixed, self._weights.W_O)
        after = self._update.state(x, output)
        if observer.sublayer is not None:
            step, carry = self.step(0, "attention"), self.carry(0, "attention")
            observer.sublayer(SublayerStep(0, "attention", x, output, self._update.written(x, output), after, step, carry))
        return observed(1, after)

    def step(self, layer: int, sublayer: str) -> Tensor:
        """The branch scale of the slots."""
        return torch.as_tensor(self._update.step, dtype=torch.float64)

    def carry(self, layer: int, sublayer: str) -> Tensor:
        """The residual scale of the slots."""
        return torch.as_tensor(self._update.carry, dtype=torch.float64)

    def projections(self, layer: int) -> HeadProjections:
        """The matrices of the heads; there are no biases."""
        none = torch.zeros(self.heads, self.head_dim, dtype=torch.float64)
        return HeadProjections(*self._projections, none, none, none, torch.zeros(self.dim, dtype=torch.float64))

    def heads_of(
        self, layer: int, x: Float[Tensor, "rows tokens dim"], rotation: Rotation | None = None, letters: str = "qkv"
    ) -> tuple[Tensor, ...]:
        """Those of q, k and v of what the layer reads."""
        q, k, v = (project(x, W) for W in self._projections[:3])
        made = dict(zip("qkv", normalise_heads(q, k, v, self._normalised), strict=True))
        return tuple(made[letter] for letter in letters)

    @property
    def normalised_heads(self) -> str:
        """The letters of q, k and v that the scheme normalises."""
        return self._normalised.replace("none", "")

    @property
    def norms(self) -> list[BlockNorm]:
        """Those of the input, the stream and the heads; a norm of radius 1 has a gain of 1/√width."""
        assert self.scheme is not None
        stage = self.scheme.at(0, 1)
        factor = float(self._update.factor)
        wanted = [("input", factor, self.dim)] * (self._update.input is not None)
        wanted += [("embedding", 1.0, self.dim)] * (self._update.stream is not None)
        wanted += [(letter, 1.0, self.head_dim) for letter in self.normalised_heads]
        return [
            BlockNorm(
                slot,
                None if slot == "embedding" else 0,
                "" if slot == "embedding" else "attention",
                stage.norm,
                torch.full((width,), factor * width**-0.5, dtype=torch.float64),
                None,
                0.0,
            )
            for slot, factor, width in wanted
        ]

    @property
    def embeddings(self) -> Float[Tensor, "vocabulary dim"]:
        """The tokens of the world."""
        return self.world.embeddings

    def sample(self, text: TextOrIds | None = None, size: int | None = None, seed: int = 0) -> Sample:
        """Every token once."""
        if text is not None:
            raise InputError("a constructed world has its own tokens and reads no text")
        tokens = torch.arange(self.vocabulary if size is None else min(size, self.vocabulary))[None]
        return Sample.of(tokens)
