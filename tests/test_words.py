"""Tokens on the sphere, against answers made by hand, torch's own layers, and what models themselves do."""

import math
import os
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import scipy.spatial.distance
import torch
import transformers as library
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from helpers.models import (
    FAMILIES,
    built,
    near,
    opened_smollm2,
    random_normscope_model,
    sample_of,
    some_tokens,
    steps_of,
    untouched,
    word_tokenizer,
)
from normscope.errors import InputError
from normscope.measures.base import Subject
from normscope.measures.embeddings import Embeddings, embedding_distances, extreme_tokens
from normscope.measures.geometry import Geometry, head_update, norm_curves, norm_points, strongest_head
from normscope.measures.head_probes import HeadProbe
from normscope.measures.journey import Journey, follow
from normscope.measures.maps import MAPS, places
from normscope.measures.probes import Returned, haar, nearest_keys, nearest_values, reader, updates_of
from normscope.measures.queries import Queries
from normscope.measures.reference import Reference, read_alone, reference_layer
from normscope.measures.scores import MEANING, NONE, PRECEDENCE, _interval, label_of, score_words
from normscope.measures.search import Nearest, nearest, top_scores
from normscope.measures.singular import head_factors, oriented, singular_tables
from normscope.measures.values import Values, update_table
from normscope.measures.vocabulary import Word, common_nouns, plain_word, probe_words
from normscope.models import AttentionStep, Model, Observer, Sample, open_model
from normscope.models.factors import singular_factors
from normscope.models.module_model import ModuleModel

NAMES = ["time", "life", "world", "way", "Time", "Life", "World", "Way"]
DIM, HEAD = 8, 4
WRITTEN = 10.0


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@cache
def by_hand() -> ModuleModel:
    """A GPT-2 whose answers are known.

    The embedding of word t is e_2t − e_2t+1, of its case variant the opposite; LayerNorm makes it twice as long. Head 0 looks
    for the word after (W_QK = 2·Σ u_t u_t+1ᵀ of unit vectors u) and writes 10 times the one two further on; head 1 looks for
    the word itself and writes nothing.
    """
    config = library.GPT2Config(vocab_size=9, n_embd=DIM, n_layer=2, n_head=2, n_positions=8)
    model = library.GPT2LMHeadModel(config)
    words = torch.zeros(4, DIM)
    for t in range(4):
        words[t, 2 * t], words[t, 2 * t + 1] = 1.0, -1.0
    u = words / math.sqrt(2)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.cat((words, -words, torch.zeros(1, DIM))))
        for parameter in (*model.transformer.wpe.parameters(), *model.transformer.h.parameters()):
            parameter.zero_()
        for block in model.transformer.h:
            block.ln_1.weight.fill_(1.0)
            block.ln_2.weight.fill_(1.0)
            query, key, value = block.attn.c_attn.weight.split(DIM, 1)
            query[:, :HEAD], key[:, :HEAD] = u.T, 2 * u.roll(-1, 0).T
            query[:, HEAD:], key[:, HEAD:] = u.T, u.T
            value[:, :HEAD] = u.T
            block.attn.c_proj.weight[:HEAD] = WRITTEN * u.roll(-2, 0)
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate([*NAMES, "?"])}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return ModuleModel("by hand", model, library.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?"))


def words_of(view: Model, *names: str) -> list[Word]:
    return probe_words(view, list(names))


def test_a_query_finds_the_keys_that_were_made_for_it() -> None:
    view = by_hand()
    found = nearest_keys(view, 0, torch.tensor([0, 1, 2, 3]), 9)
    assert found.tokens[0, :, 0].tolist() == [1, 2, 3, 0]
    assert found.tokens[0, :, -1].tolist() == [5, 6, 7, 4]
    assert found.tokens[1, :, 0].tolist() == [0, 1, 2, 3]
    # LayerNorm(e) = 2e = 2√2 u: q·k is 2√2 · 2·2√2 for head 0 and 2√2 · 2√2 for head 1
    assert found.scores[:, :, 0].flatten().tolist() == pytest.approx([16.0] * 4 + [8.0] * 4, rel=1e-4)
    assert found.scores[:, :, -1].flatten().tolist() == pytest.approx([-16.0] * 4 + [-8.0] * 4, rel=1e-4)


def test_a_value_lands_where_the_head_writes() -> None:
    view = by_hand()
    updates = updates_of(view, 1, torch.tensor([0, 1, 2, 3]))
    by_head, of_sum = nearest_values(view, 1, updates, 2)
    assert by_head.tokens[0, :, 0].tolist() == [2, 3, 0, 1]
    assert by_head.tokens[1, :, 0].tolist() == [0, 1, 2, 3]
    assert of_sum.tokens[0, :, 0].tolist() == [2, 3, 0, 1]
    table = update_table(1, words_of(view, *NAMES[:4]), updates)
    lengths = 2 * math.sqrt(2) * WRITTEN
    assert table[table["head"] == 0]["norm"].tolist() == pytest.approx([lengths] * 4, rel=1e-4)
    assert table[table["head"] == 0]["relative_norm"].tolist() == pytest.approx([2 * WRITTEN] * 4, rel=1e-4)
    assert table[table["head"] == 1]["norm"].tolist() == [0.0] * 4
    assert table[table["head"].isna()]["norm"].tolist() == pytest.approx([lengths] * 4, rel=1e-4)
    # the sum is e + 2·10·e' of two orthogonal words: LayerNorm scales it to √8, of which the new word takes 20/√401
    assert of_sum.scores[0, 0, 0] == pytest.approx(math.sqrt(8) * math.sqrt(2) * 20 / math.sqrt(401), rel=1e-4)


@pytest.mark.parametrize("matrix", ["vo", "qk"])
@pytest.mark.parametrize("name", ["gpt-neox", "llama", "gpt2"])
def test_singular_vectors_are_those_of_the_whole_matrix(name: str, matrix: str) -> None:
    view = untouched(name).view
    weights, unembedding = view.projections(1), view.unembedding
    assert unembedding is not None
    W = weights.W_V @ weights.W_O if matrix == "vo" else weights.W_QK
    _, read = reader(view, 1)(view.embeddings)
    tables = singular_tables(view, 1, matrix, vectors=2, count=3)
    spectrum, singular = tables["spectrum"], tables["singular"]
    U, values, Vh = torch.linalg.svd(W)
    found_values = torch.tensor(spectrum["value"].to_numpy()).view(view.heads, -1)
    assert near(found_values.float(), values[:, : view.head_dim], 1e-4)
    written = unembedding if matrix == "vo" else read
    for (head, index), rows in singular.groupby(["head", "index"]):
        u, sigma, v = U[head, :, index], values[head, index], Vh[head, index]
        sign = 1.0 if (written @ v).max() > (-written @ v).max() else -1.0
        for side, rival in (("left", read @ (sign * sigma * u)), ("right", written @ (sign * v))):
            found = rows[rows["side"] == side]
            assert found["score"].tolist() == pytest.approx(rival.topk(3).values.tolist(), rel=1e-3, abs=1e-4)
            assert found["nearest_token"].iloc[0] == int(rival.argmax())
    assert spectrum.groupby("head")["share"].sum().tolist() == pytest.approx([1.0] * view.heads)


@pytest.mark.parametrize("name", ["gpt-neox", "llama", "gpt2", "gemma2", "bert", "bert bare", "granite"])
def test_values_are_read_as_the_model_reads(name: str) -> None:
    view, tokens = untouched(name).view, torch.arange(3, 15)
    updates = updates_of(view, 1, tokens)
    by_head, of_sum = nearest_values(view, 1, updates, 4)
    stream = next((n for n in view.norms if (n.layer, n.sublayer, n.slot) == (1, "attention", "stream")), None)

    def said(states: Tensor) -> Tensor:
        states = states if stream is None else stream(states)
        return view.read_out(states) if view.predicts else states @ view.embeddings.T

    for head in range(view.heads):
        known = said(updates.states + updates.rest + updates.by_head[head]).topk(4)
        assert near(by_head.scores[head], known.values, 1e-3)
        assert torch.equal(by_head.tokens[head, :, 0], known.indices[:, 0])
    whole = said(updates.states + updates.rest + updates.by_head.sum(0))
    assert near(of_sum.scores[0], whole.topk(4).values, 1e-3)
    lengths = update_table(1, [Word(str(t), t, (t,)) for t in tokens.tolist()], updates)
    assert lengths[lengths["head"].isna()]["norm"].tolist() == pytest.approx(
        (updates.by_head.sum(0) + updates.rest).norm(dim=-1).tolist(), rel=1e-4
    )


def test_the_journey_of_a_token_that_is_carried_away() -> None:
    found = follow(by_hand(), "time life world", -1)
    assert (found.word, list(found.table["layer"])) == ("world", [0, 1, 2])
    assert found.table["nearest_text"][0] == "world"
    assert found.table["cosine_start"][0] == pytest.approx(1.0, abs=1e-6)
    assert found.table["angle"][1] == pytest.approx(found.table["from_start"][1], rel=1e-6)
    assert found.table["travelled"].iloc[-1] == pytest.approx(found.table["angle"].sum(), rel=1e-6)


def test_words_are_found_with_a_blank_and_without() -> None:
    view = ModuleModel("llama", built("LlamaConfig", FAMILIES["llama"].options), word_tokenizer())
    assert [word.token for word in probe_words(view, ["cat", "dog"])] == [6, 7]
    with pytest.raises(InputError, match="'elephant' is not one token of 'llama'"):
        probe_words(view, ["cat", "elephant"])
    with pytest.raises(InputError, match="no common English noun"):
        probe_words(view)
    assert [word.name for word in probe_words(by_hand())] == ["time", "way", "life", "world"]
    assert len(set(common_nouns())) == len(common_nouns()) >= 100


def test_a_word_is_the_same_in_any_case_and_with_blanks() -> None:
    assert plain_word(" Time") == plain_word("time")
    assert plain_word("times") != plain_word("time")


@pytest.mark.parametrize("size", [7, 640, 1000, 20_000])
def test_top_scores_are_the_largest(size: int) -> None:
    scores = drawn(3, 5, size)
    best, where = top_scores(scores, 5)
    known = scores.topk(5)
    assert torch.equal(best, known.values)
    assert torch.equal(scores.gather(-1, where), known.values)


def test_the_nearest_in_pieces_are_the_nearest_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, rows = drawn(2, 6, 4), drawn(2, 5000, 4, seed=1)
    known = (queries @ rows.mT).topk(7)
    for at_once in (2**23, 4096):
        monkeypatch.setattr("normscope.measures.search._SCORES", at_once)
        scores, where = nearest(queries, rows, 7)
        assert near(scores, known.values)
        assert torch.equal(where, known.indices)
    few, _ = nearest(queries, rows[:, :3], 7)
    assert few.shape == (2, 6, 3)
    with pytest.raises(ValueError, match="no candidates"):
        _ = Nearest(3).top


@pytest.mark.parametrize(("dim", "rank", "out"), [(24, 4, 24), (24, 4, 10), (6, 9, 6), (5, 5, 5)])
def test_thin_factors_have_the_singular_values_of_their_product(dim: int, rank: int, out: int) -> None:
    A, B = drawn(3, dim, rank, dtype=torch.float64), drawn(3, rank, out, seed=1, dtype=torch.float64)
    found, W = singular_factors(A, B), A @ B
    kept = found.values.shape[-1]
    assert near(found.values, torch.linalg.svdvals(W)[:, :kept], 1e-10)
    assert near(W @ found.right, found.values[:, None] * found.left, 1e-10)
    assert near(found.left.mT @ found.left, torch.eye(kept, dtype=W.dtype).expand(3, -1, -1), 1e-10)
    assert near(found.left @ torch.diag_embed(found.values) @ found.right.mT, W, 1e-10)


def test_signs_bring_right_vectors_near_to_some_row() -> None:
    A, B = drawn(3, 16, 4), drawn(3, 4, 16, seed=1)
    rows = drawn(200, 16, seed=2)
    found, scores, tokens = oriented(singular_factors(A, B), rows, 3)
    dots = found.right.mT @ rows.T
    assert bool((dots.amax(-1) >= (-dots).amax(-1)).all())
    assert near(scores, dots.topk(3).values)
    assert torch.equal(tokens, dots.topk(3).indices)
    assert near(A @ B @ found.right, found.values[:, None] * found.left, 1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "llama", "gemma2", "bert"])
def test_factors_give_what_the_whole_matrix_gives(name: str) -> None:
    view = untouched(name).view
    weights = view.projections(1)
    _, x = reader(view, 1)(view.embeddings)
    bias_q = torch.einsum("hk,hdk->hd", weights.b_Q, weights.W_K)
    scores = x @ weights.W_QK @ x.T + (bias_q @ x.T)[:, None]
    scores = scores + (x @ weights.W_Q @ weights.b_K[..., None]) + (weights.b_Q * weights.b_K).sum(-1)[:, None, None]
    found = nearest_keys(view, 1, torch.arange(view.vocabulary), 3)
    assert near(found.scores, scores.topk(3).values, 1e-4)
    factors = head_factors(view, 1, "qk")
    assert near(factors[0] @ factors[1], weights.W_QK, 1e-5)


def without_positions(name: str) -> ModuleModel:
    model = built(FAMILIES[name].config, FAMILIES[name].options, FAMILIES[name].maker)
    for part, module in model.named_modules():
        if part.endswith(("wpe", "position_embeddings", "token_type_embeddings")):
            module.weight.data.zero_()
    return ModuleModel(name, model)


PROBED = pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "llama", "qwen3", "gemma2", "gemma3", "olmo2", "granite", "bert"])


@PROBED
def test_a_word_meets_itself_as_in_the_model(name: str) -> None:
    view = without_positions(name)
    for token in (3, 11):
        (step, *_) = steps_of(view, sample_of(torch.tensor([[token]])))
        found = nearest_keys(view, 0, torch.tensor([token]), view.vocabulary)
        own = found.scores[:, 0].gather(-1, (found.tokens[:, 0] == token).int().argmax(-1, keepdim=True))[:, 0]
        assert near(own, step.raw_scores()[0, :, 0, 0], 1e-4)


@PROBED
def test_updates_are_those_of_the_model(name: str) -> None:
    view = without_positions(name)
    token = torch.tensor([[7]])
    updates = updates_of(view, 0, token[0])
    made = updates.states + updates.by_head.sum(0) + updates.rest
    caught: list[Tensor] = []
    block = view.blocks[0]
    followed = {
        "gpt2": "ln_2",
        "bert": "attention.output.LayerNorm",
        **dict.fromkeys(("llama", "qwen3", "granite"), "post_attention_layernorm"),
        **dict.fromkeys(("gemma2", "gemma3"), "pre_feedforward_layernorm"),
    }
    if name in followed:  # what the next norm reads is the stream behind attention
        hook = block.get_submodule(followed[name]).register_forward_pre_hook(lambda module, args: caught.append(args[0]))
        view.forward(sample_of(token))
        hook.remove()
        assert near(made, caught[0][0], 1e-4)
    else:  # side by side, or with the norm behind: the messages are what attention writes
        (step, *_) = steps_of(view, sample_of(token))
        written = step.messages[0, :, 0].sum(0) + view.projections(0).b_O
        if name == "olmo2":
            written = block.post_attention_layernorm(written)
        assert near((updates.by_head.sum(0) + updates.rest)[0], written, 1e-4)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["pre", "post", "peri", "ngpt-lerp", "ln-scaling", "qkv"])
def test_updates_are_those_of_the_forward_pass(name: str, layer: int) -> None:
    """The update is resid_mid − carry·resid_pre of the same tokens, with learned α, calibrated scales and input factors."""
    model = random_normscope_model(name)
    tokens = torch.arange(model.vocabulary)
    states, _ = reader(model, layer)(model.embeddings[tokens])
    put = Observer(state=lambda at, x: states[:, None] if at == layer else None)
    with model.capture("resid_pre", "resid_mid", "attn_out") as c:
        model.forward(sample_of(tokens[:, None]), put)
    updates = updates_of(model, layer, tokens)
    assert near(updates.whole, c["attn_out", layer][:, 0], 1e-4)
    carry = model.carry(layer, "attention")
    assert carry is not None
    assert near(updates.states, carry * c["resid_pre", layer][:, 0], 1e-5)
    moved, stream = updates.states + updates.whole, model.norm_at(layer, "attention", "stream")
    assert near(moved if stream is None else stream(moved), c["resid_mid", layer][:, 0], 1e-4)
    if stream is None:
        assert near(updates.whole, (c["resid_mid", layer] - carry * c["resid_pre", layer])[:, 0], 1e-3)


def test_the_norm_of_an_update_follows_learned_steps_and_input_factors() -> None:
    whole = {name: updates_of(random_normscope_model(name), 1, torch.arange(4)).whole for name in ("pre", "ln-scaling")}
    assert near(whole["ln-scaling"], whole["pre"] / math.sqrt(2), 1e-4)  # the same weights; the input is divided by √2
    model = random_normscope_model("ngpt-lerp")
    step, carry = model.step(0, "attention"), model.carry(0, "attention")
    assert step is not None
    assert carry is not None
    assert step.shape == (model.dim,)
    assert near(carry, 1 - step, 1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gemma3", "qwen3"])
def test_keys_at_a_distance_are_those_of_the_model(name: str) -> None:
    view = untouched(name).view
    tokens = torch.tensor([[5, 9, 9, 9, 12]])
    (step, *_) = steps_of(view, sample_of(tokens))
    found = nearest_keys(view, 0, torch.tensor([12]), view.vocabulary, distance=4)
    scores = found.scores[:, 0].gather(-1, (found.tokens[:, 0] == 5).int().argmax(-1, keepdim=True))[:, 0]
    assert near(scores, (step.q[0, :, 4] * step.k[0, :, 0]).sum(-1), 1e-4)


def test_w_qk_at_a_distance_is_a_product_of_rotated_factors() -> None:
    view = untouched("llama").view
    assert isinstance(view, ModuleModel)
    (step, *_) = steps_of(view, sample_of(torch.tensor([[5, 9, 12]])))
    W_Q, W_K = head_factors(view, 0, "qk", distance=2)
    made = torch.einsum("d,hdk,hke,e->h", step.input[0, 2], W_Q, W_K, step.input[0, 0])
    assert near(made, (step.q[0, :, 2] * step.k[0, :, 0]).sum(-1), 1e-4)
    with pytest.raises(InputError, match="normalises q and k"):
        head_factors(untouched("qwen3").view, 0, "qk", distance=2)
    with pytest.raises(InputError, match="no rotations"):
        head_factors(untouched("gpt2").view, 0, "qk", distance=2)
    with pytest.raises(InputError, match="allowed are 0 to 63"):
        nearest_keys(view, 0, torch.tensor([1]), 1, distance=64)
    with pytest.raises(InputError, match="allowed: vo, qk"):
        head_factors(view, 0, "vq")


@pytest.mark.parametrize("name", [*FAMILIES, "builtin:addition-small-qkv"])
def test_what_is_read_out_of_the_last_states_is_what_the_model_says(name: str) -> None:
    one = untouched(name)
    states: list[Tensor] = []
    one.view.forward(one.sample, Observer(state=lambda layer, x: states.append(x)))
    last, present = states[-1], one.sample.attention_mask
    assert near(one.view.read_out(last[present]), one.said[present], 1e-4)


def test_states_can_be_put_into_any_layer() -> None:
    one = untouched("llama")
    states: list[Tensor] = []
    one.view.forward(one.sample, Observer(state=lambda layer, x: states.append(x.clone())))
    other = sample_of(some_tokens(seed=9))
    assert near(one.view.forward(other, Observer(state=lambda layer, x: states[1] if layer == 1 else None)), one.said, 1e-4)
    assert near(one.view.forward(other, Observer(state=lambda layer, x: states[0] if layer == 0 else None)), one.said, 1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bert"])
def test_a_journey_is_told_in_the_full_space(name: str) -> None:
    family = FAMILIES[name]
    view = ModuleModel(name, built(family.config, family.options, family.maker), word_tokenizer())
    found, sample = follow(view, "the cat sat on a mat", -3), view.sample("the cat sat on a mat", None, 0)
    if not view.causal:
        sample = sample_of(torch.where(sample.targets == -100, sample.tokens, sample.targets))
    states: list[Tensor] = []
    said = view.forward(sample, Observer(state=lambda layer, x: states.append(x[0, -3].double())))[0, -3]
    norm = view.final_norm
    kept = [(x - x.mean() if norm is not None and norm.kind == "layer" else x).numpy() for x in states]
    angles = [math.degrees(math.acos(1 - scipy.spatial.distance.cosine(a, b))) for a, b in pairwise(kept)]
    assert list(found.table["angle"][1:]) == pytest.approx(angles, rel=1e-3)
    assert list(found.table["radius"]) == pytest.approx([float(x.norm()) for x in states], rel=1e-5)
    chances = said.softmax(-1)
    following = int(sample.tokens[0, -2]) if view.causal else int(said.argmax())
    assert found.table["probability"].iloc[-1] == pytest.approx(float(chances[following]), rel=1e-3)
    assert found.table["rank"].iloc[-1] == 1 + int((said > said[following]).sum())
    assert found.predicted == view.words(said.argmax()[None])[0]
    directions, layer_norm = torch.stack([torch.from_numpy(x) for x in kept]).float(), norm is not None and norm.kind == "layer"
    embedded = view.embeddings[: view.vocabulary]
    embedded = embedded - embedded.mean(-1, keepdim=True) * layer_norm
    likeness = torch.cosine_similarity(directions[:, None], embedded[None], dim=-1)
    assert found.table["nearest_token"].tolist() == likeness.argmax(-1).tolist()
    if name in ("bert", "gemma2"):
        assert found.end is None  # logits are made by more than one product
        assert "cosine_predicted" not in found.table
        return
    assert norm is not None
    assert view.unembedding is not None
    read_with = norm.gain * view.unembedding[said.argmax()]
    read_with = read_with - read_with.mean() * layer_norm
    cosines = torch.cosine_similarity(directions, read_with[None], dim=-1)
    assert found.table["cosine_predicted"].tolist() == pytest.approx(cosines.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_place_that_the_text_does_not_have_is_refused(name: str) -> None:
    view = ModuleModel(name, built(FAMILIES[name].config, FAMILIES[name].options, FAMILIES[name].maker), word_tokenizer())
    with pytest.raises(InputError, match="token=50: the text has"):
        follow(view, "the cat sat on a mat", 50)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_distances_to_the_sphere_are_those_of_torch(kind: str) -> None:
    W = drawn(40, 12, dtype=torch.float64) + 0.3
    made = torch.nn.functional.layer_norm(W, (12,), eps=0) if kind == "layer" else torch.nn.functional.rms_norm(W, (12,), eps=0)
    table = embedding_distances(W, kind).set_index("setting")
    scale = math.sqrt(12) / float(W.norm(dim=-1).mean())
    for setting, points in {
        "original": W,
        "centred": W - W.mean(0),
        "scaled": scale * W,
        "centred and scaled": scale * (W - W.mean(0)),
    }.items():
        l2 = np.linalg.norm((made - points).numpy(), axis=-1)
        cosine = [scipy.spatial.distance.cosine(a, b) for a, b in zip(made.numpy(), points.numpy(), strict=True)]
        row = table.loc[setting]
        assert row["l2_mean"] == pytest.approx(l2.mean(), rel=1e-9)
        assert row["l2_std"] == pytest.approx(l2.std(ddof=1), rel=1e-9)
        assert row["cosine_mean"] == pytest.approx(np.mean(cosine), abs=1e-9)
    offset = embedding_distances(W, kind, eps=0.5).set_index("setting").loc["original", "l2_mean"]
    layer, rms = torch.nn.functional.layer_norm(W, (12,), eps=0.5), torch.nn.functional.rms_norm(W, (12,), eps=0.5)
    assert offset == pytest.approx(float(((layer if kind == "layer" else rms) - W).norm(dim=-1).mean()), rel=1e-9)
    with_nothing = torch.cat((W, torch.zeros(3, 12, dtype=W.dtype)))
    assert embedding_distances(with_nothing, kind)["l2_mean"].tolist() == pytest.approx(table["l2_mean"].tolist())


def test_extreme_tokens_are_those_that_the_output_favours() -> None:
    view = untouched("gpt-neox").view  # its unembedding is another table than its embeddings
    table, norm, W = extreme_tokens(view, 3), view.final_norm, view.unembedding
    assert norm is not None
    assert norm.bias is not None
    assert W is not None
    known = {
        "norm": W.norm(dim=-1),
        "norm with gain": (norm.gain * W).norm(dim=-1),
        "norm + bias": W.norm(dim=-1) + W @ norm.bias,
        "norm with gain + bias": (norm.gain * W).norm(dim=-1) + W @ norm.bias,
    }
    for score, values in known.items():
        rows = table[table["score"] == score]
        order = values.argsort(descending=True).tolist()
        assert rows[rows["end"] == "top"]["token"].tolist() == order[:3]
        assert rows[rows["end"] == "bottom"]["token"].tolist() == order[::-1][:3]


def meaning_of(states: Tensor) -> Reference:
    return Reference(torch.arange(len(states)), states, None, torch.arange(0))


def test_a_head_that_returns_the_same_for_all_words_is_not_near_to_any() -> None:
    view, words = by_hand(), words_of(by_hand(), *NAMES[:4])
    reference = meaning_of(torch.nn.functional.normalize(drawn(8, 5), dim=-1))
    always = torch.tensor([[[4, 5]] * 4])
    found = score_words(view, words, Returned(torch.zeros(1, 4, 2), always), reference, word_first=False)
    assert float(found.nearness.nanmean()) == pytest.approx(0.5, abs=0.2)
    once = score_words(view, words, Returned(torch.zeros(1, 4, 1), torch.tensor([[[6]] * 4])), reference, word_first=False)
    assert torch.equal(once.nearness[0, [0, 1, 3]], torch.full((3,), 0.5, dtype=torch.float64))
    assert bool(once.nearness[0, 2].isnan())  # World is world itself
    assert bool(once.precedence.isnan().all())


def test_a_head_that_returns_what_is_like_the_word_is_near() -> None:
    view, words = by_hand(), words_of(by_hand(), *NAMES[:4])
    matching = torch.tensor([[[5], [6], [7], [4]]])
    states = torch.eye(4)[[0, 1, 2, 3, 3, 0, 1, 2]]  # word t is like token 5 + t
    found = score_words(view, words, Returned(torch.zeros(1, 4, 1), matching), meaning_of(states), word_first=False)
    assert found.nearness.tolist() == [[1.0] * 4]
    assert found.same.tolist() == [[0.0] * 4]
    itself = score_words(
        view, words, Returned(torch.zeros(1, 4, 1), torch.tensor([[[4], [5], [6], [7]]])), meaning_of(states), word_first=False
    )
    assert itself.same.tolist() == [[1.0] * 4]
    assert bool(itself.nearness.isnan().all())


def test_precedence_is_what_the_model_expects() -> None:
    view, words = by_hand(), words_of(by_hand(), *NAMES[:4])
    expected = torch.full((8, 8), -9.0)
    for t in range(4):
        expected[4 + (t + 1) % 4, t] = 0.0  # word t comes after token 4 + t + 1
    reference = Reference(torch.arange(8), torch.eye(8), expected, torch.arange(8))
    before = Returned(torch.zeros(1, 4, 1), torch.tensor([[[5], [6], [7], [4]]]))
    assert score_words(view, words, before, reference, word_first=False).precedence.tolist() == [[1.0] * 4]
    assert score_words(view, words, before, reference, word_first=True).precedence.tolist() == [[0.5] * 4]
    after = Reference(torch.arange(8), torch.eye(8), expected.T, torch.arange(8))
    assert score_words(view, words, before, after, word_first=True).precedence.tolist() == [[1.0] * 4]


def test_random_weights_keep_the_spectrum() -> None:
    one, other = haar(32, 0), haar(32, 1)
    assert near(one @ one.T, torch.eye(32), 1e-5)
    weights = untouched("llama").view.projections(0)
    W = weights.W_V @ weights.W_O
    assert near(torch.linalg.svdvals(one @ W @ other), torch.linalg.svdvals(W), 1e-4)
    view, tokens = untouched("llama").view, torch.tensor([1, 2])
    turned = updates_of(view, 0, tokens, (one, other))
    _, read = reader(view, 0)(view.embeddings[tokens])
    assert near(turned.by_head, read @ (one @ W @ other), 1e-4)


def test_intervals_hold_the_mean_of_most_resamples() -> None:
    values = torch.stack(((drawn(400, dtype=torch.float64) > 0).double(), torch.full((400,), torch.nan, dtype=torch.float64)))
    mean, low, high = _interval(values[None], 0)
    error = math.sqrt(float(mean[0] * (1 - mean[0])) / 400)
    assert float(high[0] - low[0]) == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert low[0] < mean[0] < high[0]
    assert bool(mean[1].isnan())
    apart = torch.stack((torch.zeros(2, 400), torch.ones(2, 400))).double()  # two draws whose means lie apart
    _, low, high = _interval(apart, 0)
    assert (float(low[0]), float(high[0])) == (0.0, 1.0)


def scored(**others: float | None) -> dict[str, float | None]:
    parts = {"same": 0.0, "nearness": 0.5, "precedence": 0.5}
    row: dict[str, float | None] = {}
    for name, chance in parts.items():
        row |= {name: chance, f"{name}_low": chance, f"{name}_high": chance}
        row |= {f"{name}_random_high": chance, f"{name}_words": 100}
    return row | others


@pytest.mark.parametrize(
    ("row", "label"),
    [
        (scored(), NONE),
        (scored(same=0.4, same_low=0.3), MEANING),
        (scored(same=0.9, same_low=0.8, same_random_high=0.95), NONE),
        (scored(nearness=0.7, nearness_low=0.65), MEANING),
        (scored(precedence=0.7, precedence_low=0.65), PRECEDENCE),
        (scored(precedence=0.7, precedence_low=0.65, precedence_random_high=0.68), NONE),
        (scored(nearness=0.8, nearness_low=0.7, precedence=0.7, precedence_low=0.6), MEANING),
        (scored(nearness=0.7, nearness_low=0.6, precedence=0.8, precedence_low=0.7), PRECEDENCE),
        (scored(precedence=None, precedence_low=None, precedence_random_high=None), NONE),
        (scored(nearness=0.9, nearness_low=0.9, nearness_words=7), NONE),
        (scored(nearness_low=0.96, nearness_random_high=0.9, precedence_low=0.9, precedence_random_high=0.55), PRECEDENCE),
        (scored(nearness=None, nearness_low=None, nearness_random_high=None), NONE),
    ],
)
def test_labels_say_what_scores_say(row: dict[str, float | None], label: str) -> None:
    assert label_of(row) == label


@pytest.mark.parametrize("probe", [Queries(nearest=2), Values(nearest=2)], ids=lambda probe: probe.name)
def test_the_table_of_heads_shows_what_was_built_in(probe: HeadProbe) -> None:
    view = by_hand()
    words = words_of(view, *NAMES[:4])
    tables = probe.layer_tables(view, 0, words, scored=True, seed=0, progress=lambda share: None)
    table, rows = tables["heads"], tables["nearest"]
    same = table.set_index("head")["same"]
    assert same[1] == 1.0
    assert same[0] == 0.0
    assert table["head"].tolist() == [1, 0]
    assert table["precedence"].notna().all()
    assert rows[(rows["head"] == 1) & (rows["rank"] == 1)]["nearest_text"].tolist() == NAMES[:4]
    assert rows["head"].isna().any() == (probe.name == "values")
    again = probe.layer_tables(view, 0, words, scored=True, seed=0, progress=lambda share: None)["heads"]
    assert again.equals(table)
    random = table.set_index("head")["same_random"]
    # a head without an update has none between rotations, either
    assert random[1] == 1.0 if probe.name == "values" else random[1] < 1.0


def test_random_weights_return_other_tokens() -> None:
    view, words = untouched("gpt2").view, [Word(str(t), t, (t,)) for t in range(1, 41)]
    same, one, other = torch.eye(32), haar(32, 0), haar(32, 1)
    own, turned, only_queries, only_keys = (
        Queries().returned(view, 1, words, 1, rotations, lambda share: None)["heads"].tokens
        for rotations in (None, (one, other), (one, same), (same, other))
    )
    for different in (turned, only_queries, only_keys):
        assert (own == different).double().mean() < 0.5
    assert (turned == only_queries).double().mean() < 0.5
    assert (turned == only_keys).double().mean() < 0.5


def test_a_word_among_others_gains_nothing_by_chance() -> None:
    """A head that returns the word itself among unrelated tokens has no precedence by that."""
    view = untouched("gpt2").view
    words = [Word(str(t), t, (t,)) for t in range(30)]
    tokens = torch.randint(30, 50, (1, 30, 3), generator=torch.Generator().manual_seed(0))
    tokens[0, :, 1] = torch.arange(30)
    expected = drawn(50, 50, seed=3)
    expected[:30, :30] = -50.0  # nouns do not follow nouns
    like = torch.nn.functional.normalize(drawn(50, 6), dim=-1)
    reference = Reference(torch.arange(50), like, expected, torch.arange(50))
    for word_first in (False, True):
        found = score_words(view, words, Returned(torch.zeros(1, 30, 3), tokens), reference, word_first)
        assert float(found.precedence.mean()) == pytest.approx(0.5, abs=0.1)
        assert float(found.nearness.mean()) == pytest.approx(0.5, abs=0.1)


def test_what_words_mean_is_not_asked_of_the_layer_that_is_probed() -> None:
    options = FAMILIES["llama"].options | {"num_hidden_layers": 4}
    view = ModuleModel("llama", built("LlamaConfig", options), word_tokenizer())
    tokens, random = torch.arange(5, 17), torch.arange(5, 8)
    found = read_alone(view, tokens, torch.tensor([5, 9]), random, 0)
    assert view.frame("the") == ([2, 5], [3])  # [CLS] the … [SEP], as its tokenizer has it
    states: list[Tensor] = []

    def silent(step: AttentionStep) -> Tensor | None:
        return torch.zeros_like(step.v) if step.layer == 0 else None

    rows = torch.tensor([[2, 5, token, 3] for token in tokens.tolist()])
    said = view.forward(
        sample_of(rows), Observer(silent, state=lambda layer, x: states.append(x[:, 2].clone()) if layer == 2 else None)
    )
    known = torch.nn.functional.normalize(states[0] - states[0][random - 5].mean(0), dim=-1)
    assert near(found.states, known, 1e-4)
    assert found.expected is not None
    assert near(found.expected, said[:, 2].log_softmax(-1)[:, [5, 9]], 1e-4)


def test_both_forms_of_a_word_are_expected() -> None:
    view, words = by_hand(), [Word("time", 0, (0, 4)), Word("life", 1, (1,))]
    expected = torch.full((8, 8), -9.0)
    expected[7, 4] = 0.0  # the other form of time comes after token 7
    reference = Reference(torch.arange(8), torch.eye(8), expected, torch.arange(8))
    found = Returned(torch.zeros(1, 2, 1), torch.tensor([[[7], [2]]]))
    assert score_words(view, words, found, reference, word_first=False).precedence[0, 0] == 1.0


def test_the_strongest_head_is_the_one_that_turns_most() -> None:
    assert strongest_head(by_hand(), 0, 2) == 0  # head 1 writes nothing


def test_embeddings_enter_with_the_type_of_the_first_segment() -> None:
    model = built("BertConfig", FAMILIES["bert"].options, "AutoModelForMaskedLM")
    view, parts = ModuleModel("bert", model), model.bert.embeddings
    assert near(view.embeddings, parts.word_embeddings.weight + parts.token_type_embeddings.weight[0])
    _, read = reader(view, 0)(view.embeddings[7][None])
    with torch.no_grad():
        parts.position_embeddings.weight.zero_()
        assert near(read, parts(torch.tensor([[7]]))[0], 1e-5)


def test_layers_that_do_not_rotate_have_no_distance() -> None:
    options = FAMILIES["llama"].options | {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0}
    view = ModuleModel("smollm3", built("SmolLM3Config", options))
    assert view.rotation(0, torch.tensor([3])) is not None
    assert view.rotation(1, torch.tensor([3])) is None
    with pytest.raises(InputError, match="layer 1 of 'smollm3' does not rotate"):
        nearest_keys(view, 1, torch.tensor([4]), 2, distance=3)
    with pytest.raises(InputError, match="normalises q and k"):
        head_factors(untouched("olmo2").view, 0, "qk", distance=2)


def test_tokens_that_the_tokenizer_does_not_know_are_left_out() -> None:
    view = ModuleModel("llama", built("LlamaConfig", FAMILIES["llama"].options), word_tokenizer())
    assert view.vocabulary == 17 < len(view.embeddings)
    found = nearest_keys(view, 0, torch.tensor([6, 7]), 17)
    assert int(found.tokens.max()) == 16


def test_a_word_without_an_embedding_is_refused() -> None:
    model = built("LlamaConfig", FAMILIES["llama"].options)
    model.model.embed_tokens.weight.data[6] = 0.0
    view = ModuleModel("llama", model, word_tokenizer())
    with pytest.raises(InputError, match="'cat' has an embedding of zeros"):
        probe_words(view, ["dog", "cat"])
    with pytest.raises(InputError, match="one of them is empty"):
        probe_words(view, ["dog", ""])


def test_a_token_without_an_embedding_is_followed_from_its_first_direction() -> None:
    model = built("LlamaConfig", FAMILIES["llama"].options)
    model.model.embed_tokens.weight.data[6] = 0.0
    found = follow(ModuleModel("llama", model, word_tokenizer()), "the cat sat on a mat", 2)
    assert found.start is None
    assert found.table["radius"][0] == 0
    assert found.table["nearest_text"].isna().tolist() == [True, False, False]
    assert found.table["from_start"][1] == 0
    assert found.table["travelled"][2] == pytest.approx(found.table["angle"][2])


def test_a_token_that_is_predicted_again_keeps_both_landmarks() -> None:
    view = ModuleModel("llama", built("LlamaConfig", FAMILIES["llama"].options), word_tokenizer())
    found = follow(view, "the cat sat on a mat", -2)
    marks = places(view, replace(found, predicted=found.word), "sphere").query("kind == 'word'")
    assert marks["text"].tolist() == [found.word, found.word]
    alone = places(view, replace(found, end=None), "sphere")
    assert alone.query("kind == 'word'")[["x", "y", "z"]].abs().to_numpy() == pytest.approx(np.array([[1, 0, 0]]), abs=1e-5)
    assert alone.query("kind == 'path'")["shown"].iloc[0] == pytest.approx(1.0, abs=1e-5)


def test_the_reference_is_not_the_probed_layer() -> None:
    assert [reference_layer(12, probed) for probed in (0, 6, 11)] == [6, 7, 6]
    assert reference_layer(1, 0) == 1


def test_the_three_directions_of_the_sphere_hold_start_and_end() -> None:
    view = ModuleModel("llama", built("LlamaConfig", FAMILIES["llama"].options), word_tokenizer())
    found = follow(view, "the cat sat on a mat", -2)
    table = places(view, found, "sphere")
    assert table[["x", "y", "z"]].abs().to_numpy().max() <= 1 + 1e-6
    marks, path = table[table["kind"] == "word"], table[table["kind"] == "path"]
    assert marks["shown"].tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert path["layer"].tolist() == [0, 1, 2]
    cosines = path[["x", "y", "z"]].to_numpy() @ marks[["x", "y", "z"]].to_numpy().T
    assert cosines[:, 0].tolist() == pytest.approx(found.table["cosine_start"].tolist(), abs=1e-5)
    assert cosines[:, 1].tolist() == pytest.approx(found.table["cosine_predicted"].tolist(), abs=1e-5)
    with pytest.raises(InputError, match="did you mean 'sphere'"):
        places(view, found, "spere")


def test_principal_directions_are_those_of_numpy() -> None:
    view = ModuleModel("llama", built("LlamaConfig", FAMILIES["llama"].options), word_tokenizer())
    table = places(view, follow(view, "the cat sat on a mat", -2), "pca")
    W = torch.nn.functional.normalize(view.embeddings[: view.vocabulary], dim=-1).double().numpy()
    _, _, axes = np.linalg.svd(W - W.mean(0), full_matrices=False)
    made = W @ axes[:3].T
    cloud = table[table["kind"] == "cloud"][["x", "y", "z"]].to_numpy()
    assert np.abs(cloud) == pytest.approx(np.abs(made), abs=1e-4)


@pytest.mark.slow
def test_umap_lays_points_among_their_neighbours() -> None:
    pytest.importorskip("umap", reason="pip install 'normscope[words]'")
    centres = 5 * torch.eye(8)[:3]
    words, others = (
        torch.nn.functional.normalize(centres.repeat_interleave(n, 0) + drawn(3 * n, 8, seed=n), dim=-1) for n in (50, 4)
    )
    threads = torch.get_num_threads()
    project = MAPS["umap"](words, others, others, 3)
    known, new = project(words), project(others)
    assert torch.get_num_threads() == threads  # small products of more threads take ten times as long
    middles = known.view(3, 50, 3).mean(1)
    assert torch.cdist(new, middles).argmin(-1).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_pictures_of_norms_are_made_by_norms() -> None:
    points = norm_points(seed=1).set_index(["stage", "point"])
    given = torch.tensor(points.loc["given"].to_numpy())
    made = torch.nn.functional.layer_norm(given, (3,), eps=0)
    assert near(torch.tensor(points.loc["normalised"].to_numpy()), made, 1e-9)
    assert points.loc["centred"].sum(axis=1).abs().max() < 1e-9
    curves = norm_curves()
    circle, moved = (
        torch.tensor(curves[curves["stage"] == s][["x", "y"]].to_numpy()) for s in ("normalised", "with gain and bias")
    )
    gain, bias = torch.tensor((1.6, 0.7)), torch.tensor((0.6, 0.9))
    assert near(moved, circle * gain + bias, 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_plane_of_an_update_shows_its_true_angle(name: str) -> None:
    view = untouched(name).view
    head = strongest_head(view, 1, 7)
    table = head_update(view, 1, head, 7).set_index("part")
    updates = updates_of(view, 1, torch.tensor([7]))
    before, after = updates.states[0], updates.states[0] + updates.by_head[head, 0]
    if name == "gpt2":
        before, after = before - before.mean(), after - after.mean()
    cosine = float(torch.cosine_similarity(before, after, dim=0))
    assert table.loc["back on the sphere", "x"] == pytest.approx(cosine, abs=1e-5)
    moved = table.loc["sum"]
    assert math.hypot(moved["x"], moved["y"]) == pytest.approx(float(after.norm() / before.norm()), rel=1e-5)


def test_notes_say_what_does_not_apply() -> None:
    notes = {name: Queries().notes(untouched(name).view) for name in ("gpt2", "llama", "qwen3", "bert", "bert bare")}
    assert any("relative position 0" in note for note in notes["llama"])
    assert any("Learned position" in note for note in notes["gpt2"])
    assert any("Heads normalise q, k" in note for note in notes["qwen3"])
    assert any("precedence is not measured" in note for note in notes["bert"])
    assert any("no unembedding" in note for note in notes["bert bare"])
    assert not any("relative position 0" in note for note in Queries(distance=3).notes(untouched("llama").view))
    assert any("not tied" in note for note in Values().notes(untouched("llama").view))
    assert not any("not tied" in note for note in Values().notes(untouched("gpt2").view))
    assert any("RMSNorm" in note for note in Embeddings().notes(untouched("llama").view))
    assert any("no logit lens" in note for note in Journey().notes(untouched("bert bare").view))


@pytest.mark.parametrize("name", ["builtin:addition-small-pre", "builtin:addition-small-qkv"])
def test_characters_of_our_own_models_are_words_too(name: str) -> None:
    view = open_model(name)
    words = probe_words(view, ["1", "2", "+"])
    found = Queries().returned(view, 0, words, 3, None, lambda share: None)["heads"]
    _, read = reader(view, 0)(view.embeddings)
    q, k, _ = view.heads_of(0, read[None])
    chosen = torch.tensor([word.token for word in words])
    assert near(found.scores, (q[0][:, chosen] @ k[0].mT).topk(3).values, 1e-4)


def subject_of(view: Model, sentence: str | None = None) -> Subject:
    return Subject(view, Sample.of(torch.zeros(0, 0, dtype=torch.long)), 0, sentence)


def test_layers_and_heads_count_from_either_end() -> None:
    view = untouched("gpt2").view
    chosen = Queries(layer=(-1, 1, 0), head=None, word=("7", "9")).resolved(view)
    assert (chosen.layer, chosen.head, chosen.word) == ((1, 0), (0, 1, 2, 3), ("7", "9"))
    with pytest.raises(InputError, match="layer=2: there are 2, 0 to 1"):
        Queries(layer=(2,)).resolved(view)
    with pytest.raises(InputError, match="word= takes one value, not 2"):
        Geometry(word=("7", "9")).resolved(view)
    strongest = Geometry(word=("7",)).resolved(view)
    assert strongest.head == (strongest_head(view, 0, 7),)


def test_scores_need_words() -> None:
    with pytest.raises(InputError, match="scores=True needs at least 20 words, not 2"):
        Queries(word=("7", "9"), scores=True).measure(subject_of(untouched("gpt2").view))


@pytest.mark.parametrize("name", ["llama", "bert bare"])
def test_an_audit_follows_a_token_of_its_sentence(name: str) -> None:
    family = FAMILIES[name]
    view = ModuleModel(name, built(family.config, family.options, family.maker), word_tokenizer())
    assert Journey.order is not None
    assert Journey().measure(subject_of(view)) == {}
    subject = subject_of(view, "the cat sat on a mat")
    tables = Journey().measure(subject)
    found = follow(view, "the cat sat on a mat", -2)
    facts = Journey().facts(subject, tables)
    followed = {"word": found.word, "predicted": found.predicted, "following": found.following}
    assert facts == {**followed, "special": "[CLS] … [SEP]"}
    findings = list(Journey().findings(tables, {"sentence": subject.sentence}))
    assert len(findings) == (2 if view.predicts else 1)
    section = Journey().section(tables, "")
    assert section is not None
    assert {finding.figure for finding in findings} <= set(section.figures)


@pytest.mark.slow
def test_one_travels_to_stone() -> None:
    view = opened_smollm2()
    found = follow(view, "To kill two birds with one stone", -2)
    last = found.table.iloc[-1]
    assert (found.word, found.predicted, found.following) == (" one", " stone", " stone")
    assert (last["predicted_text"], last["rank"]) == (" stone", 1)
    assert found.table["nearest_text"].iloc[0] == " one"
    assert last["nearest_text"] == " stone"
    assert len(found.table) == 31
    assert (found.table["rank"].iloc[:-1] > 1).any()


@pytest.mark.slow
def test_some_heads_of_smollm2_look_for_the_word_itself() -> None:
    view = opened_smollm2()
    words = probe_words(view)
    assert len(words) == 100
    found = Queries().returned(view, 5, words, 1, None, lambda share: None)["heads"]
    texts = [
        [plain_word(word.name) == plain_word(text) for word, text in zip(words, view.words(head[:, 0]), strict=True)]
        for head in found.tokens
    ]
    rates = [sum(head) / len(head) for head in texts]
    assert rates[6] > 0.5
    assert min(rates) < 0.05


def test_gpt2_has_the_published_distances() -> None:
    folder = os.environ.get("NORMSCOPE_GPT2")
    if not folder:
        pytest.skip("NORMSCOPE_GPT2 does not name a folder with GPT-2")
    view = open_model(folder)
    norm = view.final_norm
    assert norm is not None
    table = embedding_distances(view.embeddings, "layer", norm.eps).set_index("setting")
    assert float(view.embeddings.norm(dim=-1).mean()) == pytest.approx(3.959, abs=1e-3)
    published = {
        "original": (23.747, 0.432, 0.0, 0.0),
        "centred": (24.872, 0.432, 0.150, 0.035),
        "scaled": (2.413, 1.862, 0.0, 0.0),
        "centred and scaled": (14.591, 1.469, 0.150, 0.035),
    }
    for setting, values in published.items():
        row = table.loc[setting, ["l2_mean", "l2_std", "cosine_mean", "cosine_std"]]
        assert row.tolist() == pytest.approx(list(values), abs=2e-3)
    top = extreme_tokens(view)
    favoured = top[(top["score"] == "norm with gain + bias") & (top["end"] == "top")]["text"].tolist()
    assert favoured == [" the", ",", " and", " a", " in"]
