"""Values and files that a command must survive: what users mistype, what breaks on a disk, and what attacks."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from helpers.gpt2 import SENTENCE, save_gpt2
from helpers.watched import watched_folder

NUMBERS = (
    "0", "-1", "1", "2", "7", "0.5", "-0.0", "3.0", "1.5", "1e300", "-1e300", "1e-300", "1e400", "nan", "inf", "-inf",
    "", " ", "1e", "0x10", "1_0", " 3", "٣", "³", "true", "3\n", "1,2", "100000000000", "-9223372036854775809",
    "18446744073709551616", "1" + "0" * 400, "9" * 5000, "0." + "3" * 5000,
)  # fmt: skip
TEXTS = (
    "", " ", ",", ",,,", "a,,b", "\0", "a\0b", "\n", "a\nb", "\x1b[31mred\x1b[0m", "\x07\x08", "\u202egnp.exe",
    "x" * 300, "x" * 100_000, "ü∞😀", "\udcff", "~nobody/x", "~", "../..", "..", ".", "/", "=cmd|' /C calc'!A0",
    "[/bold]", "[red]", "@SUM(1)", "-", "--", "%s%n", "{0.__class__}", "$(touch pwned)", "None", "nan", "0", "-1",
    "9" * 5000, "a=b=c", "[1", '"', "'", "\\", "https://localhost:1/x",
)  # fmt: skip
SCHEMES = (
    "pre+", "pre+qk+qkv", "pre+vkq", "+qk", "Pre", "perl", "pre*2", "pre*1e400", "pre,pre", "pre,post", "mix",
    "ngpt+qkv", "deepnorm", "hybrid", "none", ",".join(["pre"] * 300),
)  # fmt: skip
FORMULAS = (
    "1", "0", "-1", "1/(20-layer)", "1/(2-layer)", "1/t", "9**9**9", "9.0**9**9", "2**-99999", "sqrt(-1)", "sqrt(-t)",
    "log(t)", "log(0)", "exp(1e9)", "1e400", "nan", "inf", "t", "depth", "alpha", "x", "__import__('os')", "t.real",
    "(1).__class__", "t if t else 1", "t and 1", "t < 1", "[t]", "lambda: t", "sqrt()", "sqrt(1, 2)", "sqrt", "1j",
    "True", "'a'", "", " ", "1 +", "(" * 90 + "1" + ")" * 90, "-" * 190 + "1", "1+" * 99 + "1", "9" * 199, "9" * 5000,
    "1e-320", "t\0", "t\nt", "1//t", "t%2", "0**-1", "0.5**t", "1e200*layer*1e200",
)  # fmt: skip
VALUES = (
    "0", "-1", "1", "1.5", "1e30", "nan", "inf", "true", "[]", "[-1]", "[0]", "[1e30]", "[[1]]", "[1, 'a']", '""',
    '"x"', '"\\u0000"', "100000000000", "1" + "0" * 400, "9" * 5000, "{}", "{a = 1}", "2020-01-01", '"nan"', "[true]",
    '"../.."', '"~nobody/x"',
)  # of TOML  # fmt: skip

RECIPE = """
integers = [2]
interpolation = []
extrapolation = []
digits = [1]
layers = 2
dim = 8
heads = 2
head = 4
feedforward = 8
readout = [8]
frequencies = 2
examples = 8
batch = 4
epoch = 1
test_examples = 4
"""
PLAN = """
kind = "ensemble"
scheme = "pre"
runs = 2
tokens = 3
time = 0.5
samples = 2
[grid]
dim = [4]
"""
_ATTACK = "import pathlib\npathlib.Path('pwned').write_text('this code ran')\n"
_MUCH = 1 << 36  # bytes of a file that has no blocks on the disk


class _Attack:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_ATTACK,)


def _text(content: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(content, encoding="utf-8")


def _bytes(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


def _link(target: str) -> Callable[[Path], Any]:
    return lambda path: path.symlink_to(target)


def _sparse(beginning: bytes = b"") -> Callable[[Path], Any]:
    def make(path: Path) -> None:
        path.write_bytes(beginning)
        os.truncate(path, _MUCH)

    return make


def _folder(**content: str | bytes) -> Callable[[Path], Any]:
    """A folder with files; of a name ``run_json`` the last _ is the dot."""

    def make(path: Path) -> None:
        path.mkdir()
        for name, value in content.items():
            (path / ".".join(name.rsplit("_", 1))).write_bytes(value if isinstance(value, bytes) else value.encode())

    return make


def _folder_with(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A folder with one entry."""

    def both(path: Path) -> None:
        path.mkdir()
        make(path / name)

    return both


def _gpt2(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The small GPT-2 with a change."""

    def make(path: Path) -> None:
        shutil.copytree(path.parent / "gpt2", path)
        change(path)

    return make


def _config(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return _gpt2(change)


def _weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = {name: change(tensor) if tensor.is_floating_point() else tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})

    return _gpt2(edit)


def _indexed(file: str) -> Callable[[Path], Any]:
    """Weights that an index looks for in another file, which is a pickle."""

    def change(folder: Path) -> None:
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if "/" not in file:
            (folder / file).write_bytes(pickle.dumps(_Attack()))

    return _gpt2(change)


def _own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "attack", "auto_map": {"AutoConfig": "attack.Config", "AutoModelForCausalLM": "attack.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "attack.py").write_text(_ATTACK)


def _builtin(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A model of normscope with a change."""

    def make(path: Path) -> None:
        path.mkdir()
        for file in package_files("normscope.transformer").joinpath("builtin", "addition-small-pre").iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        change(path)

    return make


def _edit_model(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["model"] |= changes
        (folder / "config.json").write_text(json.dumps(config))

    return _builtin(change)


def _run(description: str, **tables: bytes) -> Callable[[Path], Any]:
    return _folder(run_json=description, **{f"{name}_parquet": content for name, content in tables.items()})


def _description(**changes: Any) -> str:
    about = {"command": "simulate", "configuration": {}, "versions": {"normscope": "0"}, "device": "cpu", "seed": 0}
    return json.dumps(about | {"summary": "", "started": "2020-01-01T00:00:00+00:00", "seconds": 1.0} | changes)


def _watched(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The folder of a watched training with a change to its only segment."""

    def make(path: Path) -> None:
        watched_folder(path, [0, 10])
        change(next((path / "segments").iterdir()))

    return make


def _array(make: Callable[[], Any]) -> Callable[[Path], Any]:
    return lambda path: np.save(path, make(), allow_pickle=True)


def _tensors(**tensors: torch.Tensor) -> Callable[[Path], Any]:
    return lambda path: save_file(tensors, path)


def _scheme(formula: str, slot: str = "step") -> str:
    return f"[attention]\ninput = 'norm'\n{slot} = {json.dumps(formula, ensure_ascii=False)}\n"


_DEEP = 100_000
_NESTED = {"list": "[" * _DEEP + "]" * _DEEP, "object": '{"a":' * _DEEP + "1" + "}" * _DEEP}
_NPY = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999, 9)}" + b" " * 50
_SAFETENSORS = (1 << 60).to_bytes(8, "little") + b"{}"

FILES: dict[str, Callable[[Path], Any]] = {
    "gpt2": lambda path: save_gpt2(path),
    # whatever is asked for
    "folder": _folder(),
    "folder-with-file": _folder(keep_txt="kept"),
    "fifo": os.mkfifo,
    "fifo.toml": os.mkfifo,
    "fifo.npy": os.mkfifo,
    "fifo.gguf": os.mkfifo,
    "loop.toml": _link("loop.toml"),
    "dangling.toml": _link("nowhere"),
    "zero": _link("/dev/zero"),
    "zero.toml": _link("/dev/zero"),
    "zero.npy": _link("/dev/zero"),
    "zero.csv": _link("/dev/zero"),
    "zero.safetensors": _link("/dev/zero"),
    "memory.toml": _link("/proc/self/mem"),
    "null.toml": _link("/dev/null"),
    "full.toml": _link("/dev/full"),
    "sparse.toml": _sparse(),
    "sparse.npy": _sparse(),
    "sparse.txt": _sparse(),
    "empty.toml": _text(""),
    "empty.txt": _text(""),
    "binary.toml": _bytes(bytes(range(256)) * 16),
    "latin.txt": _bytes("déjà vu".encode("latin-1")),
    "nul.txt": _bytes(b"the time\0of the world"),
    "bom.txt": _bytes(b"\xef\xbb\xbf" + SENTENCE.encode()),
    "control.txt": _text("\x1b[2J\x07 the time"),
    "text.txt": _text(SENTENCE + "\n"),
    "longline.txt": _text("time " * 200_000),
    "page.html": _text("<script>alert(1)</script>"),
    "deep.toml": _text(f"a = {_NESTED['list']}"),
    "deep-inline.toml": _text("a = " + "{a=" * _DEEP + "1" + "}" * _DEEP),
    "deep-table.toml": _text(f"[{'.'.join('a' * 20_000)}]\nb = 1"),
    "digits.toml": _text("seed = " + "9" * 5000),
    "dates.toml": _text("seed = 1979-05-27T07:32:00Z\nkind = 12:00:00"),
    "twice.toml": _text("a = 1\na = 2"),
    "x" * 250 + ".toml": _text(PLAN),
    "name with spaces.toml": _text(RECIPE),
    "a,b.toml": _text(_scheme("1")),
    "\udcff.toml": _text(_scheme("1")),
    "line\nbreak.toml": _text(_scheme("1")),
    # schemes
    **{f"scheme-{i}.toml": _text(_scheme(formula)) for i, formula in enumerate(FORMULAS)},
    **{f"scheme-carry-{i}.toml": _text(_scheme(formula, "carry")) for i, formula in enumerate(FORMULAS[:12])},
    **{f"scheme-value-{i}.toml": _text(f"until = {value}\n{_scheme('1')}") for i, value in enumerate(VALUES)},
    "scheme-then-self.toml": _text("until = 0.5\nthen = 'scheme-then-self.toml'\n" + _scheme("1")),
    "scheme-then-fifo.toml": _text("until = 0.5\nthen = './fifo.toml'\n" + _scheme("1")),
    "scheme-then-zero.toml": _text("until = 0.5\nthen = './zero.toml'\n" + _scheme("1")),
    "scheme-then-list.toml": _text("until = 0.5\nthen = [1]\n" + _scheme("1")),
    "scheme-slots-text.toml": _text("attention = 'norm'\n"),
    "scheme-name.toml": _text("name = '\\u001b[31m=cmd'\n" + _scheme("1")),
    # recipes and plans
    "recipe.toml": _text(RECIPE),
    "recipe-scheme-fifo.toml": _text(RECIPE + "scheme = './fifo.toml'\n"),
    "recipe-table.toml": _text(RECIPE + "[model]\na = 1\n"),
    "plan.toml": _text(PLAN),
    "plan-kind-list.toml": _text('kind = ["ensemble"]\n[grid]\ndim = [4]\n'),
    "plan-kind-none.toml": _text("[grid]\ndim = [4]\n"),
    "plan-kind-wrong.toml": _text('kind = "ensembel"\n[grid]\ndim = [4]\n'),
    "plan-itself.toml": _text('kind = "sweep"\n[grid]\nplan = ["plan-itself.toml"]\n'),
    "plan-empty-grid.toml": _text('kind = "ensemble"\n[grid]\n'),
    "plan-empty-list.toml": _text('kind = "ensemble"\n[grid]\ndim = []\n'),
    "plan-text-grid.toml": _text('kind = "ensemble"\ngrid = "dim"\n'),
    "plan-points.toml": _text('kind = "ensemble"\npoints = [1, 2]\n'),
    "plan-names.toml": _text(PLAN + '[[points]]\nname = "../../x"\ndim = 4\n'),
    "plan-many.toml": _text(PLAN.replace("[4]", str(list(range(4, 20_000))))),
    "plan-product.toml": _text(PLAN + "".join(f"{n} = {list(range(1, 1000))}\n" for n in ("tokens", "heads", "beta", "scale"))),
    "plan-twice.toml": _text(PLAN.replace("[4]", "[4, 4]")),
    "plan-train.toml": _text(f'kind = "train"\npreset = "tiny"\n[fixed]{RECIPE}[grid]\nseed = [-1]\n'),
    "plan-train-list.toml": _text(f'kind = "train"\nrecipe = ["recipe.toml"]\n[fixed]{RECIPE}[grid]\nseed = [1]\n'),
    "plan-stability.toml": _text('kind = "stability"\nmodel = "builtin:addition-small-pre"\n[grid]\ndraws = [1e30]\n'),
    # models
    "gpt2-[/bold]": lambda path: shutil.copytree(path.parents[1] / "gpt2", path),
    "gpt2-config-list": _gpt2(lambda folder: (folder / "config.json").write_text("[]")),
    "gpt2-config-deep": _gpt2(lambda folder: (folder / "config.json").write_text(_NESTED["object"])),
    "gpt2-config-empty": _gpt2(lambda folder: (folder / "config.json").write_text("")),
    "gpt2-config-binary": _gpt2(lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}")),
    "gpt2-config-digits": _gpt2(lambda folder: (folder / "config.json").write_text('{"n_embd": ' + "9" * 5000 + "}")),
    "gpt2-config-zero": _folder_with("config.json", _link("/dev/zero")),
    "gpt2-config-fifo": _folder_with("config.json", os.mkfifo),
    "gpt2-huge": _config(n_embd=10**9, n_head=2),
    "gpt2-deep": _config(n_layer=10**9),
    "gpt2-negative": _config(n_layer=-1),
    "gpt2-no-layers": _config(n_layer=0),
    "gpt2-heads": _config(n_head=3),
    "gpt2-no-heads": _config(n_head=0),
    "gpt2-text-size": _config(n_embd="sixteen"),
    "gpt2-vocabulary": _config(vocab_size=10**12),
    "gpt2-activation": _config(activation_function="nothing"),
    "gpt2-unknown": _config(model_type="nothing"),
    "gpt2-vision": _config(model_type="vit"),
    "gpt2-no-type": _config(model_type=None),
    "gpt2-own-code": _gpt2(_own_code),
    "gpt2-pickle": _indexed("w.bin"),
    "gpt2-pickle-named": _indexed("w.safetensors"),
    "gpt2-outside": _indexed("../../w.safetensors"),
    "gpt2-no-weights": _gpt2(lambda folder: (folder / "model.safetensors").unlink()),
    "gpt2-truncated": _gpt2(lambda folder: os.truncate(folder / "model.safetensors", 500)),
    "gpt2-half": _gpt2(lambda folder: os.truncate(folder / "model.safetensors", 20_000)),
    "gpt2-header": _gpt2(lambda folder: (folder / "model.safetensors").write_bytes(_SAFETENSORS)),
    "gpt2-nan": _weights(lambda tensor: tensor * float("nan")),
    "gpt2-inf": _weights(lambda tensor: tensor / 0),
    "gpt2-zeros": _weights(lambda tensor: tensor * 0),
    "gpt2-large": _weights(lambda tensor: tensor * 1e30),
    "gpt2-small": _weights(lambda tensor: tensor * 1e-40),
    "gpt2-transposed": _weights(lambda tensor: tensor.mT.contiguous() if tensor.ndim > 1 else tensor),
    "gpt2-tokenizer": _gpt2(lambda folder: (folder / "tokenizer.json").write_text("{")),
    "gpt2-tokenizer-deep": _gpt2(lambda folder: (folder / "tokenizer.json").write_text(_NESTED["list"])),
    "gpt2-no-tokenizer": _gpt2(lambda folder: [file.unlink() for file in folder.glob("*token*")]),
    "model-format": _builtin(lambda folder: (folder / "config.json").write_text('{"format": 99, "model": {}}')),
    "model-list": _builtin(lambda folder: (folder / "config.json").write_text('{"format": [], "model": {"scheme": []}}')),
    "model-truncated": _builtin(lambda folder: os.truncate(folder / "model.safetensors", 1000)),
    "model-no-weights": _builtin(lambda folder: (folder / "model.safetensors").unlink()),
    "model-heads": _edit_model(heads=100_000),
    "model-encoder": _edit_model(encoder_layers=10**9),
    "model-negative": _edit_model(dim=-1),
    "model-text": _edit_model(dim="x"),
    "model-extra": _edit_model(nothing=1),
    "model.gguf": _bytes(b"GGUF"),
    "garbage.gguf": _bytes(b"GGUF" + b"\xff" * 4000),
    "version.gguf": _bytes(b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 16),
    "sparse.gguf": _sparse(b"GGUF" + bytes([3, 0, 0, 0])),
    # runs
    "run-list": _run("[]"),
    "run-null": _run("null"),
    "run-text": _run('"text"'),
    "run-empty": _run(""),
    "run-deep": _run(_NESTED["object"]),
    "run-digits": _run('{"versions": {"normscope": ' + "9" * 5000 + "}}"),
    "run-fifo": _folder_with("run.json", os.mkfifo),
    "run-zero": _folder_with("run.json", _link("/dev/zero")),
    "run-no-command": _run(json.dumps({"versions": {"normscope": "0"}})),
    "run-other": _run(_description(command="nothing")),
    "run-list-command": _run(_description(command=["simulate"])),
    "run-configuration": _run(_description(configuration=[1])),
    "run-no-tables": _run(_description()),
    "run-damaged": _run(_description(), trajectories=b"PAR1 damaged PAR1", milestones=b""),
    "run-damaged-audit": _run(_description(command="audit", configuration={"layers": "x"}), growth=b"PAR1" * 9),
    "run-damaged-train": _run(_description(command="train", configuration={"recipe": []}), log=b"x"),
    "watched": lambda path: watched_folder(path, [0, 10, 20], alarms=(10,)),
    "watched-empty": lambda path: watched_folder(path, []),
    "watched-damaged": _watched(lambda folder: (folder / "layers.parquet").write_bytes(b"PAR1 damaged PAR1")),
    "watched-other": _watched(lambda folder: pd.DataFrame({"step": [1], "x": ["y"]}).to_parquet(folder / "heads.parquet")),
    "watched-texts": _watched(lambda folder: pd.DataFrame({"step": ["one"]}).to_parquet(folder / "steps.parquet")),
    "sweep-list": _folder(sweep_json="[]"),
    "sweep-text": _folder(sweep_json='{"points": "x"}'),
    "sweep-deep": _folder(sweep_json=_NESTED["list"]),
    "sweep-empty": _folder(sweep_json=""),
    "sweep-point": _folder(sweep_json='{"kind": "ensemble", "varied": [], "points": [1]}'),
    "sweep-name": _folder(sweep_json='{"kind": "ensemble", "varied": [], "points": [{"name": "../../x", "values": {}}]}'),
    # starts and weights of a simulation
    "start.npy": _array(lambda: np.eye(3)),
    "start-object.npy": lambda path: np.save(path, np.array([_Attack()], dtype=object), allow_pickle=True),
    "start-nan.npy": _array(lambda: np.eye(3) * np.nan),
    "start-zero.npy": _array(lambda: np.zeros((3, 3))),
    "start-empty.npy": _array(lambda: np.zeros((0, 3))),
    "start-cube.npy": _array(lambda: np.zeros((3, 3, 3))),
    "start-text.npy": _array(lambda: np.array([["a", "b"]])),
    "start-complex.npy": _array(lambda: np.eye(3) * 1j),
    "start-integers.npy": _array(lambda: np.eye(3, dtype=np.int64)),
    "start-large.npy": _array(lambda: np.eye(3) * 1e300),
    "start-header.npy": _bytes(_NPY),
    "start.csv": _text("1,0,0\n0,1,0\n0,0,1\n"),
    "start-ragged.csv": _text("1,0\n1\n"),
    "start-text.csv": _text("a,b\nc,d\n"),
    "start-long.csv": _text("1," * 100_000),
    "start-header.safetensors": _bytes(_SAFETENSORS),
    "start-two.safetensors": _tensors(a=torch.eye(3), b=torch.eye(3)),
    "start-half.safetensors": _tensors(a=torch.eye(3, dtype=torch.float16)),
    "weights.safetensors": _tensors(**{f"W_{letter}": torch.eye(3) for letter in "QKVO"}),
    "weights-missing.safetensors": _tensors(W_Q=torch.eye(3)),
    "weights-shape.safetensors": _tensors(**{f"W_{letter}": torch.ones(2, 5) for letter in "QKVO"}),
    "weights-nan.safetensors": _tensors(**{f"W_{letter}": torch.eye(3) * float("nan") for letter in "QKVO"}),
    "weights-integers.safetensors": _tensors(**{f"W_{letter}": torch.eye(3, dtype=torch.int64) for letter in "QKVO"}),
}  # fmt: skip
PLACES = (
    "absent",
    "absent.toml",
    "absent/x.npy",
    "text.txt/x",
    "folder/absent.gguf",
    "x" * 300,
    "x/" * 3000 + "x",
)  # in the folder
SYSTEM = ("/dev/null", "/dev/zero", "/dev/full", "/proc/x", "/proc/self/mem", "/sys/x", "/proc/1/root/x", "/dev/stdin")
OUTS = (
    "", ".", "..", "../..", "./", "new/er/est", "taken", "taken/x", "holds", "empty", "fifo", "loop", "dangling",
    "/proc/x", "/sys/x", "/dev/null", "/dev/full", "/dev/null/x", "~nobody/x", "a\0b", "x" * 300, "x/" * 3000 + "x",
    "\udcff", "a\nb", "-", "=cmd", "ü∞😀", "\x1b[31m",
)  # --out, in the folder where the command runs  # fmt: skip


def write_files(folder: Path) -> None:
    """Write all files; gpt2 comes first, because others are made of it."""
    folder.mkdir(parents=True)
    for name, make in FILES.items():
        make(folder / name)
