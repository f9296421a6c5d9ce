"""Every named scheme beside blocks written by hand from its paper, in plain PyTorch, with the same weights.

The references know neither slots nor ``normscope.core``: norms are ``F.rms_norm`` and ``F.layer_norm``, attention is
``F.scaled_dot_product_attention``. What the trained model keeps beside its matrices (gains, calibrated factors) is folded into
them first, as any checkpoint could be.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normscope.core import CausalMask
from normscope.schemes import NAMED
from normscope.transformer.calibration import Calibrated
from normscope.transformer.config import TransformerConfig
from normscope.transformer.model import LearnedScale, Row, Sublayer, Transformer

DIM, HEADS, HEAD, HIDDEN = 12, 3, 4, 20
EPS = 1e-12


@dataclass(frozen=True)
class Norm:
    """A norm layer with a gain, RMSNorm or LayerNorm without bias; or a map of Zhu et al. and Chen et al. 2025 in its place."""

    kind: str
    gain: Tensor
    slope: Tensor | None = None
    shift: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        width = (x.shape[-1],)
        match self.kind:
            case "rms":
                return F.rms_norm(x, width, eps=EPS) * self.gain
            case "layer":
                return F.layer_norm(x, width, eps=EPS) * self.gain
            case "tanh":  # DyT(x) = γ tanh(αx) + β
                return self.gain * torch.tanh(self.slope * x) + self.bias
        return self.gain * torch.erf(self.slope * x + self.shift) + self.bias  # Derf(x) = γ erf(αx + s) + β


@dataclass(frozen=True)
class Block:
    """The weights of one block: matrices, the norms that a scheme may use, and nGPT's step sizes and scales."""

    layer: int  # 1 is the first, as papers count
    depth: int
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    temperature: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    norms: dict[str, Norm]
    alpha: dict[str, Tensor]
    sinks: Tensor | None = None
    gate: Tensor | None = None

    def heads(self, x: Tensor, normed: str = "") -> list[Tensor]:
        """Q, k and v of one sequence (tokens, dim) as (heads, tokens, head), some of them normalised."""
        heads = []
        for letter, weight in (("q", self.q), ("k", self.k), ("v", self.v)):
            y = (x @ weight).view(-1, HEADS, HEAD)
            y = self.norms[letter](y) if letter in normed else y
            heads.append(y.transpose(0, 1))
        return heads

    def mixed(self, x: Tensor, normed: str = "") -> Tensor:
        """What the heads of causal attention mix, concatenated."""
        q, k, v = (y[None] for y in self.heads(x, normed))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=float(self.temperature))
        return mixed[0].transpose(0, 1).flatten(1)

    def logits(self, x: Tensor) -> Tensor:
        """The scaled products of queries and keys (heads, tokens, tokens)."""
        q, k, _ = self.heads(x)
        return self.temperature * q @ k.transpose(1, 2)

    def weighted(self, x: Tensor, probabilities: Tensor) -> Tensor:
        """The concatenated heads for given attention weights."""
        return (probabilities @ self.heads(x)[2]).transpose(0, 1).flatten(1)

    def attention(self, x: Tensor, normed: str = "") -> Tensor:
        """Causal attention of one sequence, with norms on some of q, k and v of every head."""
        return self.mixed(x, normed) @ self.o

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden activation of the MLP."""
        return torch.relu(x @ self.up + self.up_bias)

    def mlp(self, x: Tensor) -> Tensor:
        return self.hidden(x) @ self.down + self.down_bias

    def norm(self, place: str) -> Norm:
        return self.norms[place]


def none(b: Block, x: Tensor) -> Tensor:
    x = x + b.attention(x)
    return x + b.mlp(x)


def post(b: Block, x: Tensor) -> Tensor:  # Vaswani et al. 2017: LayerNorm(x + Sublayer(x))
    x = b.norm("attention.stream")(x + b.attention(x))
    return b.norm("mlp.stream")(x + b.mlp(x))


def pre(b: Block, x: Tensor) -> Tensor:  # Xiong et al. 2020, figure 1b
    x = x + b.attention(b.norm("attention.input")(x))
    return x + b.mlp(b.norm("mlp.input")(x))


def mix(b: Block, x: Tensor) -> Tensor:  # Li et al. 2024: Post-LN in the first quarter of the layers, then Pre-LN
    return post(b, x) if b.layer <= b.depth / 4 else pre(b, x)


def peri(b: Block, x: Tensor) -> Tensor:  # Kim et al. 2025: x + Norm(Module(Norm(x)))
    x = x + b.norm("attention.output")(b.attention(b.norm("attention.input")(x)))
    return x + b.norm("mlp.output")(b.mlp(b.norm("mlp.input")(x)))


def ngpt(b: Block, x: Tensor) -> Tensor:  # Karagodin et al. 2025: Norm(x + α Norm(A(x)))
    x = b.norm("attention.stream")(x + b.alpha["attention"] * b.norm("attention.output")(b.attention(x)))
    return b.norm("mlp.stream")(x + b.alpha["mlp"] * b.norm("mlp.output")(b.mlp(x)))


def ngpt_lerp(b: Block, x: Tensor) -> Tensor:
    """Loshchilov et al. 2024 on the unit sphere: h ← Norm(h + α(Norm(f(h)) − h)), q, k ← s Norm(q), s Norm(k), scale √d_h.

    States of the library have the norm √d. The MLP reads √d·h there, which is nGPT's own rescaling √d of the hidden layer.
    """
    h = x / math.sqrt(DIM)
    q, k, v = ((h @ weight).view(-1, HEADS, HEAD).transpose(0, 1)[None] for weight in (b.q, b.k, b.v))
    scales = [b.norms[letter].gain[:, None] for letter in "qk"]
    q, k = (F.normalize(y, dim=-1) * scale for y, scale in zip((q, k), scales, strict=True))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=math.sqrt(HEAD))
    h_attention = F.normalize(mixed[0].transpose(0, 1).flatten(1) @ b.o, dim=-1)
    h = F.normalize(h + b.alpha["attention"] * (h_attention - h), dim=-1)
    h_mlp = F.normalize(b.mlp(math.sqrt(DIM) * h), dim=-1)
    return math.sqrt(DIM) * F.normalize(h + b.alpha["mlp"] * (h_mlp - h), dim=-1)


def sqrt_scaling(b: Block, x: Tensor) -> Tensor:  # Karagodin et al. 2025, v1: Norm(x + A(x)/√(t+1)), t = 0 at first
    x = b.norm("attention.stream")(x + b.attention(x) / math.sqrt(b.layer))
    return b.norm("mlp.stream")(x + b.mlp(x) / math.sqrt(b.layer))


def ln_scaling(b: Block, x: Tensor) -> Tensor:  # Sun et al. 2025: LayerNorm(x)/√ℓ before both sublayers of layer ℓ
    x = x + b.attention(b.norm("attention.input")(x) / math.sqrt(b.layer))
    return x + b.mlp(b.norm("mlp.input")(x) / math.sqrt(b.layer))


def qk(b: Block, x: Tensor) -> Tensor:  # Dehghani et al. 2023 and Qwen3: Pre-LN, norms on queries and keys of every head
    x = x + b.attention(b.norm("attention.input")(x), "qk")
    return x + b.mlp(b.norm("mlp.input")(x))


def qkv(b: Block, x: Tensor) -> Tensor:  # Menary et al. 2024: no norm before attention, norms on q, k and v
    x = x + b.attention(x, "qkv")
    return x + b.mlp(b.norm("mlp.input")(x))


def pre_qkv(b: Block, x: Tensor) -> Tensor:
    x = x + b.attention(b.norm("attention.input")(x), "qkv")
    return x + b.mlp(b.norm("mlp.input")(x))


def res_post(b: Block, x: Tensor) -> Tensor:  # Liu et al. 2021 (Swin V2): x + LayerNorm(Sublayer(x))
    x = x + b.norm("attention.output")(b.attention(x))
    return x + b.norm("mlp.output")(b.mlp(x))


def deepnorm(b: Block, x: Tensor) -> Tensor:  # Wang et al. 2022: LayerNorm(αx + Sublayer(x)), α = (2N)^{1/4} for a decoder
    alpha = (2 * b.depth) ** 0.25
    x = b.norm("attention.stream")(alpha * x + b.attention(x))
    return b.norm("mlp.stream")(alpha * x + b.mlp(x))


def hybrid(b: Block, x: Tensor) -> Tensor:  # Zhuo et al. 2025: y = MHA_QKV(x) + x; x = FFN(Norm(y)) + Norm(y)
    y = b.attention(x, "qkv") + x
    normed = b.norm("attention.stream")(y)
    return b.mlp(normed) + normed


def hybrid_star(b: Block, x: Tensor) -> Tensor:  # Zhuo et al. 2025: the first block is Pre-Norm, with norms on q, k and v
    return pre_qkv(b, x) if b.layer == 1 else hybrid(b, x)


def keel(b: Block, x: Tensor) -> Tensor:  # arXiv 2601.19895: LN(αx + F(LN(x))), α the number of sublayers
    alpha = 2 * b.depth
    x = b.norm("attention.stream")(alpha * x + b.attention(b.norm("attention.input")(x)))
    return b.norm("mlp.stream")(alpha * x + b.mlp(b.norm("mlp.input")(x)))


def depth_scaled(b: Block, x: Tensor) -> Tensor:  # Yang et al. 2023: x + Sublayer(LN(x))/√L
    x = x + b.attention(b.norm("attention.input")(x)) / b.depth**0.5
    return x + b.mlp(b.norm("mlp.input")(x)) / b.depth**0.5


def depth_scaled_linear(b: Block, x: Tensor) -> Tensor:  # Dey et al. 2025: x + L⁻¹ Sublayer(LN(x))
    x = x + b.attention(b.norm("attention.input")(x)) / b.depth
    return x + b.mlp(b.norm("mlp.input")(x)) / b.depth


def layerscale(b: Block, x: Tensor) -> Tensor:  # Touvron et al. 2021: x + diag(λ) Sublayer(LN(x))
    x = x + b.alpha["attention"] * b.attention(b.norm("attention.input")(x))
    return x + b.alpha["mlp"] * b.mlp(b.norm("mlp.input")(x))


def rezero(b: Block, x: Tensor) -> Tensor:  # Bachlechner et al. 2020: x + α Sublayer(x), one α for each sublayer, no norms
    x = x + b.alpha["attention"] * b.attention(x)
    return x + b.alpha["mlp"] * b.mlp(x)


def sub_ln(b: Block, x: Tensor) -> Tensor:
    """Wang et al. 2022: LN before q, k, v and again before W_O; LN before W_in and again before W_out."""
    x = x + b.norm("attention.inner")(b.mixed(b.norm("attention.input")(x))) @ b.o
    return x + b.norm("mlp.inner")(b.hidden(b.norm("mlp.input")(x))) @ b.down + b.down_bias


def gated(b: Block, x: Tensor) -> Tensor:  # Qiu et al. 2025, position G1: SDPA(x) ⊙ σ(x W_θ), then W_O
    n = b.norm("attention.input")(x)
    x = x + (b.mixed(n) * torch.sigmoid(n @ b.gate)) @ b.o
    return x + b.mlp(b.norm("mlp.input")(x))


def causal(logits: Tensor) -> Tensor:
    return logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)


def sink(b: Block, x: Tensor) -> Tensor:  # gpt-oss: a learned logit for each head in the softmax, dropped after it
    n = b.norm("attention.input")(x)
    logits = causal(b.logits(n))
    with_sinks = torch.cat([logits, b.sinks.view(-1, 1, 1).expand(-1, len(x), 1)], -1)
    x = x + b.weighted(n, with_sinks.softmax(-1)[..., :-1]) @ b.o
    return x + b.mlp(b.norm("mlp.input")(x))


def softcap(b: Block, x: Tensor) -> Tensor:  # Gemma 2: logits ← cap · tanh(logits / cap), cap = 50
    n = b.norm("attention.input")(x)
    x = x + b.weighted(n, causal(50.0 * torch.tanh(b.logits(n) / 50.0)).softmax(-1)) @ b.o
    return x + b.mlp(b.norm("mlp.input")(x))


def orthogonal(f: Tensor, x: Tensor) -> Tensor:  # Oh et al. 2025: f⊥ = f − ⟨x, f⟩/⟨x, x⟩ · x
    return f - ((x * f).sum(-1) / (x * x).sum(-1))[:, None] * x


def tangent(b: Block, x: Tensor) -> Tensor:
    x = x + orthogonal(b.attention(b.norm("attention.input")(x)), x)
    return x + orthogonal(b.mlp(b.norm("mlp.input")(x)), x)


REFERENCES: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "none": none, "post": post, "pre": pre, "mix": mix, "peri": peri, "ngpt": ngpt, "ngpt-lerp": ngpt_lerp,
    "sqrt-scaling": sqrt_scaling, "ln-scaling": ln_scaling, "qk": qk, "qkv": qkv, "pre-qkv": pre_qkv, "res-post": res_post,
    "deepnorm": deepnorm, "hybrid": hybrid, "hybrid-star": hybrid_star, "keel": keel, "minimax": deepnorm,
    "depth-scaled": depth_scaled, "depth-scaled-linear": depth_scaled_linear, "layerscale": layerscale, "rezero": rezero,
    "dyt": pre, "derf": pre, "sub-ln": sub_ln, "gated": gated, "sink": sink, "softcap": softcap, "tangent": tangent,
}  # fmt: skip


def drawn(name: str, kind: str, layers: int) -> Transformer:
    """A model in float64 of which every parameter and every calibrated factor has been moved from where it starts."""
    torch.manual_seed(1)
    config = TransformerConfig(
        NAMED[name].with_norm(kind), vocabulary=7, dim=DIM, layers=layers, heads=HEADS, head=HEAD, feedforward=HIDDEN,
        readout=(9,), frequencies=4, shared_gains=True,
    )  # fmt: skip
    model = Transformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        for module in model.modules():
            if isinstance(module, Calibrated) and module.target is not None:  # nGPT's are fixed
                module.factor *= 1.5
    model.renormalise()
    return model


def folded(sublayer: Sublayer, kind: str) -> tuple[Tensor, Tensor, dict[str, Norm]]:
    """The factor on what is read, that on what is added, and the norms with their gains, calibrated factors included."""
    norms = {slot: Norm(kind, _gain(getattr(sublayer, slot))) for slot in ("output", "stream")}
    read, added = sublayer.read_scale.factor, sublayer.write_scale.factor
    if isinstance(sublayer.output, torch.nn.Identity):
        return read, added, norms
    return read, torch.ones(()), {**norms, "output": Norm(kind, norms["output"].gain * added)}


def input_norm(sublayer: Sublayer, kind: str, gain: Tensor | None) -> Norm:
    """The norm of what a sublayer reads: with the gain folded into its matrices, or the map's own parameters."""
    norm = sublayer.input
    if kind not in ("tanh", "erf"):
        return Norm(kind, torch.ones(DIM, dtype=torch.float64) if gain is None else gain)
    return Norm(kind, norm.gain(), norm.slope, norm.shift, norm.bias)


def inner_norm(inner: torch.nn.Module, kind: str) -> Norm:
    """The norm inside a sublayer."""
    return Norm(kind, torch.ones(()) if isinstance(inner, torch.nn.Identity) else inner.gain())


def _gain(norm: torch.nn.Module) -> Tensor:
    gain = getattr(norm, "gain", None)
    return gain() if isinstance(gain, LearnedScale) else torch.ones(DIM, dtype=torch.float64)


def block_of(model: Transformer, layer: int, kind: str) -> Block:
    """The weights of a block as plain tensors."""
    block = model.decoder[layer]
    attention, mlp = block.attention.f, block.feedforward.f
    read, added, first = folded(block.attention, kind)
    mlp_read, mlp_added, second = folded(block.feedforward, kind)
    q, k, v = (W.flatten(1) * read for W in attention.W_QKV.unbind(1))
    head_ones = torch.ones(HEADS, HEAD, dtype=torch.float64)
    gains = head_ones if attention.score_gain is None else attention.score_gain()
    of_heads = {letter: attention.norms[letter].gain for letter in attention.norms}
    hidden = torch.ones(HIDDEN, dtype=torch.float64) if mlp.hidden_scale is None else mlp.hidden_scale()
    return Block(
        layer=layer + 1, depth=len(model.decoder), q=q, k=k, v=v, o=attention.W_O.flatten(0, 1) * added,
        temperature=attention.score_scale.factor,
        up=mlp.W_in * mlp_read * hidden, up_bias=torch.zeros(HIDDEN) if mlp.b_in is None else mlp.b_in,
        down=mlp.W_out * mlp_added, down_bias=torch.zeros(DIM) if mlp.b_out is None else mlp.b_out * mlp_added,
        norms={
            **{f"attention.{slot}": norm for slot, norm in first.items()},
            **{f"mlp.{slot}": norm for slot, norm in second.items()},
            **{letter: Norm(kind, gains if of_heads.get(letter) is None else of_heads[letter]()) for letter in "qkv"},
            "attention.input": input_norm(block.attention, kind, attention.input_gains and attention.input_gains()[0]),
            "mlp.input": input_norm(block.feedforward, kind, mlp.input_gain and mlp.input_gain()),
            "attention.inner": inner_norm(attention.inner, kind),
            "mlp.inner": inner_norm(mlp.inner, kind),
        },
        sinks=attention.sink,
        gate=None if attention.W_G is None else attention.W_G * read,
        alpha={
            name: sublayer.alpha() if sublayer.signed else sublayer.alpha().abs()
            for name, sublayer in (("attention", block.attention), ("mlp", block.feedforward)) if sublayer.alpha is not None
        },
    )  # fmt: skip


def readout(model: Transformer, x: Tensor) -> Tensor:
    """The library's last layers by hand: a LayerNorm, hidden ReLU layers, logits."""
    last = model.readout
    x = last.norm(x)
    for i, weight in enumerate(last.weights):
        x = (torch.relu(x) if i else x) @ weight + (0.0 if last.biases is None else last.biases[i])
    return x if last.scale is None else x * last.scale()


def test_every_named_scheme_has_a_reference() -> None:
    assert set(REFERENCES) == set(NAMED)


def cases() -> list[tuple[str, str]]:
    """Every scheme with both norms, except nGPT, which is defined on the sphere, and schemes that have a map in their place."""
    norms = [(name, kind) for name, scheme in NAMED.items() if not scheme.pointwise for kind in ("rms", "layer")]
    return [pair for pair in norms if pair != ("ngpt-lerp", "layer")] + [("dyt", "tanh"), ("derf", "erf")]


@pytest.mark.parametrize(("name", "kind"), cases())
def test_a_model_is_the_block_of_the_paper(name: str, kind: str) -> None:
    layers = 4 if name == "mix" else 3
    model = drawn(name, kind, layers)
    characters = torch.randint(7, (1, 6), generator=torch.Generator().manual_seed(2))
    row = Row(characters, torch.arange(6)[None], CausalMask())
    with torch.no_grad():
        x = model.embed(row)[0]
        states = [x]
        for layer in range(layers):
            x = REFERENCES[name](block_of(model, layer, kind), x)
            states.append(x)
        for before, after in pairwise(states):
            assert float((before - after).norm()) > 1e-3  # every block matters
        expected, found = readout(model, x), model(row)[0]
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), float((found - expected).abs().max())


def test_minimax_is_the_code_of_its_release() -> None:
    """MiniMax-01 as transformers has it: h ← Norm(h); h ← α·h + f(h) in every sublayer, a norm after the last."""
    model = drawn("minimax", "rms", 3)
    assert NAMED["minimax"].attention.number("carry", NAMED["minimax"].place(0, 80)) == pytest.approx(
        3.5565588200778455, rel=1e-15
    )
    embed, alpha = model.embed, 6**0.25
    row = Row(torch.randint(7, (1, 6), generator=torch.Generator().manual_seed(2)), torch.arange(6)[None], CausalMask())
    norms = [Norm("rms", torch.ones(DIM, dtype=torch.float64))]  # of the embeddings: the first norm of the first block
    with torch.no_grad():
        kept, embed.norm = embed.norm, torch.nn.Identity()
        h = embed(row)[0]
        embed.norm = kept
        for layer in range(3):
            b = block_of(model, layer, "rms")
            for f, stream in ((b.attention, "attention.stream"), (b.mlp, "mlp.stream")):
                residual = norms[-1](h)
                h = alpha * residual + f(residual)
                norms.append(b.norm(stream))
        assert torch.allclose(model(row)[0], readout(model, norms[-1](h)), rtol=1e-12, atol=1e-12)
