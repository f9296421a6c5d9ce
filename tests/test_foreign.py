"""Models that others made: their code is not run, their pickles are not read, and the reason is one line."""

import json
import os
import pickle
import shlex
import shutil
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.text import Text
from safetensors.torch import load_file, save_file

from helpers.cli import run
from helpers.models import COMMON, GPT2, GROUPED, LAYERS, built, near, some_tokens
from normscope.cli import main
from normscope.cli.output import console, echo, print_json, print_table, say
from normscope.dynamics.starts import read_start
from normscope.errors import InputError, MissingExtraError
from normscope.experiments.progress import progress_bar
from normscope.models import open_model
from normscope.models.foreign import library_errors
from normscope.models.module_model import ModuleModel
from normscope.report.files import save_figure
from normscope.report.markdown import render_markdown
from normscope.results.figures import HeatMap

CODE = """from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class Config(LlamaConfig):
    model_type = "mine"
class Model(LlamaForCausalLM):
    config_class = Config
def generate(*args, **more):
    pass
"""
MAP = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Llama with code beside it that leaves the file ``ran``; whoever asks whether to run it fails."""
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked whether to run code"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    made = tmp_path / "model"
    built("LlamaConfig", GROUPED).save_pretrained(made)
    (made / "code.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    (made / "custom_generate").mkdir()
    shutil.copy(made / "code.py", made / "custom_generate" / "generate.py")
    return made


def configure(folder: Path, **values: Any) -> None:
    """Change a model's configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def test_code_of_a_model_is_not_run_and_nobody_is_asked(folder: Path) -> None:
    configure(folder, auto_map=MAP)
    assert open_model(folder).layers == LAYERS  # the library has code of its own for a Llama
    configure(folder, model_type="mine")
    with pytest.raises(InputError, match=r"^cannot open .* needs code of its own, which is not run; .* trust_remote_code=True"):
        open_model(folder)
    assert not (folder.parent / "ran").exists()


def test_code_of_a_tokenizer_is_not_run(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    for name, auto in (("tokenizer_config", "AutoTokenizer"), ("processor_config", "AutoProcessor")):
        (folder / f"{name}.json").write_text(json.dumps({"auto_map": {auto: ["code.Model", None]}}))
    with pytest.raises(InputError, match=r"^cannot read the tokenizer of .* needs code of its own"):
        open_model(folder)
    assert open_model(folder, tokenizer=False).layers == LAYERS
    assert not (folder.parent / "ran").exists()


def test_code_is_run_for_those_who_trust_it_and_a_warning_is_shown(folder: Path) -> None:
    configure(folder, auto_map=MAP, model_type="mine")
    with pytest.warns(UserWarning, match="can do everything that you can"):
        model = open_model(folder, trust_remote_code=True)
    assert (folder.parent / "ran").exists()
    assert near(model(some_tokens()), ModuleModel("llama", built("LlamaConfig", GROUPED))(some_tokens()))


def test_the_command_names_its_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(folder, auto_map=MAP, model_type="mine")
    for command in ("audit", "stability", "subspaces", "words", "compare builtin:addition-small-pre"):
        more = ["embeddings"] if command == "words" else []
        status, out, err = run(capsys, *command.split(), str(folder), *more, "--out", str(folder.parent / "run"))
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert "--trust-remote-code runs it" in err
    assert not (folder.parent / "ran").exists()


def sharded(folder: Path, change: dict[str, str]) -> Path:
    """A model in two files, with other names in its index."""
    built("GPT2Config", GPT2).save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(list(content["weight_map"])[:1], change["to"]) if change else {}
    index.write_text(json.dumps(content))
    return folder


def test_a_model_in_several_files_is_opened(tmp_path: Path) -> None:
    model = open_model(sharded(tmp_path, {}))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert near(model(some_tokens()), ModuleModel("gpt2", built("GPT2Config", GPT2))(some_tokens()))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..\\x.safetensors"]
)
def test_an_index_that_names_other_files_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no safetensors file beside it"):
        open_model(sharded(tmp_path, {"to": name}))


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {})
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match="not an index of weights"):
        open_model(folder)


def test_a_kernel_that_a_configuration_names_is_not_loaded(tmp_path: Path) -> None:
    built("LlamaConfig", GROUPED).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("attn_implementation", "_attn_implementation"):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: "evil/kernel"}))
        assert open_model(tmp_path).layers == LAYERS


def test_weights_are_the_files_and_not_what_lies_beside_them(tmp_path: Path) -> None:
    """A pickle beside safetensors is never read."""
    built("LlamaConfig", GROUPED).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert open_model(tmp_path).layers == LAYERS
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    save_file(load_file(tmp_path / "other.safetensors"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert open_model(tmp_path).layers == LAYERS


@pytest.mark.parametrize("named", ["adapter_model.bin", "other.safetensors.index.json", "../model.safetensors"])
def test_a_configuration_names_no_other_files(folder: Path, named: str) -> None:
    torch.save({"x": Evil(folder.parent / "ran")}, folder / "adapter_model.bin")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "adapter_model.bin"}}
    (folder / "other.safetensors.index.json").write_text(json.dumps(index))
    configure(folder, transformers_weights=named)
    with pytest.raises(InputError, match="no safetensors file beside it"):
        open_model(folder)
    assert not (folder.parent / "ran").exists()


def test_pickled_weights_are_refused_with_a_way_to_convert_them(folder: Path) -> None:
    weights = folder / "model.safetensors"
    pickled, expected = load_file(weights), open_model(folder)(some_tokens())
    torch.save(pickled, folder / "pytorch_model.bin")
    weights.write_bytes(pickle.dumps(Evil(folder.parent / "ran")))
    with pytest.raises(InputError, match="cannot open"):  # a pickle under the name of a safetensors file
        open_model(folder)
    weights.unlink()
    with pytest.raises(InputError, match="refused on purpose") as refused:
        open_model(folder)
    command = str(refused.value).partition("python -c ")[2]
    exec(*shlex.split(command))
    assert near(open_model(folder)(some_tokens()), expected)
    with pytest.raises(InputError, match="refused on purpose") as same:
        open_model(folder / "pytorch_model.bin")
    assert str(same.value).endswith(command)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"put its config\.json beside it") as alone:
        open_model(folder / "pytorch_model.bin")
    weights.unlink()
    exec(*shlex.split(str(alone.value).partition("python -c ")[2]))
    assert load_file(weights).keys() == pickled.keys()
    assert not (folder.parent / "ran").exists()


def test_links_out_of_the_folder_are_refused_but_for_those_of_the_cache(folder: Path) -> None:
    weights, blobs = folder / "model.safetensors", folder.parent / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    for target, allowed in ((blobs / "0f", True), (folder.parent / "secret", False)):
        shutil.move(weights.resolve(), target)
        weights.unlink(missing_ok=True)
        weights.symlink_to(target)
        if allowed:
            assert open_model(folder).layers == LAYERS
        else:
            with pytest.raises(InputError, match="is a link out of the folder"):
                open_model(folder)


def test_weights_that_are_named_are_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no weights"):
        open_model(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(InputError, match=r"'a\.safetensors' is missing"):
        open_model(folder)


def test_an_adapter_is_not_left_out_in_silence(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="has an adapter"):
        open_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "package"),
    [
        ("tokenizer.model", b"\n\x0b\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "sentencepiece"),
        ("spiece.model", b"\n\x0b\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02", "sentencepiece"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken"),
    ],
)
def test_a_tokenizer_names_the_package_that_is_missing(
    folder: Path, name: str, content: bytes, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normscope.models.foreign.find_spec", lambda module: None if module == package else True)
    (folder / name).write_bytes(content)
    with pytest.raises(MissingExtraError, match=rf"needs {package}: pip install {package}$"):
        open_model(folder)


def test_a_tokenizer_that_cannot_be_read_is_not_missing(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"^cannot read the tokenizer of .*: KeyError 'added_tokens'$"):
        open_model(folder)


def test_a_hub_that_cannot_be_reached_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(InputError, match=r"no file or folder 'nobody/nothing' here, and the .* hub cannot be reached: "):
            open_model("nobody/nothing")
        assert time.monotonic() - started < 5
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        open_model("nobody/nothing")
    with pytest.raises(InputError, match="no model on the Hugging Face hub has such a name"):
        open_model("no such thing")


def test_a_bug_of_ours_is_not_an_error_of_a_library() -> None:
    with pytest.raises(InputError, match="cannot parse: Expecting value"), library_errors("cannot parse: "):
        json.loads("")

    namespace: dict[str, Any] = {"__name__": "normscope.models.probe"}
    exec("def broken(): raise KeyError('a bug')", namespace)
    with pytest.raises(KeyError, match="a bug"), library_errors("cannot parse: "):
        namespace["broken"]()


EVIL = "\x1b]0;gone\x07\u202e\x9b2J\r"


def test_nothing_that_a_terminal_obeys_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", EVIL], [[EVIL, "b"]], EVIL)
    console().print(Text(EVIL))
    echo(EVIL)
    say(EVIL)
    print_json([{EVIL: EVIL + "\x7f"}])
    with progress_bar() as bar:
        bar.message(EVIL)
        bar(EVIL, 1, 2, EVIL)
    out, err = capsys.readouterr()
    assert "\\x1b]0;gone\\x07\\u202e\\x9b2J\\r" in out
    assert all(line.isprintable() for line in (out + err).split("\n"))
    assert json.loads(out[out.index("[\n") :]) == [{EVIL: EVIL + "\x7f"}]
    with pytest.raises(InputError) as refused:
        open_model(f"./{EVIL}")
    assert str(refused.value).isprintable()
    assert EVIL not in render_markdown("x", EVIL, [])


def test_no_text_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    names = ("=1+1", "+1", "-1", "@x", "\tx", "\rx", "plain")
    figure = HeatMap("t", "=token", "layer", "value", names, ("y",), ((-0.5,) * len(names),), "c")
    table = pd.read_csv(save_figure(figure, tmp_path / "a.csv"))
    assert table.columns.tolist() == ["layer", "'=token", "value"]
    assert table["'=token"].tolist() == [*(f"'{name}" for name in names[:-1]), "plain"]
    assert table["value"].tolist() == [-0.5] * len(names)  # a number stays a number


@pytest.mark.parametrize("content", [pickle.dumps({}), b"PK\x05\x06" + bytes(18), b"\x93NUMPY\x01\x00\x02\x00((", b""])
def test_a_start_is_never_unpickled(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "start.npy").write_bytes(content)
    with pytest.raises(InputError, match="cannot read the start file"):
        read_start(tmp_path / "start.npy")
    np.save(tmp_path / "start.npy", np.array([Evil(tmp_path / "ran")], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="cannot read the start file"):
        read_start(tmp_path / "start.npy")
    assert not (tmp_path / "ran").exists()


def test_a_bug_of_ours_is_a_traceback_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.schemes.find_scheme", lambda name: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        main(["schemes", "pre"])


@pytest.mark.parametrize("pickled", [False, True])
def test_a_head_that_the_weights_lack_is_not_made_up(tmp_path: Path, pickled: bool) -> None:
    """The configuration names a masked language model, and the file has its encoder alone."""
    whole = built("BertConfig", COMMON, "AutoModelForMaskedLM")
    whole.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    encoder = {name: tensor.clone() for name, tensor in whole.state_dict().items() if name.startswith("bert.")}
    if pickled:
        torch.save(encoder, tmp_path / "pytorch_model.bin")
        with pytest.raises(InputError, match="refused on purpose") as refused:
            open_model(tmp_path)
        exec(*shlex.split(str(refused.value).partition("python -c ")[2]))
    else:
        save_file(encoder, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="opened without its head") if not pickled else nullcontext():
        view = open_model(tmp_path)
    assert not view.predicts
    with torch.no_grad():
        expected = whole.bert(some_tokens()).last_hidden_state
    assert near(view(some_tokens()), expected)
