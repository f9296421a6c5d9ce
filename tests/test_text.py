"""Text as a task: corpora, tokenizers, what is prepared, batches, tests, and whole runs."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from normscope.core import CausalMask
from normscope.errors import InputError
from normscope.training import Checkpoints, Training, recipe_from
from normscope.training.tasks.text.corpus import Corpus
from normscope.training.tasks.text.task import TextFeed
from normscope.training.tasks.text.tokenizing import END
from normscope.transformer import Row

CPU = torch.device("cpu")
WORDS = [
    "the",
    "a",
    "norm",
    "of",
    "every",
    "layer",
    "is",
    "not",
    "stream",
    "attention",
    "head",
    "token",
    "learns",
    "and",
    "writes",
    "reads",
    "small",
    "large",
    "in",
    "on",
]
SMALL = {
    "task": "text", "vocabulary": 300, "context": 16, "held_out": 0.2, "layers": 2, "dim": 16, "heads": 2, "head": 8,
    "feedforward": 16, "batch": 4, "examples": 80, "epoch": 5, "rate": 0.01, "schedule": "cosine", "test_examples": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sentences(seed, characters=1000):
    draw = random.Random(seed)
    text = ""
    while len(text) < characters:
        text += " ".join(draw.choices(WORDS, k=draw.randint(4, 9))).capitalize() + ".\n"
    return text


@pytest.fixture
def folder(tmp_path):
    """20 kB in 24 documents."""
    place = tmp_path / "texts"
    (place / "inner").mkdir(parents=True)
    for i in range(24):
        (place / ("inner" if i % 2 else ".") / f"{i:02}.txt").write_text(sentences(i))
    return place


def recipe(corpus, **changes):
    return recipe_from({**SMALL, "corpus": str(corpus), **changes})


def weights(training):
    return {name: value.clone() for name, value in training.model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def decoded(task, part):
    data = task.data
    ids = np.fromfile(data.folder / f"{part}.bin", data.about["dtype"])
    return Tokenizer.from_str(data.tokenizer).decode(ids.tolist(), skip_special_tokens=False)


class TestCorpus:
    def test_a_folder_gives_the_same_tokens_as_parquet_arrow_and_a_saved_dataset(self, folder, tmp_path):
        texts = [path.read_text() for path in sorted(folder.rglob("*.txt"))]
        table = pa.table({"page": range(len(texts)), "text": texts})
        (tmp_path / "tables").mkdir()
        pq.write_table(table, tmp_path / "tables" / "part.parquet", row_group_size=7)
        saved = tmp_path / "saved"
        (saved / "train").mkdir(parents=True)
        (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
        (saved / "train" / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
        with pa.ipc.new_stream(str(saved / "train" / "data-00000-of-00001.arrow"), table.schema) as file:
            file.write_table(table, 5)
        (saved / "train" / "cache-1.arrow").write_bytes(b"left over")
        with pa.ipc.new_file(str(tmp_path / "one.arrow"), table.schema) as file:
            file.write_table(table)
        digests = {
            Corpus.at(str(place), "text").survey.digest
            for place in (folder, tmp_path / "tables", saved, tmp_path / "one.arrow")
        }
        assert len(digests) == 1
        assert list(Corpus.at(str(folder), "text").documents()) == texts

    def test_every_document_is_on_one_side_and_copies_on_the_same(self, folder):
        (folder / "copy.txt").write_text((folder / "02.txt").read_text())
        parts = list(Corpus.at(str(folder), "text").parts(0.3))
        assert all(bool(train) != bool(held_out) for train, held_out in parts)
        assert not {train for train, _ in parts} & {held_out for _, held_out in parts} - {""}
        share = sum(len(held_out) for _, held_out in parts) / sum(len(a) + len(b) for a, b in parts)
        assert 0.2 < share < 0.4

    def test_of_few_documents_the_end_of_each_is_held_out(self, tmp_path):
        text = sentences(1, 5000)
        (tmp_path / "one.txt").write_text(text)
        ((train, held_out),) = Corpus.at(str(tmp_path / "one.txt"), "text").parts(0.1)
        assert train + held_out == text
        assert len(held_out) == pytest.approx(500, abs=50)
        assert train[-1].isspace()


class TestPrepared:
    def test_all_text_is_there_once_with_an_end_after_every_document(self, folder):
        task = recipe(folder).data.prepare()
        kept = {part: decoded(task, part).split(END) for part in ("training", "held-out")}
        assert kept["training"].pop() == kept["held-out"].pop() == ""
        texts = sorted(path.read_text() for path in folder.rglob("*.txt"))
        assert sorted(kept["training"] + kept["held-out"]) == texts
        counts = {part: task.data.about[part] for part in kept}
        assert {part: count["documents"] for part, count in counts.items()} == {part: len(kept[part]) for part in kept}
        assert counts["held-out"]["bytes"] == sum(len(text.encode()) for text in kept["held-out"])
        assert task.vocabulary <= 300

    def test_a_long_document_is_encoded_in_pieces_and_ends_once(self, tmp_path, monkeypatch):
        monkeypatch.setattr("normscope.training.tasks.text.prepared._LONGEST", 300)
        (tmp_path / "one.txt").write_text(sentences(1, 9000))
        task = recipe(tmp_path / "one.txt").data.prepare()
        assert decoded(task, "training").count(END) == 1
        assert (decoded(task, "training") + decoded(task, "held-out")).replace(END, "") == sentences(1, 9000)

    def test_it_is_prepared_once_and_again_for_another_text_or_tokenizer(self, folder, monkeypatch):
        first = recipe(folder).data.prepare()
        folders = {first.identity, recipe(folder, vocabulary=290).data.prepare().identity}
        monkeypatch.setattr("normscope.training.tasks.text.prepared.trained", None)
        assert recipe(folder, context=8).data.prepare().identity == first.identity
        monkeypatch.undo()
        (folder / "00.txt").write_text("another text " * 90)
        assert len({*folders, recipe(folder).data.prepare().identity}) == 3

    def test_the_tokenizer_of_another_run_is_used_as_it_is(self, folder, tmp_path):
        first = recipe(folder).data.prepare()
        (tmp_path / "model").mkdir()
        for name, text in first.files.items():
            (tmp_path / "model" / name).write_text(text)
        other = recipe(folder, tokenizer=str(tmp_path / "model"), vocabulary=None)
        assert other.model.vocabulary == first.vocabulary
        assert decoded(other.data.prepare(), "training") == decoded(first, "training")


class TestBatches:
    def test_an_epoch_has_every_window_once_in_an_order_of_its_own(self, folder):
        task = recipe(folder).data.prepare()
        tokens = torch.from_numpy(np.fromfile(task.data.folder / "training.bin", "uint16").astype(np.int64))
        windows = len(tokens) // 16 - 1
        orders = []
        for epoch in range(2):
            examples = torch.arange(epoch * windows, (epoch + 1) * windows)
            starts = task._starts(examples, seed=5)
            shift = int(starts.min())
            assert starts.sort().values.tolist() == list(range(shift, shift + 16 * windows, 16))
            orders.append(starts.tolist())
        assert orders[0] != orders[1]
        batch = task.batches(TextFeed(), 0, 2, 4, 5, CPU)
        start = orders[0][5]
        assert torch.equal(batch["characters"][1, 1], tokens[start : start + 16])
        assert torch.equal(batch["targets"][1, 1], tokens[start + 1 : start + 17])

    def test_steps_and_shares_of_processes_are_parts_of_the_same_batches(self, folder):
        task = recipe(folder).data.prepare()

        def drawn(start, steps, rows=None):
            return task.batches(TextFeed(), start, steps, 6, 3, CPU, rows)["characters"]

        whole = drawn(0, 60)
        assert torch.equal(whole[13:17], drawn(13, 4))
        assert torch.equal(whole[13:17, 1::2], drawn(13, 4, slice(1, None, 2)))


class TestTests:
    def test_losses_are_those_of_cross_entropy_and_bits_those_of_the_bytes(self, folder):
        training = Training(recipe(folder))
        task, model = training.task, training.model.eval()
        found = task.evaluate(model, ["held-out"], 10**6)
        tokens = torch.from_numpy(np.fromfile(task.data.folder / "held-out.bin", "uint16").astype(np.int64))
        windows = (len(tokens) - 1) // 16
        rows = torch.stack([tokens[16 * i : 16 * i + 17] for i in range(windows)])
        with torch.no_grad():
            logits = model(Row(rows[:, :-1], torch.arange(16).expand(windows, -1), CausalMask()))
        losses = F.cross_entropy(logits.mT, rows[:, 1:], reduction="none")
        (row,) = found.losses.to_dict("records")
        assert row["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
        assert row["stderr"] == pytest.approx(float(losses.mean(1).std() / windows**0.5), rel=1e-4)
        assert row["tokens"] == 16 * windows
        counts = task.data.about["held-out"]
        bits = float(losses.mean()) * counts["tokens"] / np.log(2) / counts["bytes"]
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        by_position = found.positions.sort_values("position")["loss"].to_numpy()
        assert by_position == pytest.approx(losses.mean(0).numpy(), rel=1e-5)

    def test_training_lowers_the_loss_of_text_that_was_held_out(self, folder):
        training = Training(recipe(folder, examples=4 * 150))
        before = training.task.evaluate(training.model.eval(), ["held-out"], 64).losses["loss"][0]
        rows = list(training.run())
        after = training.task.evaluate(training.model.eval(), ["held-out"], 64).losses["loss"][0]
        assert after < 0.75 * before
        assert rows[-1].tokens == 4 * 150 * 16


class TestResume:
    def test_a_stopped_run_ends_with_the_same_weights(self, folder, tmp_path):
        chosen = recipe(folder)
        whole = Training(chosen)
        for _ in whole.run():
            pass
        checkpoints = Checkpoints.of(tmp_path / "run", chosen.record)
        with checkpoints.alone():
            stopped = Training(chosen).run(checkpoints, every=0.0)
            next(stopped)
            again = Training(chosen)
            again.restore(checkpoints.load(CPU)[0])
            assert again.step == 5
            for _ in again.run():
                pass
        assert same(weights(whole), weights(again))
        assert [row.tokens for row in whole.metrics] == [row.tokens for row in again.metrics]

    def test_another_text_is_refused(self, folder, tmp_path):
        checkpoint = Training(recipe(folder)).checkpoint
        (folder / "00.txt").write_text("another text " * 90)
        with pytest.raises(InputError, match="the data have changed since step 0"):
            Training(recipe(folder)).restore(checkpoint)
