"""Attention of many families and of modules of users, beside the weights that the families themselves return."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.models import open_model
from normscope.models.attention_interface import AttentionCall
from normscope.models.attention_trace import observing_attention
from normscope.models.describe import why_missing
from normscope.models.head_reader import HeadReader
from normscope.models.hooks import rotation_of
from normscope.models.observe import Softmax

SIZE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}
OLD_SIZE = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 60, "n_positions": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 60, "max_seq_len": 64},
    "falcon": {**SIZE, "alibi": False, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon with ALiBi": {**SIZE, "alibi": True, "multi_query": True, "new_decoder_architecture": False},
    "gptj": {**OLD_SIZE, "rotary_dim": 4},
    "codegen": {**OLD_SIZE, "rotary_dim": 4, "n_ctx": 64},
    "gpt_neo": {**SIZE, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "openai-gpt": OLD_SIZE,
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "vocab_size": 60},
    "mpnet": SIZE,
    "roformer": {**SIZE, "embedding_size": 32},
    "deberta-v2": {**SIZE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "vocab_size": 60},
    "albert": {**SIZE, "embedding_size": 16},
    "gemma2": {**SIZE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gpt_oss": {**SIZE, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 60},
}
ROWS, TOKENS, HEADS, HEAD = 2, 9, 4, 8


def weights(call: AttentionCall) -> Tensor:
    """The attention weights of a call."""
    sink = None if call.sink is None else call.sink[None, :, None, None]
    raw = (call.q @ call.k.mT).masked_fill(~call.mask, -torch.inf)
    return Softmax(call.scale, call.softcap, call.bias, sink).weights(raw)


def observed(
    model: nn.Module, run: Callable[[], Any], replace: Callable[[AttentionCall], Tensor] = AttentionCall.mixed
) -> tuple[Any, list[AttentionCall], dict[nn.Module, str]]:
    """What a model computes under observation, its attention, and what is not understood of it."""
    calls: list[AttentionCall] = []

    def observe(call: AttentionCall) -> Tensor:
        calls.append(call)
        return replace(call)

    with torch.no_grad(), observing_attention(model, observe) as unclear:
        result = run()
    return result, calls, unclear


def tiny(family: str) -> Any:
    """A random model whose attention is neither flat nor one-hot."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **FAMILIES[family])
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "sinks" in name:
            parameter.data.normal_(0, 1.0 if "sinks" in name else 0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_the_family_returns(family: str) -> None:
    model = tiny(family)
    tokens = torch.randint(3, 50, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens[:, :5]
    else:
        given["attention_mask"] = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [6]])).long()
    with torch.no_grad():
        plain = model(**given, output_attentions=True)
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    result, calls, unclear = observed(model, lambda: model(**given))
    expected = list(plain.attentions) if "attentions" in plain else list(plain.encoder_attentions)
    if model.config.is_encoder_decoder:
        expected += [x for pair in zip(plain.decoder_attentions, plain.cross_attentions, strict=True) for x in pair]
    assert len(calls) == len(expected)
    assert not unclear
    for call, by_family in zip(calls, expected, strict=True):
        near = weights(call)[:, :, :6], by_family[:, :, :6]  # later queries of the second row are padding
        torch.testing.assert_close(*near, rtol=0, atol=1e-5)
        assert by_family[:, :, :6].amax(-1).std() > 0.01
        assert call.q.shape[:2] == (ROWS, HEADS)
    torch.testing.assert_close(result[0][:, :6], plain[0][:, :6], rtol=1e-4, atol=1e-4)
    assert hooks == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    assert model.config._attn_implementation == "eager"


def test_terms_of_the_scores_are_told_apart() -> None:
    """ALiBi of the published slopes, sinks by head, caps, and heads that share keys."""
    run = {}
    for family in ("bloom", "gpt_oss", "gemma2", "falcon with ALiBi"):
        model = tiny(family)
        _, run[family], _ = observed(model, lambda model=model: model(torch.arange(3, 3 + TOKENS)[None]))
    distance = torch.arange(TOKENS)[None] - torch.arange(TOKENS)[:, None]
    slopes = 2.0 ** -torch.arange(2, 10, 2)
    for call in run["bloom"]:
        assert call.bias is not None
        relative = call.bias - call.bias.diagonal(dim1=-2, dim2=-1)[..., None]
        expected = slopes[:, None, None] * distance
        torch.testing.assert_close(relative[0].tril(), expected.tril(), rtol=0, atol=1e-5)
    for call, layer in zip(run["gpt_oss"], range(2), strict=True):
        assert call.sink is not None
        assert (*call.sink.shape, call.kv_heads) == (HEADS, 2)
        assert bool((weights(call).sum(-1) < 1).all()), layer
    assert {call.softcap for call in run["gemma2"]} == {2.0}
    assert {call.kv_heads for call in run["falcon with ALiBi"]} == {1}


@pytest.mark.parametrize("family", ["falcon", "gemma2", "gpt_oss"])
def test_a_query_whose_scores_get_the_least_number_attends_to_all_keys_alike(family: str) -> None:
    """A mask in four axes is added as it is; a sink takes all weight."""
    model = tiny(family)
    tokens = torch.randint(3, 50, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(TOKENS, TOKENS).triu(1).bool() | (torch.arange(TOKENS) > 6)[:, None]
    mask = torch.zeros(ROWS, 1, TOKENS, TOKENS).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        plain = model(tokens, attention_mask=mask, output_attentions=True)
    for thorough in (True, False):
        calls: list[AttentionCall] = []

        def observe(call: AttentionCall, calls: list[AttentionCall] = calls) -> Tensor:
            calls.append(call)
            return call.mixed()

        with torch.no_grad(), observing_attention(model, observe, thorough=thorough):
            result = model(tokens, attention_mask=mask)
        torch.testing.assert_close(result[0], plain[0], rtol=1e-4, atol=1e-4)
        for call, by_family in zip(calls, plain.attentions, strict=True):
            torch.testing.assert_close(weights(call), by_family, rtol=0, atol=1e-5)
            assert isinstance(call.scale, float) == (family != "gemma2")


def test_padding_that_sees_no_key_is_as_the_library_computes_it() -> None:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model("mistral", **SIZE, num_key_value_heads=2, sliding_window=2)
    model = AutoModel.from_config(config, attn_implementation="sdpa").eval()
    given = {"input_ids": torch.arange(3, 3 + TOKENS)[None], "attention_mask": (torch.arange(TOKENS) < 4).long()[None]}
    with torch.no_grad():
        plain = model(**given)
    result, calls, _ = observed(model, lambda: model(**given))
    torch.testing.assert_close(result[0], plain[0])
    assert all(not call.mask[..., 6:, :].any() and isinstance(call.scale, float) for call in calls)


class Attention(nn.Module):
    """Attention as people write it, in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(32, 96), nn.Linear(32, 32)
        self.sink, self.scale = nn.Parameter(torch.randn(HEADS)), 0.5
        self.expected = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        rows, n, _ = x.shape
        q, k, v = (part.view(rows, n, HEADS, HEAD).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        mixed = getattr(self, f"_{self.kind}")(q, k, v, causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, n, 32))
        return out

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal, scale=self.scale)

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * self.scale
        scores.masked_fill_(~causal, -math.inf)
        return F.dropout(F.softmax(scores, -1, dtype=torch.float32), 0.5, self.training) @ v

    def _einsum(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / 2.0 + torch.where(causal, 0.0, -1e9)
        return torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v).transpose(1, 2)

    def _flat(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = torch.bmm(self.scale * q, k.mT) + torch.where(causal, 0.0, torch.finfo(torch.float32).min)
        return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, HEADS))

    def _capped(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        scores = 3 * torch.tanh(q @ k.mT * self.scale / 3)
        return scores.masked_fill(~causal, -math.inf).softmax(-1) @ v

    def _sinks(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        scores = (q @ k.mT * self.scale).masked_fill(~causal, -math.inf)
        scores = torch.cat([scores, self.sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1] @ v

    def _tempered(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        temperature = (2.0 + torch.arange(q.shape[2])).log()[:, None]
        return (q @ k.mT * temperature * self.scale).masked_fill(~causal, -math.inf).softmax(-1) @ v

    def _talking(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        return 2 * (q @ k.mT * self.scale).softmax(-1).roll(1, 1).masked_fill(~causal, 0.0) @ v

    def _rescaled(self, q: Tensor, k: Tensor, v: Tensor, causal: Tensor) -> Tensor:
        return (q @ k.mT * self.scale).softmax(-1).masked_fill(~causal, 0.0) @ v


KINDS = ("sdpa", "eager", "einsum", "flat", "capped", "sinks", "tempered")


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_a_users_module(kind: str) -> None:
    """q, k and v are the module's own; the weights give what the module gives; replaced values reach the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Attention(kind)).train()
    x = torch.randn(ROWS, TOKENS, 32)
    result, (call,), unclear = observed(model, lambda: model(x))
    assert not unclear
    assert call.module is model[1]
    assert model.training
    q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in model[1].qkv(model[0](x)).chunk(3, -1))
    torch.testing.assert_close(call.scale * (call.q @ call.k.mT), self_scores(kind, q, k), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.v, v)
    assert bool((call.mask == torch.ones(TOKENS, TOKENS).tril().bool()).all())
    assert call.bias is None
    mixed = (weights(call) @ call.v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(model[1].out(mixed), result, rtol=1e-5, atol=1e-5)
    nothing, _, _ = observed(model, lambda: model(x), lambda call: 0 * call.mixed())
    torch.testing.assert_close(nothing, model[1].out.bias.expand_as(nothing))


def self_scores(kind: str, q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores of a kind."""
    temperature = (2.0 + torch.arange(TOKENS)).log()[:, None] if kind == "tempered" else 1.0
    return 0.5 * temperature * (q @ k.mT)


@pytest.mark.parametrize("kind", ["talking", "rescaled"])
def test_what_is_no_softmax_of_scores_is_not_offered(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Attention(kind), torch.randn(ROWS, TOKENS, 32)
    result, calls, unclear = observed(model, lambda: model(x))
    assert not calls
    assert torch.equal(result, model(x))
    assert (list(unclear) == [model]) == (kind == "rescaled")


@pytest.mark.parametrize("need_weights", [True, False])
def test_layers_of_torch(need_weights: bool) -> None:
    """Cross-attention of nn.MultiheadAttention, whose weights torch returns."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, HEADS, batch_first=True).eval()
    x, y = torch.randn(ROWS, 5, 32), torch.randn(ROWS, TOKENS, 32)
    _, by_torch = model(x, y, y, average_attn_weights=False)
    _, (call,), unclear = observed(model, lambda: model(x, y, y, need_weights=need_weights))
    assert not unclear
    torch.testing.assert_close(weights(call), by_torch, rtol=0, atol=1e-6)


def test_the_fast_path_of_torch_is_observed() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, HEADS, 64, batch_first=True), 2).eval()
    x = torch.randn(ROWS, TOKENS, 32)
    result, calls, _ = observed(model, lambda: model(x))
    assert len(calls) == 2
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)


def reader_of(model: Any) -> tuple[HeadReader, list[tuple[AttentionCall, dict[str, Any], Tensor]]]:
    """A reader of a model's attention modules, and their calls in a pass of several tokens, with arguments and input."""
    tokens = torch.randint(3, 50, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    given: dict[nn.Module, dict[str, Any]] = {}
    inputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        states = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        if states:
            given[module], inputs[module] = kwargs, states[0]

    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in model.modules()]
    _, calls, _ = observed(model, lambda: model(tokens, use_cache=False))
    for handle in handles:
        handle.remove()
    reader = HeadReader(model, given, lambda rows: model(tokens[:1, :1].expand(rows, 1), use_cache=False))
    return reader, [(call, given[call.module], inputs[call.module]) for call in calls]


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
FAMILIES_WITH_MATRICES: dict[str, dict[str, Any]] = {
    **{name: FAMILIES[name] for name in ("bloom", "falcon", "gptj", "gpt_neo", "gpt_oss")},
    "opt": {**SIZE, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": OLD_SIZE,
    "qwen3": {**SIZE, "num_key_value_heads": 2, "head_dim": 8},
    "deepseek_v3": {**SIZE, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 2},
}


@pytest.mark.parametrize("family", FAMILIES_WITH_MATRICES)
def test_a_module_run_by_itself_makes_the_same_heads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q, k and v of the forward pass, positions and norms included; x W + b where nothing is between."""
    monkeypatch.setitem(FAMILIES, family, FAMILIES_WITH_MATRICES[family])
    model = tiny(family)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(float("norm" in name), 0.3)
    weights_before = {name: value.clone() for name, value in model.state_dict().items()}
    reader, calls = reader_of(model)
    for call, kwargs, x in calls:
        rotation = rotation_of(kwargs, family == "gptj")
        for y, seen in zip(reader.heads(call.module, x, rotation), (call.q, call.k, call.v), strict=True):
            torch.testing.assert_close(y, seen, rtol=1e-4, atol=1e-5)
        assert reader.takes_positions(call.module) == (family == "gptj")
        head_norms = [part for name, part in call.module.named_modules() if name in ("q_norm", "k_norm")]
        out = nn.Linear(HEADS * call.v.shape[-1], 32)
        matrices = reader.projections(call.module, out, head_norms)
        assert matrices.shared == HEADS // call.kv_heads
        letters = [(matrices.W_V, matrices.b_V, call.v)] if family != "deepseek_v3" else []
        if rotation is None:
            letters += [(matrices.W_Q, matrices.b_Q, call.q), (matrices.W_K, matrices.b_K, call.k)]
        for W, b, seen in letters:
            torch.testing.assert_close(x[:, None] @ W + b[:, None], seen, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(matrices.W_O.flatten(0, 1), out.weight.T)
        assert (rotation is None) == (family in ("bloom", "gpt_neo", "opt", "gpt2"))
    assert all(torch.equal(value, weights_before[name]) for name, value in model.state_dict().items())


def test_matrices_of_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """W_Q = W_a diag(gain) W_b by head, as the factors are stored; keys end with the part that all heads share."""
    monkeypatch.setitem(FAMILIES, "deepseek_v3", FAMILIES_WITH_MATRICES["deepseek_v3"])
    model = tiny("deepseek_v3")
    reader, calls = reader_of(model)
    module: Any = calls[1][0].module
    for norm in (module.q_a_layernorm, module.kv_a_layernorm):
        norm.weight.data.uniform_(0.5, 2)
    matrices = reader.projections(module, module.o_proj)
    W_Q = (module.q_a_proj.weight.T * module.q_a_layernorm.weight) @ module.q_b_proj.weight.T
    narrow, shared = module.kv_a_proj_with_mqa.weight.T.split([12, 4], 1)
    by_head = ((narrow * module.kv_a_layernorm.weight) @ module.kv_b_proj.weight.T).unflatten(1, (HEADS, 14))
    expected = {
        "W_Q": W_Q.unflatten(1, (HEADS, 12)).transpose(0, 1)[..., :8],
        "W_K": by_head.transpose(0, 1)[..., :8],
        "W_V": by_head.transpose(0, 1)[..., 8:],
        "W_O": module.o_proj.weight.T.unflatten(0, (HEADS, 6)),
    }
    for name, matrix in expected.items():
        torch.testing.assert_close(getattr(matrices, name)[..., : matrix.shape[-1]], matrix, rtol=1e-5, atol=1e-5)
    rotated = matrices.W_K[:, :, 8:].sort(-1).values  # the library may store its components in another order
    torch.testing.assert_close(rotated, shared.sort(-1).values.expand(HEADS, -1, -1), rtol=1e-5, atol=1e-5)


def test_matrices_of_a_module_without_products() -> None:
    """nn.MultiheadAttention holds one matrix of all three, in no module of its own."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, HEADS, 64).eval()
    model.self_attn.in_proj_bias.data.normal_()
    reader = HeadReader(model, [model.self_attn], lambda rows: model(torch.randn(1, rows, 32)))
    matrices = reader.projections(model.self_attn, model.self_attn.out_proj)
    for part, W, b in zip(
        range(3), (matrices.W_Q, matrices.W_K, matrices.W_V), (matrices.b_Q, matrices.b_K, matrices.b_V), strict=True
    ):
        rows = slice(32 * part, 32 * part + 32)
        torch.testing.assert_close(W.transpose(0, 1).flatten(1), model.self_attn.in_proj_weight[rows].T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(b.flatten(), model.self_attn.in_proj_bias[rows])


class Block(nn.Module):
    """A residual block with one sublayer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention(kind)

    def forward(self, x: Tensor) -> Tensor:
        updated: Tensor = x + self.attention(self.norm(x))
        return updated


@pytest.mark.parametrize("kind", ["eager", "rescaled"])
def test_a_users_model_offers_attention_and_matrices_or_says_why_not(kind: str) -> None:
    torch.manual_seed(0)
    model = open_model(nn.Sequential(nn.Embedding(60, 32), *(Block(kind) for _ in range(3))).eval())
    missing = why_missing(model)
    if kind == "rescaled":
        assert missing["attention"].startswith("Attention: its mixed values are not those of a softmax")
        return
    assert not {"attention", "matrices"} & set(missing)
    attention = model.model[2].attention
    W_Q, W_K, W_V = (part.unflatten(0, (HEADS, HEAD)).mT for part in attention.qkv.weight.chunk(3))
    matrices = model.projections(1)
    torch.testing.assert_close(matrices.W_QK, W_Q @ W_K.mT)
    torch.testing.assert_close(matrices.W_V, W_V)
    with model.capture("q", "pattern") as captured:
        model(torch.arange(TOKENS))
    (q,) = model.heads_of(1, model.model[2].norm(model.model[1](model.model[0](torch.arange(TOKENS)[None]))), letters="q")
    torch.testing.assert_close(captured["q", 1], q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(captured["pattern", 1].sum(-1), torch.ones(1, HEADS, TOKENS))
