"""A watched training: every number of a snapshot against plain hooks, autograd and draws, of the parameters as they are now."""

import copy
import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding

import normscope as ns
from helpers.models import COMMON, GPT2, GROUPED, WIDE, WORDS, built, some_tokens
from normscope.errors import InputError
from normscope.models import NOTHING, Sample, open_model
from normscope.schemes import NAMED
from normscope.transformer import Transformer, TransformerConfig
from normscope.watch import Snapshot, Watch
from normscope.watch.packed import Packed, Sent, Transfer
from normscope.watch.probe_batch import sample_of

SPARSE, NOISE = 0.95, 0.3  # the largest weight of a near-one-hot row, and the noise of collapse
DRAWS = 20_000  # for each of many rows


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
        query: the module of W_Q, or of W_Q, W_K and W_V, which is enlarged for near-one-hot attention.
        sharper: by how much.
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
    sharper: float = 12.0


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
        sharper=60.0,
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
        sharper=4.0,
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
    return float((across.norm(dim=-1) / angle.tan()).median().detach())


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
    watch = Watch(model, probe=tokens, noise=NOISE)
    watch.probe()  # what the first pass has shown is not looked for again
    torch.manual_seed(1)
    change(model, tokens)
    with torch.no_grad():
        for block in at(model, case.blocks):  # after the watch was made: attention becomes near one-hot
            at(block, case.query).weight.mul_(case.sharper)
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
    assert not (case.collapses and case.logits) or heads.collapse.max() > 0.02


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
    assert collapse == pytest.approx(np.mean(drawn), abs=0.01)


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
        assert snapshot.tables["layers"].loc[layer].gradient == pytest.approx(float(gradient_of(block).norm()), rel=1e-5)
    assert snapshot.tables["steps"].gradient[0] == pytest.approx(float(gradient_of(model).norm()), rel=1e-5)


def gradient_of(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


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


STARTS = {"": 0.0, "post": 0.5, "output": 0.5, "carry": 0.5, "channels": 0.0, "small channels": 1e-4, "output channels": 0.5}


@pytest.mark.parametrize(("kind", "start"), STARTS.items())
def test_learned_scales_are_those_of_now(kind: str, start: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = PlainGPT(kind, start), some_tokens(2, 12)
    watch = Watch(model, probe=tokens)
    watch.probe()
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
            carry = float(block.keep.detach()) if kind == "carry" and sublayer == "attention" else 1.0
            A = plain.left[part]
            update = (scale * (plain.left[norm] if "output" in kind else A)).detach()
            before, after = carry * x, carry * x + update
            if kind == "post":
                before, after = norm(before).detach(), plain.left[norm]
            seen = {name: centred(y[:, 1:].flatten(0, 1).double(), True) for name, y in (("x", x), ("u", update))}
            size = float((seen["u"].norm(dim=-1) / seen["x"].norm(dim=-1)).mean())
            magnitude = scale.detach().square().mean().sqrt()
            expected = {"update": size, "scale": float(magnitude), "carry": carry}
            assert_near(sublayers.loc[layer, sublayer], expected, 1e-4)
            if sublayer == "attention":
                tokens_of = [centred(y[:, 1:].flatten(0, 1).double(), True) for y in (before, after, A)]
                assert_near(layers.loc[layer], {"speed": speed(*tokens_of)}, 1e-4)
                if not kind:  # θ̇ = (α/r) P_θ A
                    r = tokens_of[0].norm(dim=-1).median()
                    assert_near(layers.loc[layer], {"theory": float(r / magnitude)}, 1e-4)
            x = after
        for name in ("a", "b", "keep"):
            parameter = getattr(block, name).detach()
            expected = {"mean": float(parameter.mean()), "min": float(parameter.min()), "max": float(parameter.max())}
            assert_near(scales.loc[f"blocks.{layer}.{name}"], expected, 1e-6)
            assert scales.loc[f"blocks.{layer}.{name}"].layer == layer


@pytest.mark.parametrize("lerp", [False, True])
def test_learned_steps_of_a_model_of_ours_are_those_of_now(lerp: bool) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 32, "heads": 2, "head": 8, "feedforward": 32, "readout": (32,), "frequencies": 4}
    scheme = NAMED["ngpt-lerp" if lerp else "ngpt"]
    model = Transformer(TransformerConfig(scheme, layers=2, **sizes))
    watch, states = Watch(model, probe=torch.randint(5, (2, 12))), list[Tensor]()
    watch.probe()
    moved(model, 0.2)
    handles = [block.register_forward_pre_hook(lambda module, args: states.append(args[0].double())) for block in model.decoder]
    snapshot = probed(watch)
    for handle in handles:
        handle.remove()
    rows = snapshot.tables["sublayers"].set_index(["layer", "sublayer"])
    for layer, block in enumerate(model.decoder):
        for name in ("attention", "feedforward"):
            learned = getattr(block, name).alpha
            alpha = (learned.value * learned.ratio).detach().abs()
            expected = {"scale": float(alpha.square().mean().sqrt()), "carry": 1 - float(alpha.mean()) if lerp else 1.0}
            assert_near(rows.loc[layer, name], expected)
    layers, final = snapshot.tables["layers"], getattr(model.readout.norm, "kind", "rms")
    assert_near(layers.loc[1], state_numbers(states[1], torch.ones(2, 12, dtype=torch.bool), final == "layer"))
    assert_near(layers.loc[0], block_numbers(*(centred(x[:, 1:].flatten(0, 1), final == "layer") for x in states)))


class PlainViT(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.patches, self.cls = nn.Conv2d(3, dim, 4, 4), nn.Parameter(torch.randn(1, 1, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 48, 0.1, F.gelu, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def test_a_module_that_reads_pixels_is_opened_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, pixels = PlainViT().train(), torch.randn(3, 3, 16, 16)
    watch = Watch(model, probe=(pixels, torch.tensor([0, 1, 2])))
    moved(model)
    snapshot, mask = probed(watch), torch.ones(3, 17, dtype=torch.bool)
    torch.backends.mha.set_fastpath_enabled(False)  # which calls no modules
    plain = plain_pass(model, lambda: model(pixels), monkeypatch)
    torch.backends.mha.set_fastpath_enabled(True)
    states = [*(plain.entered[layer] for layer in model.layers), plain.left[model.layers[-1]]]
    for x, (_, row) in zip(states, snapshot.tables["layers"].iterrows(), strict=True):
        assert_near(row, state_numbers(x, mask, True))
    assert len(snapshot.tables["heads"]) == 8


def test_a_picture_model_of_the_library_is_probed_with_a_mapping_or_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {name: size for name, size in COMMON.items() if name not in ("vocab_size", "max_position_embeddings")}
    options |= {"image_size": 16, "patch_size": 4}
    model, pixels = built("ViTConfig", options, "AutoModelForImageClassification"), torch.randn(2, 3, 16, 16)
    mapped = probed(Watch(model, {"pixel_values": pixels, "labels": torch.zeros(2)}))
    listed = probed(Watch(model, [pixels, None]))
    model.set_attn_implementation("eager")
    plain = plain_pass(model, lambda: model(pixels), monkeypatch)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    states = [*(plain.entered[layer] for layer in layers), plain.left[layers[-1]]]
    mask = torch.ones(2, 17, dtype=torch.bool)
    for snapshot in (mapped, listed):
        for x, (_, row) in zip(states, snapshot.tables["layers"].iterrows(), strict=True):
            assert_near(row, state_numbers(x, mask, True))
        for layer, weights in enumerate(plain.weights):
            entropy = torch.special.entr(weights[:, :, 1:]).sum(-1).mean((0, 2))
            rows = snapshot.tables["heads"].set_index("layer").loc[layer]
            assert list(rows.entropy) == pytest.approx(entropy.tolist(), abs=1e-4)


def joined(rows: list[Plain]) -> Plain:
    """Passes of single rows as one of all of them, padded with what must not count."""

    def padded(tensors: list[Tensor], dims: int, value: float) -> Tensor:
        missing = [max(y.shape[-2] for y in tensors) - x.shape[-2] for x in tensors]
        return torch.cat([F.pad(x, (0, n * (dims > 1), 0, n), value=value) for x, n in zip(tensors, missing, strict=True)])

    def states(name: str) -> dict[nn.Module, Tensor]:
        several = [getattr(row, name) for row in rows]
        return {key: padded([each[key] for each in several], 1, 1e3) for key, x in several[0].items() if x.ndim == 3}

    logits, weights = zip(*(row.logits for row in rows), strict=True), zip(*(row.weights for row in rows), strict=True)
    masked = [padded(list(x), 2, -1e38) for x in logits]
    return Plain(states("entered"), states("left"), masked, [padded(list(x), 2, 0.0) for x in weights])


@pytest.mark.parametrize(("name", "side"), [("llama", "right"), ("llama", "left"), ("bert", "right")])
def test_a_padded_probe_gives_the_numbers_of_its_rows(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, lengths, tokens = CASES[name], (12, 7), some_tokens(2, 12)
    model = built(case.config, case.options, case.maker)
    with torch.no_grad():
        for block in at(model, case.blocks):
            at(block, case.query).weight.mul_(case.sharper)
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    given, seen = tokens.masked_fill(~mask, 3), mask
    if side == "left":
        given, seen = (torch.stack([row.roll(12 - n) for row, n in zip(x, lengths, strict=True)]) for x in (given, mask))
    watch = Watch(model, {"input_ids": given, "attention_mask": seen.long()}, noise=NOISE)
    watch.probe()
    snapshot = probed(watch)
    model.set_attn_implementation("eager")
    rows = [tokens[:1], tokens[1:, : lengths[1]]]
    plain = joined([plain_pass(model, lambda row=row: model(row), monkeypatch) for row in rows])
    check_states(case, model, snapshot, plain, mask)
    check_sublayers(case, model, snapshot, plain, mask)
    check_heads(case, snapshot, plain, mask)


def test_a_model_in_half_precision_and_one_under_autocast_give_their_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    case, tokens = CASES["llama"], some_tokens(2, 12)
    for half in (True, False):
        model = built(case.config, case.options)
        model = model.to(torch.bfloat16) if half else model
        watch = Watch(model, tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=not half):
            snapshot, plain = probed(watch), plain_pass(model, lambda model=model: model(tokens), monkeypatch)
        blocks = list(at(model, case.blocks))
        states = [*(plain.entered[block] for block in blocks), plain.left[blocks[-1]]]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        rows = [row for _, row in snapshot.tables["layers"].iterrows()]
        assert_near(rows[0], state_numbers(states[0], mask, False))  # before any arithmetic: statistics are not rounded
        for x, row in zip(states[1:], rows[1:], strict=True):
            assert_near(row, state_numbers(x, mask, False), 0.03)


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a training depends on; without Python's generator, which the run-time type checks of tests draw from."""
    config = getattr(model, "config", None)
    modules = list(model.modules())
    return {
        "parameters": [(id(p), p.data_ptr(), p.requires_grad, p._version) for p in model.parameters()],
        "values": [x.detach().clone() for x in (*model.parameters(), *model.buffers())],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "modes": [module.training for module in modules],
        "hooks": [(key, dict(value)) for module in modules for key, value in vars(module).items() if "hook" in key and value],
        "names": [sorted(vars(module)) for module in modules],
        "config": copy.deepcopy(vars(config)) if hasattr(config, "to_dict") else None,
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "grad": torch.is_grad_enabled(),
    }


def same_in_all(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor | np.ndarray):
        return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_in_all, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "plain", "zero scales", "bfloat16", "vit"])
def test_nothing_of_the_model_or_of_random_generators_changes(name: str) -> None:
    torch.manual_seed(0)
    plain = {"plain": PlainGPT(), "zero scales": PlainGPT("", 0.0), "bfloat16": PlainGPT().bfloat16(), "vit": PlainViT()}
    case = CASES.get(name)
    model = plain[name] if case is None else built(case.config, case.options, case.maker).requires_grad_(True)
    model.train()
    next(model.children()).eval()  # modes differ
    next(model.parameters()).requires_grad_(False)
    probe = torch.randn(2, 3, 16, 16) if name == "vit" else some_tokens(2, 12)
    result = model(probe)
    (result if isinstance(result, Tensor) else result.logits).float().square().mean().backward()
    model.register_forward_hook(lambda *given: None)
    before = everything(model)
    watch = Watch(model, probe)
    watch.probe()
    watch.probe(loss=1.0)
    watch.close()
    after = everything(model)
    for key, value in before.items():
        assert same_in_all(value, after[key]), key


def test_the_first_step_and_every_nth_are_probed_until_the_watch_is_closed() -> None:
    torch.manual_seed(0)
    model, tokens, seen = PlainGPT(), some_tokens(2, 8), list[Snapshot]()
    with ns.watch(model, probe=tokens, every=3, to=seen.append) as watch:
        assert [step for step in range(1, 8) if watch.due(step)] == [1, 3, 6]
        for _ in range(7):
            watch.step(loss=torch.tensor(2.0), rate=1e-3)
    watch.step(loss=1.0, step=9)
    assert [snapshot.step for snapshot in seen] == [1, 3, 6]
    row = seen[-1].tables["steps"].iloc[0]
    assert (row.step, row.loss, row.rate) == (6, 2.0, 1e-3)
    assert 0 < row.probe_seconds <= row.seconds
    assert all(table.columns[0] == "step" and (table.step == 6).all() for table in seen[-1].tables.values())
    assert not watch.due(12)


def test_the_loop_may_number_its_steps_and_continue() -> None:
    model, tokens = PlainGPT(), some_tokens(2, 8)
    watch = Watch(model, tokens, every=10, start=95)
    for step in (99, 100, 101, 110):
        watch.step(step=step)
    watch.step()
    assert list(watch.tables["steps"].step) == [100, 110]
    assert watch.steps == 111


def test_snapshots_are_kept_in_memory_by_default_and_the_model_is_not() -> None:
    model, tokens = PlainGPT(), some_tokens(2, 8)
    watch = Watch(model, tokens, every=1)
    for _ in range(3):
        watch.step()
    assert list(watch.tables["layers"].groupby("step").size()) == [3, 3, 3]
    gone = weakref.ref(model)
    del model, watch
    gc.collect()
    assert gone() is None


def test_a_watch_that_is_dropped_keeps_what_was_on_its_way() -> None:
    seen: list[Snapshot] = []
    watch = Watch(PlainGPT(), some_tokens(2, 8), to=seen.append)
    watch._launch(None, {})  # as a step on a GPU, which does not wait for the numbers
    assert not seen
    del watch
    gc.collect()
    assert [snapshot.step for snapshot in seen] == [0]


@pytest.mark.parametrize("numbered", [False, True])
def test_gradients_can_be_read_before_they_are_cleared(numbered: bool) -> None:
    torch.manual_seed(0)
    model, tokens = PlainGPT(), some_tokens(2, 8)
    watch, optimizer = Watch(model, tokens, every=2), torch.optim.SGD(model.parameters(), lr=0.1)
    norms = {}
    for step in range(1, 5):
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        norms[step] = [float(gradient_of(block).norm()) for block in model.blocks]
        watch.gradients(**({"step": step} if numbered else {}))
        optimizer.step()
        optimizer.zero_grad()
        watch.step(**({"step": step} if numbered else {}))
    layers = watch.tables["layers"]
    for step in (1, 2, 4):
        assert list(layers[layers.step == step].gradient[:2]) == pytest.approx(norms[step], rel=1e-5)
    watch.probe()
    assert watch.tables["layers"].gradient.iloc[-3:].isna().all()  # there are none now


def test_frozen_layers_have_no_gradient_and_parametrized_products_are_watched() -> None:
    model, tokens = PlainGPT(), some_tokens(2, 8)
    model.blocks[0].requires_grad_(False)
    nn.utils.parametrizations.spectral_norm(model.blocks[1].attn.out)
    watch = Watch(model, tokens, every=1)
    model(tokens).square().mean().backward()
    watch.step()
    assert watch.tables["layers"].gradient.isna().tolist() == [True, False, True]
    assert len(watch.tables["heads"]) == 8


def test_a_probe_that_fails_warns_once_and_training_goes_on() -> None:
    model, tokens = PlainGPT(), some_tokens(2, 8)
    watch = Watch(model, tokens, every=1)
    model.blocks[1].mlp[0] = nn.Linear(5, 5)  # as somebody may do to a model
    with pytest.warns(RuntimeWarning, match=r"could not probe the model at step 1.*watch\.close\(\)"):
        watch.step(loss=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.step(loss=1.0)
    assert watch.tables == {}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_destination_that_fails_warns_once() -> None:
    def refuse(snapshot: Snapshot) -> None:
        raise OSError("the disk is full")

    watch = Watch(PlainGPT(), some_tokens(2, 8), every=1, to=refuse)
    with pytest.warns(RuntimeWarning, match="the disk is full"):
        watch.step()
    watch.step()


FAULTS = {
    "blocks.2.attn.qkv": ("queries", 2),
    "blocks.1.mlp.0": ("feedforward output", 1),
    "blocks.2.attn.out": ("attention output", 2),
    "embedding": ("residual stream", 0),
}  # of a weight that is NaN


def test_non_finite_values_are_reported_with_tensor_layer_and_step() -> None:
    torch.manual_seed(0)
    model, tokens = PlainGPT(layers=4), some_tokens(2, 8)
    watch = Watch(model, tokens, every=1)
    watch.step()
    assert "faults" not in watch.tables
    F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    model.head.weight.grad[0] = torch.inf
    for step, (path, (first, layer)) in enumerate(FAULTS.items(), 2):
        broken = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            at(model, path).weight[:] = torch.nan
        watch.step()
        model.load_state_dict(broken)
        faults, layers = (watch.tables[name][watch.tables[name].step == step] for name in ("faults", "layers"))
        assert tuple(faults.iloc[0][["tensor", "layer"]]) == (first, layer)
        assert tuple(faults.iloc[-1][["tensor", "layer"]]) == ("gradient of head.weight", -1)
        assert faults["count"].dtype.kind == "i"
        assert faults["count"].min() > 0
        assert layers.norm.notna().tolist() == [number <= layer and path != "embedding" for number in range(5)]


def test_packed_numbers_of_several_processes_become_one_by_their_rule() -> None:
    packed = Packed()
    rows = [{"layer": 0}, {"layer": 1}]
    for rule in ("mean", "max", "min", "sum", "norm"):
        packed.add("layers", rule, torch.tensor([1.0, 2.0]), rows, rule)
    packed.add("steps", "loss", torch.tensor(3), {})
    sent = packed.sent()
    nan = math.nan
    second = [3.0, nan, 3.0, nan, 3.0, nan, 3.0, 5.0, 3.0, 2.0, 5.0]
    both = torch.cat((sent.numbers.tensor, torch.tensor([second], dtype=torch.float64)))
    tables = Packed().joined(Sent(sent.entries, Transfer(both, None)))
    assert tables["layers"].to_dict("list") == {
        "layer": [0, 1],
        "mean": [2.0, 2.0],
        "max": [3.0, 2.0],
        "min": [1.0, 2.0],
        "sum": [4.0, 7.0],
        "norm": [2.0, 2.0],
    }
    assert tables["steps"].to_dict("list") == {"loss": [4.0]}
    late = Packed()
    late.add("layers", "late", torch.tensor([7.0]), {"layer": 1})
    joined = late.joined(packed.sent())["layers"]
    assert joined.late.isna().tolist() == [True, False]
    assert joined["mean"].tolist() == [1.0, 2.0]


def test_all_kinds_of_batches_become_samples() -> None:
    case = CASES["llama"]
    model, tokens = open_model(built(case.config, case.options)), some_tokens(3, 12)
    labels = tokens.clone()
    labels[:, :4] = -100
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    for probe in (tokens, given, BatchEncoding(given), (tokens, labels), [tokens], (given, 1), Sample.of(tokens)):
        sample = sample_of(model, probe, 2, 8)
        assert torch.equal(sample.tokens, tokens[:2, :8])
        assert sample.attention_mask.all()
    assert torch.equal(sample_of(model, given, None, None).targets, labels)
    assert (sample_of(model, tokens, None, None).targets == NOTHING).all()
    positions = torch.arange(12).expand(3, -1) % 5
    sample = sample_of(model, {**given, "position_ids": positions}, 2, 8)
    assert sample.positions is not None
    assert torch.equal(sample.positions, positions[:2, :8])
    padded = {"input_ids": tokens, "attention_mask": torch.arange(12).expand(3, -1) >= torch.tensor([0, 3, 11])[:, None]}
    sample = sample_of(model, padded, None, None)
    assert sample.attention_mask.sum(1).tolist() == [12, 9, 1]
    mask = torch.tensor([[1] * 10 + [0, 0]])
    for one in ({"input_ids": tokens[0], "attention_mask": mask}, {"input_ids": tokens[0], "attention_mask": mask[0]}):
        assert sample_of(model, one, None, None).attention_mask.sum(1).tolist() == [10]  # a single row
    assert torch.equal(sample.tokens[1, :9], tokens[1, 3:])


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ("a text", "probe= is a str"),
        (None, "probe= is a NoneType"),
        ([], "probe= is a list"),
        (torch.empty(0, 4, dtype=torch.long), "probe= is empty"),
        (torch.zeros(2, 4, dtype=torch.long, device="meta"), "probe= is on meta and the model on cpu"),
        ({"ids": torch.zeros(2, 4)}, "none of tokens, input_ids"),
        (torch.randn(2, 4), "cannot read the probe"),
        (torch.full((2, 4), 64), "token 64 does not exist"),
    ],
)
def test_a_batch_that_the_model_cannot_read_is_refused(probe: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Watch(PlainGPT(), probe)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"every": 0}, "every=0"), ({"rows": 0}, "rows=0"), ({"tokens": 1.5}, r"tokens=1\.5"), ({"noise": 1.0}, r"noise=1\.0")],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Watch(PlainGPT(), some_tokens(2, 8), **options)


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="no blocks"):
        Watch(nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)), some_tokens(2, 8))


def test_the_decoder_of_an_encoder_decoder_reads_the_labels_of_a_batch() -> None:
    sizes = {
        "d_model": 32,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 8,
        "vocab_size": WORDS,
        "decoder_start_token_id": 0,
    }
    model = built("T5Config", sizes, "AutoModelForSeq2SeqLM")
    tokens, labels = some_tokens(2, 12), some_tokens(2, 9, seed=1)
    labels[1, 6:] = -100
    snapshot = probed(Watch(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}))
    with torch.no_grad():
        states = model(input_ids=tokens, labels=labels, output_hidden_states=True).decoder_hidden_states
    for layer in range(2):
        assert_near(snapshot.tables["layers"].loc[layer], state_numbers(states[layer], labels >= 0, False))
    assert len(snapshot.tables["sublayers"]) == 6


def test_further_numbers_keep_their_order_and_reserved_names_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Processes pack numbers in the order in which a loop gives them: a set would have another order on each."""
    watch, names = Watch(PlainGPT(), some_tokens(2, 8)), [f"number_{i}" for i in range(12)]
    snapshot = watch.probe(loss=1.0, **{name: float(i) for i, name in enumerate(names)}, seconds=-1.0)
    assert snapshot is not None
    steps = snapshot.tables["steps"]
    assert [name for name in steps if name.startswith("number")] == names
    assert float(steps["seconds"].iloc[0]) >= 0
    assert "does not record seconds=" in caplog.text
