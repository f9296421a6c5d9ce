"""A watched training: every number of a snapshot against plain hooks, autograd and draws, of the parameters as they are now."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.models import COMMON, GPT2, GROUPED, WIDE, WORDS, built, some_tokens
from normscope.watch import Snapshot, Watch

SPARSE, NOISE = 0.95, 0.1  # the largest weight of a near-one-hot row, and the noise of collapse
DRAWS = 100_000


@dataclass(frozen=True)
class Case:
    """A model of the library, and where plain hooks find in its blocks what a snapshot counts.

    Attributes:
        config, options, maker: of the model.
        blocks: the list of its blocks.
        computed: the modules whose outputs attention and the feed-forward layer compute, before an output norm.
        added: the modules whose outputs are added to the stream.
        after: the modules whose outputs are the states after attention and the block, if norms of the sum are.
        gains: modules of norms by sublayer and slot.
        query: the module whose first rows are W_Q, which is enlarged for near-one-hot attention.
        centred: whether norms are LayerNorms.
        offset: gain − weight.
        collapses: whether noise on the norms of keys matters.
        logits: whether the argument of the softmax are the logits.
        alibi: whether positions add a bias.
    """

    config: str
    options: dict[str, Any]
    blocks: str
    computed: tuple[str, str]
    gains: dict[str, str]
    query: str
    added: tuple[str, str] | None = None
    after: tuple[str, str] | None = None
    maker: str = "AutoModelForCausalLM"
    centred: bool = False
    offset: float = 0.0
    collapses: bool = True
    logits: bool = True
    alibi: bool = False


LLAMA = {"attention input": "input_layernorm", "feedforward input": "post_attention_layernorm"}
OUTPUT = {"attention output": "post_attention_layernorm", "feedforward output": "post_feedforward_layernorm"}
BLOCK = ("self_attn", "mlp")
QK = {"attention q": "self_attn.q_norm", "attention k": "self_attn.k_norm"}
BLOOM = {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "gpt2": Case(
        "GPT2Config",
        {**GPT2, "resid_pdrop": 0.3},
        "transformer.h",
        ("attn", "mlp"),
        {"attention input": "ln_1", "feedforward input": "ln_2"},
        "attn.c_attn",
        centred=True,
    ),
    "llama": Case("LlamaConfig", GROUPED, "model.layers", BLOCK, LLAMA, "self_attn.q_proj"),
    "gemma2": Case(
        "Gemma2Config",
        {**WIDE, "attn_logit_softcapping": None},
        "model.layers",
        BLOCK,
        {"attention input": "input_layernorm", "feedforward input": "pre_feedforward_layernorm"} | OUTPUT,
        "self_attn.q_proj",
        added=("post_attention_layernorm", "post_feedforward_layernorm"),
        offset=1.0,
    ),
    "olmo2": Case(
        "Olmo2Config",
        GROUPED,
        "model.layers",
        BLOCK,
        OUTPUT | QK,
        "self_attn.q_norm",
        added=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "qwen3": Case("Qwen3Config", WIDE, "model.layers", BLOCK, LLAMA | QK, "self_attn.q_norm", collapses=False),
    "bert": Case(
        "BertConfig",
        COMMON,
        "bert.encoder.layer",
        ("attention.output.dense", "output.dense"),
        {"attention stream": "attention.output.LayerNorm", "feedforward stream": "output.LayerNorm"},
        "attention.self.query",
        after=("attention.output.LayerNorm", "output.LayerNorm"),
        maker="AutoModelForMaskedLM",
        centred=True,
    ),
    "gpt-oss": Case("GptOssConfig", WIDE | EXPERTS, "model.layers", BLOCK, LLAMA, "self_attn.q_proj", logits=False),
    "bloom": Case(
        "BloomConfig",
        BLOOM,
        "transformer.h",
        ("self_attention.dense", "mlp.dense_4h_to_h"),
        {"attention input": "input_layernorm", "feedforward input": "post_attention_layernorm"},
        "self_attention.query_key_value",
        centred=True,
        alibi=True,
    ),
}


@dataclass
class Plain:
    """What plain hooks saw in one pass: inputs and outputs of modules, and arguments and results of every softmax."""

    entered: dict[nn.Module, Tensor] = field(default_factory=dict)
    left: dict[nn.Module, Tensor] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


def first_tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else next(value for value in values if isinstance(value, Tensor))


@torch.no_grad()
def plain_pass(model: nn.Module, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Plain:
    """Run a model with hooks on all of its modules, and F.softmax recorded."""
    plain, softmax = Plain(), F.softmax
    training = model.training
    model.eval()

    def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        if any(isinstance(value, Tensor) for value in given):
            plain.entered[module] = first_tensor(given)

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor | tuple):
            plain.left[module] = first_tensor(output)

    def recorded(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = softmax(x, *args, **kwargs)
        if x.ndim == 4:
            plain.logits.append(x.detach().double())
            plain.weights.append(result.detach().double())
        return result

    handles = [module.register_forward_pre_hook(entering, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(leaving) for module in model.modules()]
    with monkeypatch.context() as patched:
        patched.setattr(F, "softmax", recorded)
        run()
    for handle in handles:
        handle.remove()
    model.train(training)
    return plain


def centred(x: Tensor, on: bool) -> Tensor:
    return x - x.mean(-1, keepdim=True) if on else x


def state_numbers(x: Tensor, mask: Tensor, layer_norm: bool) -> dict[str, float]:
    """Norm, cosine, rank and massive of states, by their definitions."""
    x = x.double()
    counted = mask.clone()
    counted[:, 0] = False
    tokens = centred(x[counted], layer_norm)
    theta = tokens / tokens.norm(dim=-1, keepdim=True)
    n, squares = len(tokens), torch.linalg.svdvals(theta).square()
    size = x[mask].abs().flatten()
    return {
        "norm": float(tokens.norm(dim=-1).mean()),
        "cosine": float(((theta @ theta.T).sum() - n) / (n * (n - 1))),
        "rank": float(squares.sum() ** 2 / squares.square().sum()),
        "massive": float(size.max() / size.median()),
    }


def block_numbers(x: Tensor, y: Tensor) -> dict[str, float]:
    """Update and rotation of tokens."""
    angle = torch.arccos(F.cosine_similarity(x, y, dim=-1)).rad2deg()
    return {"update": float(((y - x).norm(dim=-1) / x.norm(dim=-1)).mean()), "rotation": float(angle.mean())}


def speed(x: Tensor, y: Tensor, A: Tensor) -> float:
    """The median of |P_θ A| / tan of the angle between x and y."""
    theta = x / x.norm(dim=-1, keepdim=True)
    across = A - (A * theta).sum(-1, keepdim=True) * theta
    angle = torch.arccos(F.cosine_similarity(x, y, dim=-1))
    return float((across.norm(dim=-1) / angle.tan()).median())


def sampled_collapse(raw: Tensor, shift: Tensor) -> float:
    """The share of draws in which another key than the first choice has the largest score."""
    generator = torch.Generator().manual_seed(0)
    kappa = (2 * torch.rand(DRAWS, len(raw), generator=generator, dtype=torch.float64) - 1) * math.sqrt(3) * NOISE
    noisy = raw * (1 + kappa) + shift
    return float((noisy.argmax(-1) != (raw + shift).argmax()).double().mean())


def assert_near(row: Any, expected: dict[str, float], error: float = 2e-5) -> None:
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=error, abs=error), (name, dict(row))


def at(module: nn.Module, path: str) -> nn.Module:
    return module.get_submodule(path)


def change(model: Any, tokens: Tensor, rate: float = 0.05) -> None:
    """A step of training that changes every parameter."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss = model(tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    optimizer.step()


def probed(watch: Watch) -> Snapshot:
    snapshot = watch.probe()
    assert snapshot is not None
    return snapshot


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_that_of_plain_hooks_on_the_changed_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tokens = CASES[name], some_tokens(2, 12)
    model = built(case.config, case.options, case.maker).requires_grad_(True)
    watch = Watch(model, probe=tokens)
    torch.manual_seed(1)
    change(model, tokens)
    with torch.no_grad():
        for block in at(model, case.blocks):  # after the watch was made: attention becomes near one-hot
            query = at(block, case.query).weight
            query *= 12 if case.query != "self_attention.query_key_value" else 4
    snapshot = probed(watch)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    model.set_attn_implementation("eager")
    check_states(case, model, snapshot, plain := plain_pass(model, lambda: model(tokens), monkeypatch), mask)
    check_sublayers(case, model, snapshot, plain, mask)
    check_heads(case, snapshot, plain, mask)
    check_gains(case, model, snapshot)
    check_gradients(case, model, snapshot)


def check_states(case: Case, model: nn.Module, snapshot: Snapshot, plain: Plain, mask: Tensor) -> None:
    blocks = list(at(model, case.blocks))
    states = [*(plain.entered[block] for block in blocks), plain.left[blocks[-1]]]
    layers = snapshot.tables["layers"]
    assert list(layers.layer) == list(range(len(states)))
    counted = mask.clone()
    counted[:, 0] = False
    for x, (_, row) in zip(states, layers.iterrows(), strict=True):
        assert_near(row, state_numbers(x, mask, case.centred))
    for layer, (x, y) in enumerate(itertools.pairwise(states)):
        x, y = (centred(z.double()[counted], case.centred) for z in (x, y))
        assert_near(layers.loc[layer], block_numbers(x, y))


def check_sublayers(case: Case, model: nn.Module, snapshot: Snapshot, plain: Plain, mask: Tensor) -> None:
    sublayers, layers = snapshot.tables["sublayers"].set_index(["layer", "sublayer"]), snapshot.tables["layers"]
    counted = mask.clone()
    counted[:, 0] = False

    def seen(x: Tensor) -> Tensor:
        return centred(x.double()[counted], case.centred)

    for layer, block in enumerate(at(model, case.blocks)):
        x = plain.entered[block]
        for number, sublayer in enumerate(("attention", "feedforward")):
            A, u = (plain.left[at(block, paths[number])].view_as(x) for paths in (case.computed, case.added or case.computed))
            after = x + u if case.after is None else plain.left[at(block, case.after[number])]
            before = x if case.after is None else at(block, case.after[number])(x)
            update = float((seen(u).norm(dim=-1) / seen(x).norm(dim=-1)).mean())
            assert_near(sublayers.loc[layer, sublayer], {"update": update, "scale": 1.0, "carry": 1.0})
            if sublayer == "attention":
                slower = seen(A).norm(dim=-1) / seen(u).norm(dim=-1)  # an output norm divides the update by |A|
                theory = float((seen(x).norm(dim=-1) * slower).median())
                measured = speed(seen(before), seen(after), seen(A))
                assert_near(layers.loc[layer], {"speed": measured, "theory": theory}, 1e-4)
            x = after


def check_heads(case: Case, snapshot: Snapshot, plain: Plain, mask: Tensor) -> None:
    heads = snapshot.tables["heads"].set_index(["layer", "head"])
    tokens, counted = mask.shape[1], mask.clone()
    counted[:, 0] = False
    some_sparse = False
    for layer, (logits, every) in enumerate(zip(plain.logits, plain.weights, strict=True)):
        weights = every[..., :tokens]
        for head in range(weights.shape[1]):
            row, mine = heads.loc[layer, head], weights[:, head][counted]
            entropy = torch.special.entr(mine).sum(-1).mean()
            sparse = mine.amax(-1) >= SPARSE
            some_sparse |= bool(sparse.any())
            expected = {"entropy": float(entropy), "sink": float(mine[:, 0].mean()), "sparse": float(sparse.double().mean())}
            assert_near(row, expected, 1e-4)
            if case.logits:
                assert_near(row, {"logit": float(logits[:, head].max())}, 1e-4)
                check_collapse(case, row.collapse, logits[:, head][counted][sparse], head)
    assert some_sparse


def check_collapse(case: Case, collapse: float, logits: Tensor, head: int) -> None:
    if not len(logits) or not case.collapses:
        assert (collapse == 0) if len(logits) else math.isnan(collapse)
        return
    slope = 2.0 ** (-2 * (head + 1)) if case.alibi else 0.0  # of 4 heads
    drawn = []
    for row in logits:
        keys = row > -1e30
        shift = slope * torch.arange(len(row), dtype=torch.float64)
        drawn.append(sampled_collapse((row - shift)[keys], shift[keys]))
    assert collapse == pytest.approx(np.mean(drawn), abs=0.005)


def check_gains(case: Case, model: nn.Module, snapshot: Snapshot) -> None:
    norms = snapshot.tables["norms"].set_index("norm")
    for layer, block in enumerate(at(model, case.blocks)):
        for place, path in case.gains.items():
            gain, row = at(block, path).weight.detach() + case.offset, norms.loc[f"layer {layer} {place}"]
            assert row.layer == layer
            expected = {"gain": float(gain.mean()), "gain_min": float(gain.min()), "gain_max": float(gain.max())}
            assert_near(row, expected, 1e-6)


def check_gradients(case: Case, model: nn.Module, snapshot: Snapshot) -> None:
    for layer, block in enumerate(at(model, case.blocks)):
        gradients = torch.cat([p.grad.flatten() for p in block.parameters() if p.grad is not None])
        assert snapshot.tables["layers"].loc[layer].gradient == pytest.approx(float(gradients.norm()), rel=1e-5)
    every = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert snapshot.tables["steps"].gradient[0] == pytest.approx(float(every.norm()), rel=1e-5)


class PlainAttention(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class PlainBlock(nn.Module):
    """A block whose updates have learned scales, at places that ``kind`` names."""

    def __init__(self, dim: int, kind: str, start: float) -> None:
        super().__init__()
        self.kind = kind
        self.attn, self.mlp = PlainAttention(dim, 4), nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        shape = (dim,) if "channels" in kind else ()
        self.a, self.b = (nn.Parameter(torch.full(shape, start)) for _ in range(2))
        self.keep = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if "post" in self.kind:
            x = self.ln1(x + self.a * self.attn(x))
            return self.ln2(x + self.b * self.mlp(x))
        if "output" in self.kind:
            x = x + self.a * self.ln1(self.attn(x))
            return x + self.b * self.ln2(self.mlp(x))
        x = (self.keep if "carry" in self.kind else 1) * x + self.a * self.attn(self.ln1(x))
        return x + self.b * self.mlp(self.ln2(x))


class PlainGPT(nn.Module):
    def __init__(self, kind: str = "", start: float = 1.0, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, kind, start) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def moved(model: nn.Module, size: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn_like(parameter)


@pytest.mark.parametrize(
    ("kind", "start"), [("", 0.5), ("post", 0.5), ("output", 0.5), ("carry", 0.5), ("channels", 1e-4), ("output channels", 0.5)]
)
def test_learned_scales_are_those_of_now(kind: str, start: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = PlainGPT(kind, start), some_tokens(2, 12)
    watch = Watch(model, probe=tokens)
    moved(model)
    with torch.no_grad():
        for block in model.blocks:
            block.a += 0.3
            block.b -= 0.2
    snapshot, plain = probed(watch), plain_pass(model, lambda: model(tokens), monkeypatch)
    sublayers, layers = snapshot.tables["sublayers"].set_index(["layer", "sublayer"]), snapshot.tables["layers"]
    scales = snapshot.tables["scales"].set_index("name")
    for layer, block in enumerate(model.blocks):
        x = plain.entered[block]
        for sublayer, part, norm, scale in (
            ("attention", block.attn, block.ln1, block.a),
            ("feedforward", block.mlp, block.ln2, block.b),
        ):
            carry = float(block.keep) if kind == "carry" and sublayer == "attention" else 1.0
            A = plain.left[part]
            update = (scale * (plain.left[norm] if "output" in kind else A)).detach()
            before, after = carry * x, carry * x + update
            if kind == "post":
                before, after = norm(before).detach(), plain.left[norm]
            seen = {name: centred(y[:, 1:].flatten(0, 1).double(), True) for name, y in (("x", x), ("u", update))}
            size = float((seen["u"].norm(dim=-1) / seen["x"].norm(dim=-1)).mean())
            assert_near(sublayers.loc[layer, sublayer], {"update": size, "scale": float(scale.mean()), "carry": carry}, 1e-4)
            if sublayer == "attention":
                tokens_of = [centred(y[:, 1:].flatten(0, 1).double(), True) for y in (before, after, A)]
                assert_near(layers.loc[layer], {"speed": speed(*tokens_of)}, 1e-4)
                if not kind:  # θ̇ = (α/r) P_θ A
                    r = tokens_of[0].norm(dim=-1).median()
                    assert_near(layers.loc[layer], {"theory": float(r / scale)}, 1e-4)
            x = after
        for name, parameter in (("a", block.a), ("b", block.b), ("keep", block.keep)):
            expected = {"mean": float(parameter.mean()), "min": float(parameter.min()), "max": float(parameter.max())}
            assert_near(scales.loc[f"blocks.{layer}.{name}"], expected, 1e-6)
            assert scales.loc[f"blocks.{layer}.{name}"].layer == layer
