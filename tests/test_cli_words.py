"""normscope words, as a user runs it on a small GPT-2."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import normscope as ns
from helpers.cli import run
from helpers.gpt2 import NOUNS, SENTENCE, save_gpt2
from normscope.experiments.result import load


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a GPT-2 of random weights that knows some nouns, with a blank before them and some without."""
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a page: its figures take longer than what is measured."""
    monkeypatch.setattr("normscope.report.write.write_report", lambda *arguments, **options: None)


def records(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    status, out, _ = run(capsys, "words", *arguments, "--json")
    assert status == 0
    found: list[dict[str, Any]] = json.loads(out)
    for record in found:
        assert {"probe", "layer", "head", "word", "nearest"} <= set(record)
        for token in record["nearest"]:
            assert set(token) == {"token", "text", "score"}
    return found


def test_embeddings_are_compared_and_ranked(gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = records(capsys, gpt2, "embeddings")
    distances = [record for record in found if "setting" in record]
    assert [record["setting"] for record in distances] == ["original", "centred", "scaled", "centred and scaled"]
    extremes = [record for record in found if "end" in record]
    assert len(extremes) == 8
    assert all(len(record["nearest"]) == 5 for record in extremes)
    written = pd.read_parquet(inside / "runs" / "words-embeddings" / "distances.parquet")
    assert written["l2_mean"].tolist() == [record["l2_mean"] for record in distances]
    status, out, _ = run(capsys, "words", gpt2, "embeddings")
    assert status == 0
    assert "centred and scaled" in out
    assert "runs/words-embeddings-2" in out.splitlines()[-1]


@pytest.mark.parametrize("probe", ["queries", "values"])
def test_heads_say_what_they_do_to_named_words(gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str], probe: str) -> None:
    found = records(capsys, gpt2, probe, "--layer", "0,-1", "--head", "1", "--word", "time,life", "--nearest", "3")
    heads = [1, None] if probe == "values" else [1]
    places = [(record["layer"], record["head"], record["word"]) for record in found]
    assert sorted(places, key=str) == sorted(
        [(layer, head, w) for layer in (0, 2) for head in heads for w in ("time", "life")], key=str
    )
    assert all(len(record["nearest"]) == 3 for record in found)
    assert all(("norm" in record) == (probe == "values") for record in found)
    assert not (inside / "runs" / f"words-{probe}" / "heads.parquet").exists()


@pytest.mark.parametrize("probe", ["queries", "values"])
@pytest.mark.usefixtures("no_pictures")
def test_heads_are_scored_over_the_common_nouns(
    gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str], probe: str
) -> None:
    status, out, _ = run(capsys, "words", gpt2, probe, "--out", "run")
    assert status == 0
    assert "random" in out
    assert f"3 of {len(NOUNS)} words, all are in nearest.parquet" in out
    heads = pd.read_parquet(inside / "run" / "heads.parquet")
    assert sorted(heads["head"]) == [0, 1]
    for name in ("same", "nearness", "precedence"):
        assert (heads[f"{name}_low"] <= heads[name] + 1e-9).all()
        assert (heads[name] <= heads[f"{name}_high"] + 1e-9).all()
    assert set(heads["label"]) <= {"meaning-preserving", "precedence", "none"}
    again = records(capsys, gpt2, probe, "--no-scores")
    assert not any("label" in record for record in again)
    scored = records(capsys, gpt2, probe)
    assert [record["same"] for record in scored if "label" in record] == heads["same"].tolist()


@pytest.mark.parametrize("matrix", ["vo", "qk"])
@pytest.mark.usefixtures("no_pictures")
def test_singular_vectors_have_tokens_on_both_sides(
    gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str], matrix: str
) -> None:
    found = records(capsys, gpt2, "singular", "--matrix", matrix, "--vectors", "2", "--nearest", "4")
    assert {record["layer"] for record in found} == {2}
    assert len(found) == 2 * 2 * 2
    assert {record["side"] for record in found} == {"left", "right"}
    status, out, _ = run(capsys, "words", gpt2, "singular", "--matrix", matrix)
    assert status == 0
    assert ("W_VO" if matrix == "vo" else "W_QK") in out


@pytest.mark.parametrize("map_", ["sphere", "pca"])
@pytest.mark.usefixtures("no_pictures")
def test_a_journey_is_recorded_layer_by_layer(gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str], map_: str) -> None:
    found = records(capsys, gpt2, "journey", SENTENCE, "--token", "1", "--map", map_)
    assert [record["layer"] for record in found] == [0, 1, 2, 3]
    assert all(record["rank"] >= 1 for record in found)
    assert {record["word"] for record in found} == {" time"}
    assert found[0]["angle"] is None
    assert all(0 <= record["probability"] <= 1 for record in found)


def test_a_journey_is_shown_from_the_embeddings_to_the_last_layer(
    gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "words", gpt2, "journey", SENTENCE)
    assert status == 0
    lines = [line.split()[:2] for line in out.splitlines() if line.split()[:1] in (["embeddings"], ["layer"])]
    assert [line[0] for line in lines] == ["embeddings", "layer", "layer", "layer"]
    assert [line[1] for line in lines[1:]] == ["0", "1", "2"]
    loaded = load(inside / "runs" / "words-journey")
    assert "journey" in loaded.figures
    assert loaded.records[-1]["word"] == " the"


def test_geometry_is_drawn(gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "words", gpt2, "geometry", "--head", "1")
    assert status == 0
    assert "layer 0; head 1; word time" in out
    assert set(load(inside / "runs" / "words-geometry").figures) == {"norm-points", "norm-curves", "head-update"}


@pytest.mark.usefixtures("no_pictures")
def test_geometry_is_recorded(gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = records(capsys, gpt2, "geometry", "--word", "world", "--layer", "1")
    assert {record["picture"] for record in found} == {"norm_points", "norm_curves", "head_update"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("embedings",), "unknown probe 'embedings'; allowed: embeddings, queries"),
        (
            ("embeddings", "--layer", "1"),
            "--layer has no meaning for embeddings; it belongs to queries, values, singular, geometry",
        ),
        (("queries", "a text"), "'a text' has no meaning for queries; it belongs to journey"),
        (("journey",), "journey needs a text"),
        (("queries", "--layer", "3"), "--layer 3: there are 3, 0 to 2"),
        (("queries", "--layer", "first"), "--layer is a number"),
        (("queries", "--head", "7"), "--head 7: there are 2"),
        (("queries", "--word", "zebra"), "'zebra' is not one token"),
        (("queries", "--distance", "3"), "--distance 3: positions of"),
        (("singular", "--matrix", "vo", "--distance", "3"), "--distance has a meaning for --matrix qk alone"),
        (("geometry", "--word", "time,life"), "--word takes one value, not 2"),
        (("queries", "--word", "time", "--scores"), "--scores needs at least 20 words, not 1"),
        (("singular", "--matrix", "ov"), "unknown matrix 'ov'"),
        (("journey", SENTENCE, "--token", "9"), "--token 9: the text has 5 tokens"),
        (("journey", SENTENCE, "--map", "tsne"), "unknown map 'tsne'; allowed: sphere, umap, pca"),
        (("values", "--token", "1"), "--token has no meaning for values"),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_mistakes_get_one_line(
    gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, "words", gpt2, *arguments)
    assert status == 2
    assert out == ""
    assert message in err.splitlines()[-1]
    assert not (inside / "runs").exists() or not list((inside / "runs").iterdir())


@pytest.mark.usefixtures("no_pictures")
def test_python_and_the_command_give_the_same(gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_command = records(capsys, gpt2, "values", "--layer", "0,-1", "--head", "1", "--word", "time,life", "--nearest", "2")
    result = ns.words(gpt2, "values", layer=[0, -1], head=1, word=["time", "life"], nearest=2, progress=False)
    assert result.records == of_command
    with pytest.raises(ns.InputError, match="layer= has no meaning for embeddings"):
        ns.words(gpt2, "embeddings", layer=0)


def test_umap_says_what_it_needs(
    gpt2: str, inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "umap", None)
    status, _, err = run(capsys, "words", gpt2, "journey", SENTENCE, "--map", "umap")
    assert status == 2
    assert "pip install 'normscope[words]'" in err


@pytest.mark.usefixtures("no_pictures")
def test_our_own_models_have_no_nouns(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "words", "builtin:addition-small-pre", "queries")
    assert status == 2
    assert "no common English noun is one token" in err
    found = records(capsys, "builtin:addition-small-qkv", "queries", "--word", "1,2,+")
    assert {record["word"] for record in found} == {"1", "2", "+"}
    status, _, err = run(capsys, "words", "builtin:addition-small-pre", "journey", "12+34=")
    assert status == 2
    assert "adds integers" in err
