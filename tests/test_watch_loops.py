"""Real training loops, watched: the same weights to the bit, complete tables, and nothing left on the model."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import normscope as ns
from helpers.loops import EXAMPLES, KINDS, hooks, probe
from normscope.errors import InputError
from normscope.watch.in_loop import first_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
TABLES = {"steps", "layers", "sublayers", "heads", "norms"}
MODELS = {"gpt2": 4, "llama": 4}


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == also and torch.equal(x, y) for (name, x), (also, y) in pairs)


def check_tables(tables: dict[str, pd.DataFrame], steps: list[int], layers: int = 4, heads: int = 4) -> None:
    """All quantities of all layers and heads at all steps, and finite."""
    assert set(tables) >= TABLES
    assert tables["steps"]["step"].tolist() == steps
    assert np.isfinite(tables["steps"][["loss", "gradient", "seconds"]]).all(axis=None)
    table = tables["layers"]
    assert sorted(zip(table["step"], table["layer"], strict=True)) == [(s, n) for s in steps for n in range(layers + 1)]
    states, blocks = ["norm", "cosine", "rank", "massive"], ["update", "rotation", "speed", "theory", "gradient"]
    assert np.isfinite(table[states]).all(axis=None)
    assert np.isfinite(table.loc[table["layer"] < layers, blocks]).all(axis=None)
    table = tables["heads"]
    assert len(table) == len(steps) * layers * heads
    assert np.isfinite(table[["logit", "entropy", "sink", "sparse"]]).all(axis=None)
    assert set(tables["sublayers"]["sublayer"]) == {"attention", "feedforward"}
    assert len(tables["sublayers"]) == 2 * layers * len(steps)
    assert len(tables["norms"]) == (2 * layers + 1) * len(steps)
    assert (tables["norms"]["gain_min"] <= tables["norms"]["gain_max"]).all()


def test_a_plain_loop_compiled_or_not(tmp_path):
    from watch_plain import train

    folders = tmp_path / "compiled", tmp_path / "eager"
    plain, compiled = (train(to, 4, every=2, backend="eager") for to in (None, str(folders[0])))
    with torch.compiler.set_stance("force_eager"):
        eager = train(str(folders[1]), 4, every=2)
    for model, folder in zip((compiled, eager), folders, strict=True):
        assert same(plain, model)
        assert not any(hooks(model))
        check_tables(ns.load(folder).tables, [1, 2, 4])


def test_a_loop_under_autocast_whose_watch_steps_inside_it():
    def trained(watched):
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cpu", torch.bfloat16):
            watch = ns.watch(model, probe=probe(1), every=1) if watched else None
            for _ in range(3):
                model(probe(0), probe(0))[1].backward()
                optimizer.step()
                if watch is not None:
                    watch.step()
                optimizer.zero_grad()
        return model

    assert same(trained(True), trained(False))


@pytest.mark.parametrize("name", MODELS)
def test_the_trainer_of_hugging_face(name, tmp_path):
    from watch_hugging_face import train

    options = {"output_dir": str(tmp_path / "out"), "max_grad_norm": 0, "gradient_accumulation_steps": 2}
    plain, watched = (train(to, 4, name, every=2, **options) for to in (None, str(tmp_path / "run")))
    assert same(plain.model, watched.model)
    assert hooks(plain.model) == hooks(watched.model)
    assert vars(plain.model).keys() == vars(watched.model).keys()
    assert plain.model.config.to_dict() == watched.model.config.to_dict()
    tables = ns.load(tmp_path / "run").tables
    check_tables(tables, [1, 2, 4])
    logged = {row["step"]: row for row in watched.state.log_history if "loss" in row}
    for step, loss, gradient in tables["steps"][["step", "loss", "gradient"]].itertuples(index=False):
        assert loss == pytest.approx(logged[step]["loss"])
        assert gradient == pytest.approx(logged[step]["grad_norm"], rel=1e-3)


def trainer_of(tmp_path, callbacks, **options):
    from transformers import Trainer, TrainingArguments
    from watch_hugging_face import build

    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (64, 16)).unbind()]
    settings = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_steps": 2}
    arguments = TrainingArguments(str(tmp_path / "out"), **{**settings, **options})
    return Trainer(build("gpt2"), arguments, train_dataset=rows, callbacks=callbacks)


def test_a_resumed_training_continues_its_folder_and_a_second_one_gets_another(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(tmp_path, [ns.watch.TrainerCallback(every=2)], **saves).train()
    trainer_of(tmp_path, [ns.watch.TrainerCallback(every=2)], max_steps=4, **saves).train(resume_from_checkpoint=True)
    assert ns.load(tmp_path / "out/watch").tables["steps"]["step"].tolist() == [1, 2, 4]
    trainer_of(tmp_path, [ns.watch.TrainerCallback(every=1, rows=2)], logging_steps=1).train()
    assert ns.load(tmp_path / "out/watch-2").tables["steps"]["step"].tolist() == [1, 2]


def test_a_trainer_has_one_callback_of_normscope(tmp_path):
    callback = ns.watch.TrainerCallback()
    for two in ([callback, callback], [callback, ns.watch.TrainerCallback()]):
        with pytest.raises(InputError, match="two callbacks of normscope: give it one"):
            trainer_of(tmp_path, two)
    trainer = trainer_of(tmp_path, [callback])
    trainer.add_callback(ns.watch.TrainerCallback())
    with pytest.raises(InputError, match="two callbacks"):
        trainer.train()


class Collator:
    """Draws from generators, one of its own among them."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, rows):
        np.random.rand(), torch.rand(1)
        return torch.stack(rows) + torch.randint(1, (len(rows), 4), generator=self.generator)

    @property
    def states(self):
        tensors = torch.get_rng_state(), self.generator.get_state()
        return np.random.get_state()[1].tolist(), [x.tolist() for x in tensors]


def test_the_default_probe_draws_no_random_numbers():
    collator, rows, model = Collator(), torch.arange(40).view(10, 4), nn.Linear(2, 2)
    loader = torch.utils.data.DataLoader(list(rows), collate_fn=collator, batch_size=3, shuffle=True)
    before = collator.states
    assert torch.equal(first_rows(loader, 3, model), rows[:3])
    assert collator.states == before
    with pytest.raises(InputError, match="pass a batch of it, probe=batch"):
        first_rows(torch.utils.data.DataLoader(Stream()), 3, model)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        raise AssertionError("nobody reads the data of the training")


def test_lightning(tmp_path):
    from watch_lightning import train

    options = {"default_root_dir": str(tmp_path), "accumulate_grad_batches": 2}
    models = [train(to, 4, every=2, **options) for to in (None, str(tmp_path / "run"))]
    assert same(*models)
    assert not any(hooks(models[1]))
    check_tables(ns.load(tmp_path / "run").tables, [1, 2, 4])


def test_lightning_finds_the_model_or_says_what_there_is(tmp_path):
    import lightning
    from watch_lightning import Classifier, DataLoader, pictures

    def fit(*callbacks, kind=Classifier):
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(max_steps=1, accelerator="cpu", logger=False, callbacks=list(callbacks), **quiet)
        trainer.fit(kind(), DataLoader(pictures(16), batch_size=4))

    class WithHead(Classifier):
        """More than one part has parameters, and there is no forward pass."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)

    seen = []
    fit(ns.watch.LightningCallback(every=1, to=seen.append, module="vit"), kind=WithHead)
    check_tables(seen[0].tables, [1])
    callback = ns.watch.LightningCallback()
    for two in ([callback, callback], [callback, ns.watch.LightningCallback()]):
        with pytest.raises(InputError, match="two callbacks of normscope"):
            fit(*two)
    with pytest.raises(InputError, match="module='net': WithHead has no such module; it has vit, head"):
        fit(ns.watch.LightningCallback(module="net"), kind=WithHead)
    with pytest.raises(InputError, match="name the model, module='vit'"):
        fit(ns.watch.LightningCallback(to=seen.append), kind=WithHead)


def python(*arguments):
    """What a script prints, in a process of its own."""
    path = os.pathsep.join(str(folder) for folder in (Path(ns.__file__).parents[1], Path(__file__).parent))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What two processes saw, by rank and kind, and their folder."""
    folder = tmp_path_factory.mktemp("processes")
    python("-m", "helpers.loops", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)], folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_without_a_watch(kind, processes):
    ranks, folder = processes
    for rank in ranks:
        plain, watched = rank[kind]["weights"]
        assert plain.keys() == watched.keys()
        assert all(torch.equal(plain[name], watched[name]) for name in plain)
        assert rank[kind]["hooks"][0] == rank[kind]["hooks"][1]
        assert rank[kind]["sharded"] == [kind == "fsdp"] * 2
        assert not rank[kind]["drawn"]
        assert rank[kind]["opened"] == [("pre", True)] * 2
        assert all(torch.equal(x, watched[name]) for name, x in rank[kind]["resharded"].items())
    check_tables(ns.load(folder / kind).tables, [1, 2, 4])


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_two_processes_are_those_of_the_whole_model(kind, processes):
    from gpt import GPT, Config

    ranks, _ = processes
    assert not ranks[1][kind]["tables"]
    tables = ranks[0][kind]["tables"]
    model = GPT(Config()).eval()
    model.load_state_dict(ranks[0][kind]["weights"][1])
    (sum(model(probe(rank), probe(rank))[1] for rank in range(2)) / 2).backward()
    whole = get_total_norm([p.grad for p in model.parameters()])
    assert tables["steps"]["gradient"].item() == pytest.approx(float(whole), rel=1e-4)
    assert tables["steps"]["loss"].item() == 0.5
    blocks = [float(get_total_norm([p.grad for p in block.parameters()])) for block in model.h]
    assert tables["layers"].sort_values("layer")["gradient"].tolist()[:4] == pytest.approx(blocks, rel=1e-4)
    alone = [ns.watch(model, probe=probe(rank)).probe().tables for rank in range(2)]
    for name, columns in {"layers": ["norm", "update", "rotation", "cosine", "speed", "theory"], "heads": ["entropy"]}.items():
        expected = (alone[0][name][columns] + alone[1][name][columns]) / 2
        np.testing.assert_allclose(tables[name][columns], expected, rtol=1e-4, atol=1e-6)
    largest = np.maximum(alone[0]["heads"]["logit"], alone[1]["heads"]["logit"])
    np.testing.assert_allclose(tables["heads"]["logit"], largest, rtol=1e-4)
    np.testing.assert_allclose(tables["norms"]["gain"], alone[0]["norms"]["gain"], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_on_one_process_stops_none(kind, processes):
    (first, second), _ = processes
    assert len(first[kind]["warnings"]) == len(second[kind]["warnings"]) == 1
    assert "the probe failed on another process" in first[kind]["warnings"][0]
    assert "no numbers today" in second[kind]["warnings"][0]
    assert first[kind]["steps"]["step"].tolist() == [2, 4]
    for rank in (first, second):
        folder, flat = rank[kind]["refused"]
        assert "cannot write to '/dev/null'" in folder
        assert "use fully_shard (FSDP2)" in flat


def test_the_example_of_two_processes_is_a_script(tmp_path):
    printed = python(EXAMPLES / "watch_processes.py", "--fsdp", "--steps", "1", "--to", tmp_path / "run")
    assert printed.rstrip().endswith("run/report.html")


def tiny(fails_at=None):
    from gpt import GPT, Config

    class Fails(GPT):
        passes = 0

        def forward(self, tokens, targets=None):
            if targets is None and not self.training:  # a probe, not a step
                self.__class__.passes += 1
                if self.passes == fails_at:
                    raise ArithmeticError("this model is tired")
            return super().forward(tokens, targets)

    torch.manual_seed(0)
    return (GPT if fails_at is None else Fails)(Config(layers=2, dim=32, heads=2))


def test_a_failing_probe_warns_once_and_the_training_goes_on():
    model = tiny(fails_at=10**9)
    watch = ns.watch(model, probe=probe(0), every=1)
    type(model).passes = 10**9 - 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            watch.step(loss=1.0)
            type(model).passes = min(type(model).passes, 10**9 - 1)
    texts = [str(each.message) for each in caught if "normscope" in str(each.message)]
    assert len(texts) == 1
    assert "this model is tired" in texts[0]
    assert "watch.close() turns the watch off" in texts[0]
    assert model.training
    assert not any(hooks(model))
    assert watch.tables["steps"]["step"].tolist() == [1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": nn.Linear(3, 3), "probe": torch.ones(2, 3)}, "no blocks with a residual stream"),
        ({"probe": torch.ones(2, 3, dtype=torch.long, device="meta")}, "probe= is on meta and the model on cpu"),
        ({"to": "/dev/null/watch"}, "/dev/null"),
        ({"every": 0}, "every=0"),
    ],
)
def test_wrong_use_is_one_line(arguments, text):
    with pytest.raises(InputError, match=text) as raised:
        ns.watch(**{"model": tiny(), "probe": probe(0), **arguments})
    assert "\n" not in str(raised.value)
