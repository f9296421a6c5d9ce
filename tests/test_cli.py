"""The command line as a user meets it: real processes, their output, their exit status."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from helpers.cli import run
from normscope.cli.commands import app
from normscope.cli.output import print_table
from normscope.cli.overview import commands, overview
from normscope.experiments import kind_of, summaries
from normscope.schemes import NAMED

FIELDS = {"name", "input", "heads", "output", "step", "carry", "stream", "speed", "radial"}


def normscope(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from normscope.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=280, check=False)


def test_schemes_lists_every_scheme_with_what_follows_from_it() -> None:
    result = normscope("schemes")
    assert result.returncode == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for name in NAMED:
        assert name in lines
    assert "r_j·|A_j|" in lines["peri"]
    assert "(1−α_t)·|A_j|/α_t" in lines["ngpt-lerp"]
    assert "A_j(Θ) at β/(t+1)" in result.stdout


def test_json_is_one_document_of_records_and_nothing_else_on_stdout() -> None:
    result = normscope("schemes", "--json")
    records = json.loads(result.stdout)
    assert [record["name"] for record in records] == list(NAMED)
    assert all(record.keys() >= FIELDS for record in records)
    assert result.stderr == ""


def test_json_survives_a_terminal_without_unicode() -> None:
    command = [sys.executable, "-c", "from normscope.cli import main; main()", "schemes", "ngpt", "--json"]
    result = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert json.loads(result.stdout)[0]["step"] == "α_t"


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_table_is_whole_on_every_terminal(columns: int) -> None:
    """On a real pseudo-terminal of that width no cell is cut."""
    code = f"stty cols {columns}; {sys.executable} -c 'from normscope.cli import main; main()' schemes"
    result = subprocess.run(["script", "-qec", code, "/dev/null"], capture_output=True, text=True, check=True)
    assert "…" not in result.stdout
    for cell in ("ngpt-lerp", "norm/√(t+1)", "(1−α_t)·|A_j|/α_t", "⟨θ_j,A_j⟩/√(t+1)", "Transformer", "NVIDIA"):
        assert cell in result.stdout, cell


def test_a_users_words_are_printed_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "[bold]x"\ntitle = "[/] :smile:"\n[attention]\n')
    output = normscope("schemes", "./mine.toml", cwd=tmp_path).stdout
    assert "[bold]x: [/] :smile:" in output


def test_one_scheme_in_full_shows_update_flow_drawing_and_papers() -> None:
    output = normscope("schemes", "peri").stdout
    for part in (
        "X ← X + Norm(A(Norm(X)))",
        "Ẋ = Norm(A(Norm(X)))",
        "r_j·|A_j|",
        "Attention",
        "⊕",
        "arXiv 2502.02732",
    ):
        assert part in output


def test_a_scheme_file_is_used_like_a_name(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[attention]\ninput = "norm"\nstep = "0.5"\n')
    result = normscope("schemes", "./mine.toml", "--norm", "layer", "--json", cwd=tmp_path)
    (record,) = json.loads(result.stdout)
    assert (record["name"], record["norm"], record["speed"]) == ("mine", "LayerNorm", "r_j/0.5")


def test_drawing_lands_in_a_file_and_is_announced_on_stderr(tmp_path: Path) -> None:
    result = normscope("schemes", "peri", "--json", "--draw", str(tmp_path / "peri.png"))
    assert json.loads(result.stdout)[0]["name"] == "peri"
    assert "peri.png" in result.stderr
    assert (tmp_path / "peri.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("schemes", "perl"), "unknown scheme 'perl'; did you mean 'peri'? (normscope schemes lists them)"),
        (("schemes", "missing.toml"), "no scheme file 'missing.toml'"),
        (("schemes", "--norm", "batch"), "one of rms, layer"),
        (("schemes", "--jsn"), "--json"),
        (("schemas",), "schemes"),
        (("schemes", "pre", "--draw", "a.bmp"), "png"),
        (("schemes", "pre", "--draw", "no/such/folder/a.png"), "no/such/folder"),
        (("demo", "--out", "/proc/nowhere/run"), "/proc"),
        (("demo", "--out", "file/run"), "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_nothing_written(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").write_text("")
    result = normscope(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("\x1b[2J", "'\\x1b[2J'"),
        ("a\nb", "'a b'"),
        ("x" * 5000, f"'{'x' * 79}…"),
        ("\udcff", "'\\udcff' is not"),
    ],
)
def test_a_message_is_one_readable_line_whatever_it_quotes(value: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "schemes", value)
    assert (status, out) == (2, "")
    assert shown in err
    assert err.removesuffix("\n").isprintable()
    assert len(err) < 300


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    assert normscope("demo", "--out", str(tmp_path / "run")).returncode == 2


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (("--debug", "schemes", "perl"), ("schemes", "perl", "--debug")):
        result = normscope(*arguments)
        assert result.returncode != 0
        assert "Traceback" in result.stderr


def test_help_has_examples_and_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom normscope.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'pandas', 'numpy', 'pydantic', 'rich', 'typer'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for text in ("schemes", "demo", "--debug"):
        assert text in result.stdout
    assert normscope().stdout == normscope("--help").stdout


def test_listing_schemes_does_not_wait_for_torch() -> None:
    code = (
        "import sys\nfrom normscope.cli import main\n"
        "try:\n    main(['schemes', '--json'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -c 'from normscope.cli import main; main()' schemes --json | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.stdout == "[\n"
    assert "Traceback" not in result.stderr


def test_help_groups_commands_by_purpose_with_an_example_of_each() -> None:
    text = overview()
    groups = {block.partition(":\n")[0]: block for block in text.split("\n\n")}
    for name, entry in commands().items():
        assert f"  {name} " in groups[entry.purpose]
        assert f"{entry.summary}\n" in groups[entry.purpose]
        assert f" {entry.example}\n" in f"{groups[entry.purpose]}\n"
        assert entry.example.split()[:2] == ["normscope", name]
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("name", list(commands()))
def test_the_example_of_a_command_is_one_of_those_in_its_help(name: str) -> None:
    entry = commands()[name]
    usage = kind_of(name).usage if name in summaries() else import_module(entry.module).EXAMPLES.splitlines()
    assert any(line.strip().startswith(entry.example) for line in usage)


def test_help_names_every_option_that_comes_before_a_command() -> None:
    options = get_command(app("")).params
    assert options
    for option in options:
        assert option.opts[0] in overview()


def test_help_lists_every_command_and_imports_none() -> None:
    code = "import sys; from normscope.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, summary in summaries().items():
        assert f"{name} " in said
        assert summary.split()[0] in said
        assert f"normscope.experiments.{name} " not in said
    assert " torch " not in said


def test_no_column_is_lost_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("normscope.experiments.terminal._WIDTH_OF_A_FILE", 60)
    long = "a title that takes more than half of the line by itself"
    print_table(("id", "title", "cases", "verdict", "what"), [["1:2", long, "33", "holds in the tested range", "some words"]])
    said = capsys.readouterr().out
    for cell in ("1:2", long, "33", "holds in the tested range"):
        assert cell in said
