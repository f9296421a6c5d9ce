"""Recipes, batches, the loop, checkpoints and evaluation."""

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch

from normscope.errors import InputError
from normscope.schemes import NAMED
from normscope.training import PRESETS, Checkpoints, DivergedError, NotLearningError, Training, read_recipe, recipe_from
from normscope.training.batches import one_batch
from normscope.training.loop import Metrics, epoch_losses, plateaus
from normscope.training.recipe import parse_change, task_of
from normscope.training.tasks import MASK, AdditionTask, encode
from normscope.training.tasks.addition.evaluation import Tally
from normscope.training.tasks.addition.feeds import PackedFeed, PaddedFeed, SplitFeed, draw_batches

CPU = torch.device("cpu")
ALL_PRESETS = [(task, preset) for task, presets in PRESETS.items() for preset in presets]
SHORT = {"examples": 20 * 32, "batch": 32, "epoch": 10, "layers": 2, "dim": 32, "head": 8, "test_examples": 64}


def short(**changes):
    return read_recipe("tiny", {**SHORT, **changes})


def weights(training):
    return {name: value.clone() for name, value in training.model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(recipe):
    training = Training(recipe)
    list(training.run())
    return training


class Losses(list[float]):
    """The loss of every step, as an observer."""

    def due(self, step):
        return True

    def step(self, loss, *, step, rate):
        self.append(loss)


class TestRecipe:
    @pytest.mark.parametrize(("task", "preset"), ALL_PRESETS)
    def test_a_preset_survives_being_written_and_read(self, task, preset, tmp_path):
        recipe = read_recipe(preset, {"task": task})
        file = tmp_path / "recipe.toml"
        file.write_text(recipe.toml)
        assert read_recipe(str(file)) == recipe

    @pytest.mark.parametrize(
        ("preset", "layers", "dim", "heads", "integers", "digits"),
        [
            ("baseline", 10, 512, 12, (3, 4, 6), (2, 3)),
            ("alternative", 8, 512, 12, (3, 4, 6), (2, 3)),
            ("large", 12, 1024, 16, (4, 5, 7, 8), (3, 4, 5)),
        ],
    )
    def test_the_papers_models_have_the_papers_shapes(self, preset, layers, dim, heads, integers, digits):
        recipe = read_recipe(preset)
        assert (recipe.layers, recipe.dim, recipe.heads, recipe.integers, recipe.digits) == (
            layers,
            dim,
            heads,
            integers,
            digits,
        )
        assert (recipe.head, recipe.feedforward, recipe.readout, recipe.frequencies, recipe.seed) == (
            64,
            512,
            (512, 512),
            32,
            100,
        )
        assert recipe.model.scheme.norm == "rms"
        assert recipe.model.feedforward_norm == "layer"

    @pytest.mark.parametrize(
        ("text", "key", "value"),
        [("rate=1e-3", "rate", 1e-3), ("scheme=qkv", "scheme", "qkv"), ("digits=[1, 2]", "digits", [1, 2]),
         ("calibrate=false", "calibrate", False), (" batch = 64 ", "batch", 64)],
    )  # fmt: skip
    def test_changes_are_read_as_toml_and_texts_need_no_quotes(self, text, key, value):
        assert parse_change(text) == (key, value)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layer": 3}, "did you mean 'layers'"),
            ({"rate": "fast"}, "rate='fast': should be a valid number"),
            ({"batch": 0}, "batch=0: should be greater than or equal to 1"),
            ({"batch": True}, "batch=True: should be a valid integer"),
            ({"schedule": "cosin"}, "did you mean 'cosine'"),
            ({"scheme": "perl"}, "did you mean 'peri'"),
            ({"norm": "batch"}, "norm is one of rms, layer"),
            ({"digits": []}, "numbers of digits"),
            ({"digits": [1.5]}, "digits=1.5: should be a valid integer"),
            ({"frequencies": 40}, "from 0 to dim/2"),
            ({"rate": math.nan}, "rate=nan: should be a finite number"),
            ({"batch": 10**9}, "more than the"),
            ({"digits": [2, 2]}, "each is named once"),
            ({"offsets": 1e30}, "offsets=1.*: should be less than or equal to 1000000"),
            ({"dim": 1e12}, "dim=1000000000000: should be less than"),
            ({"dim": 1, "frequencies": 0}, "dim=1: should be greater than or equal to 2"),
            ({"head": 1, "scheme": "qkv"}, "a head has at least 2 dimensions"),
        ],
    )
    def test_what_is_wrong_is_said(self, changes, message):
        with pytest.raises(InputError, match=message):
            read_recipe("tiny", changes)

    def test_files_that_are_no_recipes(self, tmp_path):
        with pytest.raises(InputError, match="no recipe file"):
            read_recipe(str(tmp_path / "none.toml"))
        (tmp_path / "bad.toml").write_text("rate = ")
        with pytest.raises(InputError, match="not valid TOML"):
            read_recipe(str(tmp_path / "bad.toml"))
        with pytest.raises(InputError, match="did you mean 'tiny'"):
            read_recipe("tinny")

    def test_a_scheme_file_is_found_beside_its_recipe(self, tmp_path):
        (tmp_path / "mine.toml").write_text('[attention]\ninput = "norm"\nstep = "1/sqrt(layer)"\n')
        (tmp_path / "recipe.toml").write_text('scheme = "mine.toml"\n')
        recipe = read_recipe(str(tmp_path / "recipe.toml"))
        assert recipe.found_scheme.name == "mine"
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "again.toml").write_text(recipe.toml)
        assert read_recipe(str(tmp_path / "elsewhere" / "again.toml")) == recipe

    @pytest.mark.parametrize(("task", "preset"), ALL_PRESETS)
    def test_a_preset_leaves_a_scheme_its_own_norm(self, task, preset, tmp_path):
        (tmp_path / "mine.toml").write_text('norm = "layer"\n[attention]\ninput = "norm"\n')
        assert read_recipe(preset, {"task": task, "scheme": str(tmp_path / "mine.toml")}).model.scheme.norm == "layer"

    def test_rates_follow_their_schedule(self):
        recipe = short(schedule="cosine", warmup=5, rate=1.0)
        rates = [recipe.rate_at(step) for step in range(recipe.steps + 1)]
        assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert all(a >= b for a, b in pairwise(rates[5:]))
        assert rates[-1] == pytest.approx(0.0)
        linear = short(schedule="linear", rate=1.0, warmup=0)
        assert [linear.rate_at(step) for step in (0, 10, 20)] == pytest.approx([1.0, 0.5, 0.0])
        assert short(schedule="constant", rate=1.0, warmup=0).rate_at(19) == 1.0

    def test_the_rate_is_halved_after_patience_epochs_without_a_better_loss(self):
        assert plateaus([3.0, 2.0, 1.0], patience=3) == 0
        assert plateaus([1.0, 1.1, 1.2], patience=3) == 0
        assert plateaus([1.0, 1.1, 1.2, 1.0], patience=3) == 1
        assert plateaus([1.0, *[2.0] * 6], patience=3) == 2
        rows = [Metrics(2, 0, 0, 0, 4.0, 0, 0), Metrics(3, 0, 0, 0, 1.0, 0, 0), Metrics(6, 0, 0, 0, 2.0, 0, 0)]
        assert epoch_losses(rows, 3) == pytest.approx([3.0, 2.0])


class TestBatches:
    task = AdditionTask.of((2, 4), (3,), (5,), (1, 2)).train

    def drawn(self, feed, seed=3, batches=3, batch=40):
        return draw_batches(self.task, feed, batches, batch, 50, seed, CPU)

    def test_packed_and_padded_batches_hold_the_same_examples(self):
        packed, padded = self.drawn(PackedFeed.of(self.task, 40, 32)), self.drawn(PaddedFeed())
        for index in range(3):
            row, rows = one_batch(packed, index), one_batch(padded, index)
            there = (rows["targets"] != MASK).flip(1).cumsum(1).flip(1) > 0  # up to the last prediction, all is read
            count = int(there.sum())
            assert torch.equal(row["characters"][:count], rows["characters"][there])
            assert torch.equal(row["positions"][:count], rows["positions"][there])
            wanted = row["targets"] != MASK
            assert torch.equal(row["targets"][wanted], rows["targets"][rows["targets"] != MASK])
            assert (row["characters"][count:] == MASK).all()

    def test_an_example_that_does_not_fit_is_left_out_whole(self):
        whole = self.drawn(PackedFeed.of(self.task, 40, 32), batches=1)
        cramped = self.drawn(replace(PackedFeed.of(self.task, 40, 32), tokens=64), batches=1)
        wanted = cramped["targets"][0] != MASK
        assert 0 < wanted.sum() < (whole["targets"][0] != MASK).sum()
        ends = (cramped["targets"][0] == encode("]")).sum()
        assert len(cramped["segments"][0][cramped["places"][0][wanted]].unique()) == ends

    def test_offsets_shift_whole_examples_and_reach_their_bounds(self):
        rows = self.drawn(PaddedFeed(), batches=1, batch=3000)["positions"][0]
        assert (rows[:, 1:] - rows[:, :-1] == 1).all()
        assert rows[:, 0].unique().tolist() == list(range(51))

    def test_an_encoder_reads_the_question_and_a_decoder_the_answer(self):
        batch = one_batch(self.drawn(SplitFeed(self.task.longest_answer), batches=1), 0)
        padded = one_batch(self.drawn(PaddedFeed(), batches=1), 0)
        for question, there, answer, target, line in zip(
            batch["question"], batch["question_there"], batch["answer"], batch["targets"], padded["targets"], strict=True
        ):
            right = line[line != MASK]
            assert torch.equal(target[target != MASK], right)
            assert torch.equal(answer[: len(right)], torch.cat((encode("["), right[:-1])))
            assert question[there][-1] == encode("=")


class TestLoop:
    def test_a_short_run_is_the_same_to_the_bit_again(self):
        one, other = Training(short()), Training(short())
        rows = list(one.run())
        for _ in other.run():
            pass
        assert same(weights(one), weights(other))
        assert [row.loss for row in rows] == [row.loss for row in other.metrics]
        assert not same(weights(one), weights(Training(short(seed=5))))

    @pytest.mark.parametrize("scheme", ["pre", "qkv", "ngpt-lerp"])
    def test_training_lowers_the_loss(self, scheme):
        training = Training(short(scheme=scheme, examples=32 * 120, rate=3e-3, schedule="constant", warmup=0))
        rows = list(training.run())
        assert rows[-1].loss < 0.75 * rows[0].loss
        assert rows[-1].examples == training.recipe.examples
        assert training.table["step"].is_monotonic_increasing

    @pytest.mark.parametrize("scheme", sorted(NAMED))
    def test_every_scheme_trains_as_decoder_and_those_of_a_softmax_as_encoder_decoder(self, scheme):
        softmax = all(stage.attention.scores == "softmax" for stage in NAMED[scheme].stages)
        for encoder_layers in (0, 1) if softmax else (0,):
            training = Training(short(scheme=scheme, examples=64, encoder_layers=encoder_layers))
            assert all(math.isfinite(row.loss) for row in training.run())

    def test_a_run_taken_up_again_ends_with_the_same_weights(self, tmp_path):
        recipe = short(schedule="plateau", patience=1, epoch=4, rate=3e-3)
        whole = Training(recipe)
        for _ in whole.run():
            pass
        checkpoints = Checkpoints.of(tmp_path / "run", recipe.record)
        with checkpoints.alone():
            stopped = iter(Training(recipe).run(checkpoints, every=0.0))
            for _ in range(2):
                next(stopped)
            checkpoint, refused = checkpoints.load(CPU)
            again = Training(recipe)
            again.restore(checkpoint)
            assert 0 < again.step < recipe.steps
            assert not refused
            for _ in again.run(checkpoints, every=0.0):
                pass
        assert same(weights(whole), weights(again))
        assert [(r.step, r.loss, r.rate) for r in whole.metrics] == [(r.step, r.loss, r.rate) for r in again.metrics]

    def test_a_divergence_names_its_step_and_leaves_the_last_good_checkpoint(self, tmp_path):
        recipe = short(rate=1e12, warmup=0, clip=0.0, schedule="constant", epoch=1)
        checkpoints = Checkpoints.of(tmp_path / "run", recipe.record)
        training = Training(recipe)
        with checkpoints.alone(), pytest.raises(DivergedError) as caught:
            for _ in training.run(checkpoints, every=0.0):
                pass
        checkpoint, _ = checkpoints.load(CPU)
        assert caught.value.step == training.step + 1
        assert checkpoint.step == training.step
        assert all(value.isfinite().all() for value in checkpoint.tensors.values())

    def test_weights_that_are_not_finite_are_a_divergence_too(self, tmp_path):
        """The loss of a step is taken before its update; what the update did must not become a checkpoint or a result."""
        recipe = short(rate=1e38, warmup=0, clip=0.0, schedule="constant", examples=32)
        checkpoints = Checkpoints.of(tmp_path / "run", recipe.record)
        with checkpoints.alone(), pytest.raises(DivergedError, match="a weight is not a finite number at step 1"):
            for _ in Training(recipe).run(checkpoints, every=0.0):
                pass
        assert not checkpoints.folder.exists()

    @pytest.mark.parametrize(("epoch", "ends"), [(1, 7), (5, 10), (10, 10)])
    def test_a_run_that_does_not_learn_is_stopped_after_a_third_of_its_steps(self, epoch, ends):
        """By its last losses up to there, however the steps are divided into blocks; those after it do not count."""
        whole = trained(short(epoch=epoch))
        losses = Losses()
        list(Training(whole.recipe).run(observer=losses))
        mean = sum(losses[: whole.recipe.judged_at]) / 7
        hopeless = Training(short(epoch=epoch, stop_above=0.999 * mean))
        with pytest.raises(NotLearningError, match=rf"the loss is {mean:.4g}, above stop_above=.*, at step 7$") as caught:
            list(hopeless.run())
        assert (caught.value.step, hopeless.step) == (7, ends)
        assert same(weights(whole), weights(trained(short(epoch=epoch, stop_above=1.001 * mean))))

    @pytest.mark.parametrize("epoch", [1, 7, 40])
    def test_the_last_twenty_losses_decide(self, epoch):
        recipe, losses = short(epoch=epoch, examples=90 * 32, stop_above=0.1), Losses()
        with pytest.raises(NotLearningError) as caught:
            list(Training(recipe).run(observer=losses))
        decisive = losses[10:30]
        if epoch == 7:  # of the block that begins at 7, steps 8 to 14, three in ten are among them: they count with its mean
            decisive = [*[sum(losses[7:14]) / 7] * 4, *losses[14:30]]
            blocks = [sum(losses[a:b]) / 7 for a, b in ((7, 14), (14, 21), (21, 28))]
            decisive = [*[blocks[0]] * 4, *[blocks[1]] * 7, *[blocks[2]] * 7, *losses[28:30]]
        assert str(caught.value).startswith(f"the loss is {sum(decisive) / 20:.4g}, above")

    def test_a_run_is_not_stopped_in_its_last_block(self):
        assert trained(short(epoch=20, stop_above=0.01)).step == 20

    def test_a_stopped_run_is_resumed_with_a_higher_limit(self, tmp_path):
        recipe = short(epoch=2, stop_above=0.01)
        checkpoints = Checkpoints.of(tmp_path / "run", recipe.record)
        with checkpoints.alone(), pytest.raises(NotLearningError):
            list(Training(recipe).run(checkpoints, every=0.0))
        higher = short(epoch=2, stop_above=100.0)
        resumed = Training(higher)
        resumed.restore(Checkpoints.of(tmp_path / "run", higher.record).load(CPU)[0])
        assert resumed.step == 6
        list(resumed.run())
        assert same(weights(resumed), weights(trained(short(epoch=2))))

    def test_weight_decay_pulls_at_matrices_alone(self):
        training = Training(short(weight_decay=0.5))
        decayed, others = training.optimiser.param_groups
        assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
        names = {id(p): name for name, p in training.model.named_parameters()}
        assert all("W_" in names[id(p)] or "types" in names[id(p)] or "weights" in names[id(p)] for p in decayed["params"])
        assert not any("W_" in names[id(p)] for p in others["params"])


class TestCheckpoints:
    def saved(self, folder, steps=3):
        recipe = short(epoch=4)
        checkpoints = Checkpoints.of(folder / "run", recipe.record)
        with checkpoints.alone():
            run = Training(recipe).run(checkpoints, every=0.0)
            for _ in range(steps):
                next(run)
        return checkpoints

    def test_only_the_last_two_are_kept(self, tmp_path):
        assert len(self.saved(tmp_path).paths) == 2

    @pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "step", "dtype"])
    def test_a_damaged_one_is_refused_and_the_one_before_it_used(self, tmp_path, damage):
        checkpoints = self.saved(tmp_path)
        before, last = checkpoints.paths
        content = bytearray(last.read_bytes())
        if damage == "flipped":
            content[-7] ^= 1
        damaged = {
            "truncated": content[:-100],
            "flipped": content,
            "empty": b"",
            "text": b"hello",
            "step": content.replace(b'"step":"', b'"step":"x', 1)[: len(content)],
            "dtype": content.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1),
        }
        last.write_bytes(damaged[damage])
        checkpoint, refused = checkpoints.load(CPU)
        assert checkpoint.step == int(before.stem.split("-")[1])
        assert len(refused) == 1
        assert last.name in refused[0]

    def test_one_of_another_run_is_refused(self, tmp_path):
        checkpoints = self.saved(tmp_path)
        stranger = Checkpoints(checkpoints.folder, "another")
        checkpoint, refused = stranger.load(CPU)
        assert checkpoint is None
        assert all("another run" in line for line in refused)

    def test_a_second_process_is_kept_out(self, tmp_path):
        checkpoints = Checkpoints.of(tmp_path / "run", {})
        with checkpoints.alone(), pytest.raises(InputError, match="another process"), checkpoints.alone():
            pass


class TestEvaluation:
    def test_accuracy_and_standard_error_of_known_answers(self):
        """Right characters by hand, and the error of a ratio of means from NumPy's own variance."""
        rng = np.random.default_rng(0)
        tokens = rng.integers(2, 5, 400)
        targets = torch.full((400, 6), MASK)
        for row, count in enumerate(tokens):
            targets[row, :count] = torch.from_numpy(rng.integers(0, 10, count))
        predictions = torch.where(torch.from_numpy(rng.random((400, 6)) < 0.8), targets, 12)
        right, wanted = (predictions == targets) & (targets != MASK), targets != MASK
        tally = Tally(6)
        for part in (slice(0, 150), slice(150, 400)):
            tally.add(right[part], wanted[part])
        hits = right.sum(1).numpy()
        share = hits.sum() / tokens.sum()
        found = tally.accuracy
        assert found["accuracy"] == pytest.approx(share)
        assert found["stderr"] == pytest.approx(np.sqrt(np.var(hits - share * tokens) / 400) / tokens.mean(), rel=1e-6)
        assert found["exact"] == pytest.approx((hits == tokens).mean())
        assert sum(row["tokens"] for row in tally.positions) == found["tokens"] == tokens.sum()

    @pytest.mark.parametrize(("encoder_layers", "feed"), [(0, PaddedFeed), (1, SplitFeed)])
    def test_a_model_that_knows_nothing_is_right_by_chance_and_one_that_knows_all_always(
        self, encoder_layers, feed, monkeypatch
    ):
        """The one that knows all reads its logits off the targets: from examples to tables no character is lost or moved.

        Answers are as long as questions here, so that rows of both are equally wide.
        """
        training = Training(short(encoder_layers=encoder_layers))
        task = AdditionTask.of((1, 2), (1,), (3,), tuple(range(1, 10)))
        splits = list(task.splits)
        by_chance = task.evaluate(training.model, splits, 2000, worked=2)
        assert (by_chance.accuracy["accuracy"] < 0.5).all()
        assert len(by_chance.worked) == 6
        monkeypatch.setattr(
            feed, "logits", lambda self, model, batch: torch.nn.functional.one_hot(batch["targets"].flatten(), 17).float()
        )
        known = task.evaluate(training.model, splits, 2000, worked=2)
        assert list(known.accuracy["split"]) == splits
        assert (known.accuracy[["accuracy", "exact"]] == 1.0).all(axis=None)
        assert (known.accuracy["examples"] == 2000).all()
        first = known.positions[known.positions["position"] == 1]
        assert (first["tokens"] == 2000).all()
        assert all(one.answer == one.given for one in known.worked)

    @pytest.mark.parametrize("encoder_layers", [0, 1])
    def test_it_does_not_depend_on_how_rows_are_grouped(self, encoder_layers, monkeypatch):
        training = Training(short(encoder_layers=encoder_layers))
        task = training.task
        whole = task.evaluate(training.model, ["in-distribution"], 300, worked=0)
        monkeypatch.setattr("normscope.training.tasks.addition.evaluation.TESTED_AT_A_TIME", {"cpu": 7})
        pd.testing.assert_frame_equal(
            whole.accuracy, task.evaluate(training.model, ["in-distribution"], 300, worked=0).accuracy
        )

    def test_the_builtin_models_add(self):
        from normscope.transformer import BUILTIN, load_model

        for name in BUILTIN:
            saved = load_model(f"builtin:{name}")
            result = task_of(saved.about["recipe"]).evaluate(saved.model, ["in-distribution"], 500, worked=3)
            (row,) = result.accuracy.to_dict("records")
            (noted,) = [one for one in saved.about["accuracy"] if one["split"] == "in-distribution"]
            assert row["accuracy"] > 0.95
            assert abs(row["accuracy"] - noted["accuracy"]) < 5 * row["stderr"]
            assert all(len(one.given) == len(one.answer) for one in result.worked)

    def test_a_recipe_without_a_task_is_refused(self):
        with pytest.raises(InputError, match="no task"):
            task_of({"digits": [1]})
        recipe = recipe_from({"integers": (2,), "offsets": 7})
        assert task_of(recipe.values) == recipe.data
        assert recipe.data.offsets == 7


@pytest.mark.slow
def test_a_compiler_sees_the_whole_step():
    """A GPU runs the step as one captured graph, so nothing in it may need Python; schemes that use every kind of slot."""
    code = """
import torch
from normscope.training import Training, read_recipe
from normscope.training.batches import one_batch
from normscope.training.tasks.addition.feeds import PaddedFeed, draw_batches
from normscope.training.steps import _Step
for name in ("mix", "qkv", "ngpt-lerp", "ln-scaling", "deepnorm"):
    recipe = read_recipe("tiny", {"scheme": name, "layers": 2, "dim": 16, "frequencies": 4})
    training = Training(recipe)
    step = _Step(training.model, PaddedFeed(), training.optimiser, recipe, torch.float32)
    batch = one_batch(draw_batches(recipe.data.train, PaddedFeed(), 1, 16, 50, 3, torch.device("cpu")), 0)
    torch.compiler.reset()
    compiled, _ = torch.compile(step.measures, fullgraph=True, dynamic=False, backend="aot_eager")(batch)
    plain, _ = step.measures(batch)
    assert torch.allclose(compiled, plain, atol=1e-6), name
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
