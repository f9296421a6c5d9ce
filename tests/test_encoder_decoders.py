"""Encoder-decoders that normscope trains: each half as a model, beside plain hooks and attention computed by hand."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normscope as ns
from helpers.models import near, random_transformer, steps_of
from normscope.core import CausalMask, PaddingMask
from normscope.errors import InputError
from normscope.experiments.audit import measure_key
from normscope.explorer.session import ModelSession
from normscope.measures.base import Measure, Subject, joined, measure_all
from normscope.measures.collapse import Collapse
from normscope.measures.journey import follow
from normscope.measures.massive import Massive
from normscope.measures.noise import Disturbance, noise_table, norm_noise
from normscope.measures.predictions import predicted_scores
from normscope.measures.rank import Rank
from normscope.measures.removal import beginning
from normscope.measures.sample import chosen_sample
from normscope.measures.sparsity import Sparsity
from normscope.measures.spread import Spread
from normscope.models import NOTHING, AttentionStep, Model, Observer, Sample
from normscope.models.declared import code_facts, differences, observed_facts, unproved
from normscope.training import read_recipe
from normscope.training.batches import one_batch
from normscope.training.recipe import data_of
from normscope.training.tasks import MASK, AdditionTask, as_text
from normscope.training.tasks.addition.feeds import SplitFeed, draw_batches
from normscope.transformer import Row, SavedModel, Transformer, save_model
from normscope.transformer.layers import Attention
from normscope.watch.probe_batch import sample_of

STREAMS = ("encoder", "decoder")
LAYERS = {"encoder": 2, "decoder": 3}
SUBLAYERS = {"encoder": ("attention", "feedforward"), "decoder": ("attention", "cross", "feedforward")}
CAPTURED = {"attention": "attn_out", "cross": "cross_out", "feedforward": "mlp_out"}
ABOUT = {"recipe": read_recipe("tiny", {"integers": [2, 4], "digits": [1, 2]}).values}
EITHER = pytest.mark.parametrize("stream", STREAMS)
SCHEMES = pytest.mark.parametrize("scheme", ["pre", "qkv", "peri", "post", "ln-scaling", "ngpt-lerp"])


@cache
def built(scheme: str = "pre") -> Transformer:
    """A random encoder-decoder whose halves have different depths; attention is sharp in some rows and diffuse in others."""
    model = random_transformer(scheme, encoder_layers=LAYERS["encoder"], layers=LAYERS["decoder"])
    for module in model.modules():
        if isinstance(module, Attention):
            module.score_scale.factor *= 40.0
    return model.double().requires_grad_(False)


def opened(stream: str | None = None, scheme: str = "pre") -> Model:
    return ns.open(SavedModel(built(scheme), ABOUT), stream=stream)


@cache
def examples(rows: int = 12) -> Sample:
    """Examples of the task; both halves have padding."""
    sample = opened().sample(None, rows, 0)
    assert sample.decoded is not None
    assert sample.padded
    assert sample.decoded.padded
    return sample


def run(model: Transformer, sample: Sample) -> Tensor:
    """The logits that the transformer itself computes."""
    decoded, there = sample.decoded, PaddingMask(sample.attention_mask)
    assert decoded is not None
    assert decoded.positions is not None
    assert sample.positions is not None
    with torch.no_grad():
        logits: Tensor = model(
            Row(decoded.tokens, decoded.positions, CausalMask()), Row(sample.tokens, sample.positions, there), there
        )
    return logits


class Plain:
    """What modules of one half receive and return, by plain hooks: blocks, sublayers, and what attention computes."""

    def __init__(self, stream: str, scheme: str = "pre") -> None:
        model, self.calls = built(scheme), dict[tuple[Any, ...], tuple[tuple[Any, ...], Tensor]]()
        hooks = []

        def keep(name: tuple[Any, ...], module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.calls[name] = args, output

        for layer, block in enumerate(getattr(model, stream)):
            hooks.append(block.register_forward_hook(partial(keep, (layer,))))
            for name in SUBLAYERS[stream]:
                sublayer = getattr(block, name)
                hooks.append(sublayer.register_forward_hook(partial(keep, (layer, name))))
                hooks.append(sublayer.f.register_forward_hook(partial(keep, (layer, name, "f"))))
        self.logits = run(model, examples())
        for hook in hooks:
            hook.remove()

    def before(self, *name: Any) -> Tensor:
        states: Tensor = self.calls[name][0][0]
        return states

    def after(self, *name: Any) -> Tensor:
        return self.calls[name][1]


def test_the_decoder_is_viewed_unless_the_encoder_is_chosen(tmp_path: Path) -> None:
    save_model(tmp_path, built("ln-scaling"), ABOUT)
    views = {stream: ns.open(tmp_path, stream=stream) for stream in (None, *STREAMS)}
    assert views[None].stream == "decoder"
    for stream in STREAMS:
        view = views[stream]
        assert (view.stream, view.streams, view.causal) == (stream, STREAMS, stream == "decoder")
        assert view.layers == len(view.blocks) == LAYERS[stream]
        assert all(view.sublayers(layer) == SUBLAYERS[stream] for layer in range(view.layers))
        assert f"{stream}, of encoder and decoder" in repr(view)
        assert f"({stream})" in view.summary
        assert view.offers == {"attention", "matrices", "predictions", "stream", "sublayers", "vocabulary"}
    assert (views["encoder"].final_norm, views["encoder"].unembedding) == (None, None)
    assert views["decoder"].final_norm is not None
    with pytest.raises(InputError, match=r"the model has encoder, decoder; did you mean 'decoder'"):
        ns.open(tmp_path, stream="decodr")
    with pytest.raises(InputError, match="the model has decoder"):
        ns.open("builtin:addition-small-pre", stream="encoder")
    with pytest.raises(InputError, match=r"blocks=…: the blocks of .* are known"):
        ns.open(tmp_path, blocks="decoder")
    with pytest.raises(InputError, match="examples=8 draws examples of the task"):
        chosen_sample(views["decoder"], views["decoder"].encode("[1+2=34"), None, 8, 0)


@EITHER
@SCHEMES
def test_scales_and_norms_are_those_of_the_half(stream: str, scheme: str) -> None:
    view, blocks = opened(stream, scheme), getattr(built(scheme), stream)
    for layer, block in enumerate(blocks):
        for name in SUBLAYERS[stream]:
            step, carry, factor = getattr(block, name).values()
            found = view.step(layer, name), view.carry(layer, name), view.depth_factor(layer, name)
            assert all(torch.equal(torch.as_tensor(x), y) for x, y in zip(found, (step, carry, factor), strict=True))
    kept = [norm for norm in view.norms if norm.layer is not None]
    assert {norm.sublayer for norm in kept} <= set(SUBLAYERS[stream])
    assert {norm.layer for norm in kept} == set(range(LAYERS[stream]))
    assert not list(differences(code_facts(view), observed_facts(view)))
    assert not list(unproved(view))


def test_the_encoder_reads_the_sum_and_the_decoder_the_answer() -> None:
    sample = examples()
    decoded = sample.decoded
    assert decoded is not None
    for row in range(len(sample.tokens)):
        question = as_text(sample.tokens[row][sample.attention_mask[row]])
        terms = re.findall(r"([+-]?)(N?)(\d+)", question)
        total = sum(int(digits) * (-1) ** ((operator == "-") + (sign == "N")) for operator, sign, digits in terms)
        answer = str(total).replace("-", "N")
        assert (question[0], question[-1]) == ("[", "=")
        assert as_text(decoded.tokens[row][decoded.attention_mask[row]]) == f"[{answer}"
        assert as_text(decoded.targets[row][decoded.targets[row] != NOTHING]) == f"{answer}]"
        assert bool((sample.tokens[row][~sample.attention_mask[row]] == MASK).all())
    assert torch.equal(decoded.attention_mask, decoded.targets != NOTHING)
    assert opened("encoder").viewed(sample) is sample
    assert opened("decoder").viewed(sample) is decoded


def test_examples_are_read_as_in_training() -> None:
    """The logits of a batch that the training draws from the same seed, positions and offsets included."""
    sample, task = examples(), data_of(ABOUT)
    assert isinstance(task, AdditionTask)
    feed = SplitFeed(task.train.longest_answer)
    batch = one_batch(draw_batches(task.train, feed, 1, len(sample.tokens), task.offsets, 0, torch.device("cpu")), 0)
    with torch.no_grad():
        logits = feed.logits(built(), batch).unflatten(0, batch["targets"].shape)
    wanted = sample.predicting.targets != NOTHING
    assert near(opened().forward(sample)[wanted], logits[batch["targets"] != MASK])
    assert torch.equal(sample.predicting.targets[wanted], batch["targets"][batch["targets"] != MASK])


def test_an_open_half_is_not_taken_for_the_other() -> None:
    decoder = opened()
    assert ns.open(decoder, stream="dec") is decoder
    for settings, message in (({"stream": "encoder"}, "opened at its stream decoder"), ({"blocks": "h"}, "open already")):
        with pytest.raises(InputError, match=message):
            ns.open(decoder, **settings)
    with pytest.raises(InputError, match="opened at its stream decoder"):
        ns.words(decoder, probe="singular", stream="encoder", progress=False)
    words = ns.words(opened("encoder"), probe="singular", progress=False)
    assert "stream encoder" in words.summary
    assert words.configuration["stream"] == "encoder"


@EITHER
def test_a_text_is_split_where_its_answer_begins(stream: str) -> None:
    view = opened(stream)
    sample = view.batch("[1+23=4")
    assert sample.decoded is not None
    assert (as_text(sample.tokens[0]), as_text(sample.decoded.tokens[0])) == ("[1+23=", "[4")
    assert torch.equal(view("[1+23=4"), run(built(), sample))
    bare = view.batch("[1+23")
    assert bare.decoded is not None
    assert (as_text(bare.tokens[0]), as_text(bare.decoded.tokens[0])) == ("[1+23", "[")
    ids = [view.encode(text) for text in ("[1+2=34", "[1+23=4")]
    read = view.sample(ids, None, 0)
    assert read.decoded is not None
    assert [as_text(row[row != NOTHING]) for row in read.decoded.targets] == ["34", "4"]
    assert [as_text(row[there]) for row, there in zip(read.tokens, read.attention_mask, strict=True)] == ["[1+2=", "[1+23="]


def only_row(sample: Sample, row: int = 0) -> Sample:
    """One row of both halves, without padding."""

    def cut(part: Sample) -> Sample:
        there = int(part.attention_mask[row].sum())
        return replace(part, decoded=None).mapped(lambda name, x: x[row : row + 1, :there])

    question, answer = map(cut, sample.parts)
    return replace(question, decoded=answer)


@EITHER
@SCHEMES
def test_logits_are_those_of_the_transformer_and_of_every_row_alone(stream: str, scheme: str) -> None:
    view, sample = opened(stream, scheme), examples()
    logits = view.forward(sample)
    assert torch.equal(logits, run(built(scheme), sample))
    for row in range(3):
        alone = view.forward(only_row(sample, row))
        assert near(alone[0], logits[row, : alone.shape[1]])


@EITHER
@SCHEMES
def test_states_and_updates_are_those_of_plain_hooks(stream: str, scheme: str) -> None:
    plain, view = Plain(stream, scheme), opened(stream, scheme)
    with view.capture("resid_pre", "resid_mid", "resid_post", *(CAPTURED[name] for name in SUBLAYERS[stream])) as c:
        assert torch.equal(view(examples()), plain.logits)
    for layer in range(LAYERS[stream]):
        assert torch.equal(c["resid_pre", layer], plain.before(layer))
        assert torch.equal(c["resid_mid", layer], plain.after(layer, "attention"))
        assert torch.equal(c["resid_post", layer], plain.after(layer))
        for name in SUBLAYERS[stream]:
            update, norm, carry = c[CAPTURED[name], layer], view.norm_at(layer, name, "stream"), view.carry(layer, name)
            total = carry * plain.before(layer, name) + update
            assert near(total if norm is None else norm(total), plain.after(layer, name))


def attention_by_hand(attention: Attention, x: Tensor, keys: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and output of attention in plain PyTorch, of the parameters as they are stored."""
    W = attention.W_QKV if attention.input_gains is None else attention.W_QKV * attention.input_gains().T[:, :, None, None]
    q, k, v = (torch.einsum("rtd,dhe->rhte", y, W[:, i]) for i, y in enumerate((x, keys, keys)))
    heads = {"q": q, "k": k, "v": v}
    for letter, norm in attention.norms.items():
        y = heads[letter]
        heads[letter] = norm.gain()[:, None] * y / y.square().mean(-1, keepdim=True).sqrt()  # type: ignore[operator,union-attr]
    logits = attention.score_scale.factor * heads["q"] @ heads["k"].mT
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights, torch.einsum("rhqk,rhke,hed->rqd", weights, heads["v"], attention.W_O)


def seen_by(sample: Sample, stream: str, name: str) -> Tensor:
    """Which keys are seen, from the sample alone: (rows, 1, queries, keys)."""
    assert sample.decoded is not None
    queries = sample.decoded.tokens.shape[1]
    if (stream, name) == ("decoder", "attention"):
        return torch.arange(queries)[:, None] >= torch.arange(queries)
    return sample.attention_mask[:, None, None, :]


@EITHER
@pytest.mark.parametrize("scheme", ["pre", "qkv"])
def test_attention_is_what_is_computed_by_hand(stream: str, scheme: str) -> None:
    plain, view, sample = Plain(stream, scheme), opened(stream, scheme), examples()
    names = {"attention": "pattern", "cross": "cross_pattern"}
    with view.capture(*(names[name] for name in SUBLAYERS[stream] if name in names)) as c:
        view(sample)
    for layer, block in enumerate(getattr(built(scheme), stream)):
        for name in (name for name in SUBLAYERS[stream] if name in names):
            args, output = plain.calls[layer, name, "f"]
            keys = args[0] if args[2] is None else args[2]
            weights, by_hand = attention_by_hand(getattr(block, name).f, args[0], keys, seen_by(sample, stream, name))
            assert near(by_hand, output)
            assert near(c[names[name], layer], weights)
    padding = ~sample.attention_mask[:, None, None, :]
    masked = c["pattern", 0] if stream == "encoder" else c["cross_pattern", 0]
    assert not bool(masked.masked_select(padding).any())


@EITHER
@SCHEMES
def test_matrices_give_the_logits_and_updates_of_attention(stream: str, scheme: str) -> None:
    """The input times W_Q and W_K, norms applied, gives the scores; the mixed messages give what attention writes."""
    plain, view = Plain(stream, scheme), opened(stream, scheme)
    for step in steps_of(view, examples()):
        assert torch.equal(step.stream, plain.before(step.layer))
        assert torch.equal(step.input, plain.before(step.layer, "attention", "f"))
        q, k, _ = view.project(step)
        assert near(q, step.q)
        assert near(k, step.k)
        matrices = view.projections(step.layer)
        if not any(norm.slot in ("q", "k") for norm in view.norms) and scheme != "ngpt-lerp":
            scores = (step.input[:, None] @ matrices.W_QK @ step.input[:, None].mT).masked_fill(~step.mask, 0.0)
            assert near(scores, step.raw_scores().masked_fill(~step.mask, 0.0))
        written = (step.weights() @ step.messages).sum(1)
        after = view.update(step.layer, "attention").state(step.stream, written)
        assert near(after, plain.after(step.layer, "attention"))


def changed(step: AttentionStep, layer: int, value: Callable[[Tensor], Tensor]) -> Tensor | None:
    return value(step.weights() @ step.v) if step.layer == layer else None


def test_cross_attention_can_be_replaced_and_changes_the_decoder() -> None:
    view, sample = opened(), examples()
    clean = view.forward(sample)
    same = view.forward(sample, Observer(cross=partial(changed, layer=1, value=lambda x: x)))
    assert near(same, clean)
    removed = view.forward(sample, Observer(cross=partial(changed, layer=1, value=torch.zeros_like)))
    assert float((removed - clean).abs().max()) > 1e-2
    without = random_transformer("pre", encoder_layers=LAYERS["encoder"], layers=LAYERS["decoder"])
    without.double().load_state_dict(built().state_dict())
    with torch.no_grad():
        without.decoder[1].cross.f.W_O.zero_()
    assert near(removed, run(without, sample))
    steps: list[AttentionStep] = []
    view.forward(sample, Observer(cross=steps.append))
    assert [step.layer for step in steps] == list(range(view.layers))
    plain = Plain("decoder")
    for step in steps:
        assert torch.equal(step.stream, plain.before(step.layer))
        assert torch.equal(step.input, plain.before(step.layer, "cross", "f"))
        before, written = plain.before(step.layer, "cross"), (step.weights() @ step.messages).sum(1)
        assert near(view.update(step.layer, "cross").state(before, written), plain.after(step.layer, "cross"))


def test_an_encoder_has_no_cross_attention() -> None:
    called: list[AttentionStep] = []
    opened("encoder").forward(examples(), Observer(cross=called.append))
    assert not called
    for view in (opened("encoder"), ns.open("builtin:addition-small-pre")):
        with pytest.raises(InputError, match="it has no attention to another stream"), view.capture("cross_pattern"):
            pass


def test_states_of_the_encoder_reach_the_logits_and_its_padding_does_not() -> None:
    view, sample = opened("encoder"), examples()
    clean = view.forward(sample)

    def shifted(where: Tensor, layer: int, x: Tensor) -> Tensor | None:
        return x + 5.0 * where[..., None] if layer == view.layers else None

    second = sample.attention_mask & (torch.arange(len(clean)) == 1)[:, None]
    moved = view.forward(sample, Observer(state=partial(shifted, second)))
    assert not near(moved[1], clean[1])
    assert torch.equal(moved[2:], clean[2:])
    assert near(view.forward(sample, Observer(state=partial(shifted, ~sample.attention_mask))), clean)
    with pytest.raises(InputError, match="computes no logits of the states of its encoder"):
        view.read_out(torch.zeros(1, view.dim))
    decoder, last = opened(), list[Tensor]()
    logits = decoder.forward(sample, Observer(left=lambda layer, x: last.append(x.clone())))
    assert near(decoder.read_out(last[-1][:, 1]), logits[:, 1])


def test_examples_that_leave_a_half_without_tokens_are_refused() -> None:
    """Means over tokens need some, and an example without its beginning would be another one."""
    for stream, text in (("decoder", "[1+2="), ("decoder", "[1+2=3"), ("encoder", "[=")):
        view = opened(stream)
        with pytest.raises(InputError, match=rf"too short for the {stream}: \d tokens?, and at least 3 are needed"):
            view.sample(view.encode(text), None, 0)
    assert opened("encoder").sample(opened().encode("[1+2="), None, 0).decoded is not None
    for wrong in ("1+2=3", "=12"):
        ids = torch.tensor([opened().encode(wrong)])
        for read in (
            opened(),
            partial(opened().sample, size=None, seed=0),
            partial(sample_of, opened(), rows=None, tokens=None),
        ):
            with pytest.raises(InputError, match=rf"examples that begin with \[, such as \[12\+7=1, not '{re.escape(wrong)}'"):
                read(ids)
    with pytest.raises(InputError, match="too short for the decoder: give rows"):
        sample_of(opened(), torch.tensor([opened().encode("[1+2=")] * 4), None, None)


def rows_of(*texts: str) -> Tensor:
    return torch.tensor([opened().encode(text) for text in texts])


def halves(sample: Sample) -> list[list[str]]:
    """The characters of every row of both halves, without padding, which is at the end of rows."""
    for part in sample.parts:
        assert bool((part.attention_mask.int().diff(dim=1) <= 0).all())
    return [[as_text(row[there]) for row, there in zip(part.tokens, part.attention_mask, strict=True)] for part in sample.parts]


def test_examples_that_are_ended_or_padded_are_those_that_are_not() -> None:
    rows = rows_of("[1+2=3]********", "[1+2=34********", "[10+2345=23455]")
    sample = opened().sample(rows, None, 0)
    assert halves(sample) == [["[1+2=", "[1+2=", "[10+2345="], ["[3", "[34", "[23455"]]
    assert [as_text(row[row != NOTHING]) for row in sample.predicting.targets] == ["3", "34", "23455"]
    logits = opened().forward(sample)
    for row, text in enumerate(("[1+2=3", "[1+2=34", "[10+2345=23455")):
        alone = opened()(text)
        assert near(alone[0], logits[row, : alone.shape[1]])
    model = SavedModel(built(), ABOUT)
    audit = ns.audit(model, token_ids=rows.tolist(), fresh=True, progress=False)
    assert audit.configuration["tokens"] == 2 + 3 + 6
    for wrong in ("[1+2=3]4", "[1+*2=3"):
        with pytest.raises(InputError, match=rf"an example ends with \], and \* alone follows it, not '{re.escape(wrong)}'"):
            opened()(wrong)


def test_a_probe_of_examples_is_split_with_its_mask() -> None:
    rows = rows_of("[1+2=33", "[1+23=4")
    whole = torch.ones_like(rows)
    given = {"input_ids": rows, "attention_mask": whole, "labels": rows, "position_ids": rows}
    sample = sample_of(opened(), given, None, None)
    assert halves(sample) == [["[1+2=", "[1+23="], ["[33", "[4"]]
    assert torch.equal(opened()(sample), opened()(rows))
    left = torch.cat((torch.zeros_like(rows[:, :2]), rows), 1)
    mask = torch.arange(9) >= torch.tensor([[2], [2]])
    mask[0, -1] = False
    assert halves(sample_of(opened(), {"input_ids": left, "attention_mask": mask}, None, None))[1] == ["[3", "[4"]
    with pytest.raises(InputError, match=r"a mask of \[2, 6\] and tokens of \[2, 7\]"):
        sample_of(opened(), {"input_ids": rows, "attention_mask": whole[:, 1:]}, None, None)


@EITHER
@pytest.mark.parametrize("vocabulary", [16, 100])
def test_both_halves_of_another_vocabulary_read_the_same_ids(stream: str, vocabulary: int) -> None:
    """They are no examples of addition, even where their numbers are those of its characters."""
    model = random_transformer("pre", encoder_layers=2, vocabulary=vocabulary)
    view, tokens = ns.open(model, stream=stream), torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [5, 12, 7, 8, 9, 10, 11, 13]])
    row = Row(tokens, torch.arange(8).expand(2, -1), CausalMask())
    there = PaddingMask(torch.ones(2, 8, dtype=torch.bool))
    with torch.no_grad():
        assert near(view(tokens), model(row, replace(row, mask=there), there))
    sample = sample_of(view, tokens, None, None)
    assert torch.equal(sample.tokens, tokens)
    assert sample.decoded is None
    assert ns.audit(view, token_ids=[3, 4, 5, 6, 7, 8], progress=False).configuration["tokens"] == 6


@EITHER
def test_noise_of_level_0_changes_nothing_and_more_changes_the_predictions(stream: str) -> None:
    view, sample = opened(stream), examples()

    def disturbed(level: float, view: Model = view) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return view.forward(sample, norm_noise(Disturbance(level), view.normalised_heads, generator))

    clean = view.forward(sample)
    assert torch.equal(disturbed(0.0), clean)
    assert float((disturbed(0.1) - clean).abs().max()) > 1e-2
    protected = opened(stream, "qkv")
    assert torch.equal(disturbed(0.1, protected), protected.forward(sample))
    table = noise_table(view, sample, [Disturbance(0.0), Disturbance(0.3)], draws=2)
    logits, decoded = run(built(), sample), sample.predicting
    wanted = decoded.targets != NOTHING
    right = (logits.argmax(-1) == decoded.targets)[wanted].double().mean()
    assert table["accuracy"].iloc[0] == table["accuracy"].iloc[1] == pytest.approx(float(right))
    loss = F.cross_entropy(logits[wanted], decoded.targets[wanted])
    assert table["loss"].iloc[:2].tolist() == pytest.approx([float(loss)] * 2)
    assert table["loss_change"].iloc[2] != 0
    assert predicted_scores(view, sample).shape[1] == int(wanted.sum())


def padded(sample: Sample, places: int) -> Sample:
    """The same examples with more padding in both halves, of another character."""

    def wider(name: str, x: Tensor) -> Tensor:
        return F.pad(x, (0, places), value={"tokens": 3, "targets": NOTHING}.get(name, 0))

    return sample.mapped(wider)


def tables_of(view: Model, sample: Sample, *measures: Measure) -> dict[str, pd.DataFrame]:
    return joined(measure_all(Subject(view, sample), measures).values())


@EITHER
def test_measures_of_a_half_do_not_count_padding(stream: str) -> None:
    view, sample = opened(stream), examples(48)
    measures = Spread(), Collapse(levels=(0.03, 0.3), draws=0), Sparsity(), Massive()
    tables, wider = (tables_of(view, each, *measures) for each in (sample, padded(sample, 4)))
    for name in ("spread", "collapse", "margins", "sparsity"):
        numbers = [table[name].select_dtypes("number").to_numpy(float) for table in (tables, wider)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-5, nan_ok=True)
    read = view.viewed(sample)
    rows = int(read.attention_mask[:, 1:].sum()) * view.heads * view.layers
    whole = tables["sparsity"][tables["sparsity"]["layer"].isna()]
    assert int(whole["distributions"].iloc[0]) == rows
    assert 0 < float(whole["share"].iloc[0]) < 1
    words = view.words(read.tokens[0][read.attention_mask[0]])
    assert tables["tokens"]["text"].tolist() == wider["tokens"]["text"].tolist() == words
    largest = tables["activations"]
    places = torch.from_numpy(largest[["row", "position"]].to_numpy(int)).unbind(1)
    assert largest["text"].tolist() == view.words(read.tokens[places])
    everywhere = tables["collapse"][tables["collapse"]["layer"].isna()]
    assert bool((everywhere["probability"].diff().dropna() > 0).all())


@EITHER
def test_spread_is_of_the_norms_before_the_layers_of_the_half(stream: str) -> None:
    view, sample, plain = opened(stream), examples(), Plain(stream)
    table = tables_of(view, sample, Spread())["spread"]
    counted = view.viewed(sample).attention_mask.clone()
    counted[:, 0] = False
    for layer in range(view.layers):
        norms = plain.before(layer).norm(dim=-1)[counted]
        row = table[(table["layer"] == layer) & table["head"].isna()].iloc[0]
        assert float(norms.min()) / float(norms.max()) <= row["low99"] <= 1 <= row["high99"] <= float(norms.max() / norms.min())


@EITHER
@pytest.mark.parametrize("scheme", ["pre", "qkv"])
def test_a_half_is_audited_whole(stream: str, scheme: str) -> None:
    model = SavedModel(built(scheme), ABOUT)
    audit = ns.audit(model, stream=stream, examples=8, fresh=True, progress=False)
    assert list(audit.tables["skipped"]["measure"]) == ["journey"]
    assert (audit.configuration["stream"], audit.configuration["layers"]) == (stream, LAYERS[stream])
    sample = opened(stream).sample(None, 8, 0)
    assert audit.configuration["tokens"] == int(opened(stream).viewed(sample).attention_mask.sum())
    removed = audit.tables["removal"]
    assert len(removed) == 1 + LAYERS[stream]
    assert bool((removed["loss_change"].iloc[1:].abs() > 0).all())
    found = ns.stability(model, stream=stream, examples=8, noise_levels="0.1", layer_noise="0.1", levels="0.1", progress=False)
    assert {"spread", "noise", "collapse", "sparsity"} <= set(found.tables)
    strict = found.tables["collapse"]
    assert set(strict["definition"]) == {"loose", "strict"}
    assert math.isfinite(float(found.tables["noise"]["accuracy"].iloc[-1]))


@EITHER
def test_a_token_is_followed_through_the_half_that_reads_it(stream: str) -> None:
    view, ids = opened(stream), opened().encode("[1+23=45")
    trajectory = follow(view, ids, -1)
    assert trajectory.word == {"encoder": "=", "decoder": "5"}[stream]
    assert len(trajectory.table) == LAYERS[stream] + 1
    assert ("probability" in trajectory.table) == (stream == "decoder")
    session, sample = ModelSession(view), view.viewed(only_row(view.sample(None, 1, 0)))
    words, shown = view.words(sample.tokens[0]), session.read("")
    assert shown["prompt"]["tokens"] == words
    assert [session.words("", 0, 0, place)["rows"][0]["word"] for place in range(len(words))] == words
    assert bool(session.token("", 1)["next"]) == (stream == "decoder")
    assert ("computed from the states of the decoder" in shown["missing"].get("lens", "")) == (stream == "encoder")


def test_the_first_predictions_are_those_of_whole_rows() -> None:
    sample = examples(48)
    few = beginning(sample, 10)
    counts = (sample.predicting.targets != NOTHING).sum(1).cumsum(0)
    assert [len(part.tokens) for part in few.parts] == [int((counts < 10).sum()) + 1] * 2
    assert [part.tokens.shape[1] for part in few.parts] == [part.tokens.shape[1] for part in sample.parts]
    assert beginning(sample, 1).parts[0].tokens.shape == (1, sample.tokens.shape[1])


def test_cached_tables_of_one_half_are_not_those_of_the_other() -> None:
    keys = [measure_key(Rank(), Subject(opened(stream), examples())) for stream in STREAMS]
    assert keys[0] != keys[1]
    other = replace(examples(), decoded=replace(examples().predicting, tokens=examples().predicting.tokens.flip(0)))
    records = [Subject(opened(), sample).record["sample"] for sample in (examples(), other)]
    assert records[0] != records[1]
