"""Schemes by name and by path: what a user may write, and what happens when it is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from normscope import InputError
from normscope.schemes import NAMED, Scheme, Slots, find_scheme, scheme_from, scheme_record, scheme_values

MIX = """
until = 0.25
then = "pre"

[attention]
stream = "norm"
"""
SLOTS = """
norm = "tanh"
alpha = "1/layer"
learned = "scalar"
initial = "depth**(-1/2)"

[attention]
input = "norm"
scores = "sink(-1) + softcap(30)"
inner = "norm"
gate = "sigmoid"
output = "tangent"
step = "alpha"
"""
LERP = """
name = "mine"
norm = "layer"
alpha = 0.05
users = "me"

[attention]
heads = "qk"
output = "norm"
step = "alpha"
carry = "1 - alpha"
stream = "norm"

[feedforward]
input = "norm/sqrt(layer)"
"""


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_file_says_the_same_as_python(tmp_path: Path) -> None:
    scheme = find_scheme(write(tmp_path, LERP))
    assert scheme.attention == NAMED["ngpt-lerp"].attention
    assert scheme.feedforward == NAMED["ln-scaling"].feedforward
    assert (scheme.name, scheme.norm, scheme.users) == ("mine", "layer", "me")
    assert scheme.place(0.0, 12.0).alpha == 0.05


def test_a_file_has_every_slot_and_its_values_make_the_same_scheme(tmp_path: Path) -> None:
    scheme = find_scheme(write(tmp_path, SLOTS))
    inside = Slots(input="norm", inner="norm", output="tangent", step="alpha")
    attention = replace(inside, scores="softcap(30)+sink(-1)", gate="sigmoid")
    assert scheme == Scheme("mine", attention, norm="tanh", alpha="1/layer", learned="scalar", initial="depth**(-1/2)")
    assert scheme.feedforward == inside
    assert scheme_from(json.loads(json.dumps(scheme_values(scheme)))) == scheme
    record = scheme_record(scheme)
    assert (record["norm"], record["scores"], record["learned"], record["initial"]) == (
        "tanh", "softcap(30) + sink(−1)", "scalar", "T^(−1/2)",
    )  # fmt: skip
    assert "inner acts on every component alone" in record["statement"]


def test_a_file_may_change_with_depth_and_takes_its_name_from_the_path(tmp_path: Path) -> None:
    scheme = find_scheme(write(tmp_path, MIX, "early-post.toml"))
    assert scheme.name == "early-post"
    assert [stage.attention for stage in scheme.stages] == [stage.attention for stage in NAMED["mix"].stages]


def test_then_may_be_another_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path, LERP)
    scheme = find_scheme(write(tmp_path, MIX.replace('"pre"', '"mine.toml"'), "first.toml"))
    assert scheme.then is not None
    assert scheme.then.name == "mine"


def test_then_may_be_a_table_of_the_same_file(tmp_path: Path) -> None:
    later = "[then]\nname = 'later'\nalpha = 0.5\n[then.attention]\nstep = 'alpha'"
    scheme = find_scheme(write(tmp_path, MIX.replace('then = "pre"', "") + later))
    assert [stage.name for stage in scheme.stages] == ["mine", "later"]
    assert scheme.at(11.0, 12.0).place(11.0, 12.0).alpha == 0.5
    assert scheme_from(json.loads(json.dumps(scheme_values(scheme)))) == scheme


def test_slots_can_be_added_to_any_name() -> None:
    gemma = find_scheme("peri+qk+softcap(50)+sink(-1)+gate")
    slots = Slots(input="norm", heads="qk", output="norm", scores="softcap(50)+sink(-1)", gate="sigmoid")
    assert gemma == Scheme("peri+qk+softcap(50)+sink(-1)+gate", slots, norm="rms")
    assert find_scheme("pre+inner").feedforward == find_scheme("sub-ln").feedforward
    assert find_scheme("pre+temperature(1 + log(n))".replace(" ", "")).attention.scores == "temperature(1 + log(n))"
    assert [stage.attention.scores for stage in find_scheme("mix+sink").stages] == ["sink", "sink"]


def test_heads_can_be_added_to_any_name() -> None:
    assert find_scheme("peri+qk").attention.heads == "qk"
    assert find_scheme("pre+qk").attention == NAMED["qk"].attention
    assert find_scheme("mix+qkv").at(11.0, 12.0).attention.heads == "qkv"


def test_a_later_stage_needs_no_name_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, "name = 'two'\nuntil = 0.5\n[attention]\ninput = 'norm'\n[then]\n[then.attention]\nstream = 'norm'")
    scheme = find_scheme(path)
    assert [stage.name for stage in scheme.stages] == ["two", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[attention]\ninptu = 'norm'",
            "unknown key 'inptu' in [attention]; did you mean 'input'? (allowed: input,",
        ),
        ("nrom = 'rms'\n[attention]", "unknown key 'nrom' in a scheme; did you mean 'norm'?"),
        ("norm = 'rms'", "needs the table [attention]"),
        ("attention = 3", "[attention] is a table of slots"),
        ("[attention]\ninput = true", "slot 'input' in [attention] is a text"),
        ("[attention]\ngate = true", "slot 'gate' in [attention] is a text"),
        ("[attention]\nscores = 'sinc'", "slot 'scores' is 'softmax', or some of temperature(log(n)), softcap(50) and sink"),
        ("learned = 1\n[attention]", "'learned' is a text, not 1"),
        ("initial = 'x'\n[attention]", "unknown name 'x' in 'x'"),
        ("[attention]\nstep = true", "a formula is a number or a text"),
        ("[attention]\nstep = nan", "nan"),
        ("[attention]\nstep = inf", "inf"),
        ("until = 'half'\nthen = 'pre'\n[attention]", "'until' is a share of the depth"),
        ("until = 0.5\nthen = 'perl'\n[attention]", "did you mean 'peri'"),
        ("[attention", "not valid TOML"),
        ("papers = 3\n[attention]", "'papers' is a list of texts"),
        ("papers = 'abc'\n[attention]", "'papers' is a list of texts"),
        ("until = 0.5\nthen = 'mine.toml'\n[attention]", "comes after itself"),
        ("until = 0.5\nthen = 'mix'\n[attention]", "over when it would begin"),
        ("[attention]\ninput = 'norm*(0-2)'", "must be positive"),
        ("[attention]\nstep = '1/(5-5)'", "step = '1/(5−5)' is not a finite number"),
        ("x = " + "[" * 5000, "not valid TOML"),
        ("until = 0.5\nthen = 3\n[attention]", "a scheme is a table of slots, not 3"),
        ("[attention]\n" + "".join(f"[{'.'.join(['then'] * n)}.attention]\n" for n in range(1, 17)), "at most 16 stages"),
        ("[attention]\nscores = 'softcap(" + "-" * 1500 + "1)'", "a formula has at most 200 characters"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        find_scheme(path)
    assert path in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("perl", "unknown scheme 'perl'; did you mean 'peri'? (normscope schemes lists them)"),
        ("", "unknown scheme ''"),
        ("peri+vk", "slot 'heads'"),
        ("peri+", "'' is no part of a scheme: +qk,"),
        ("nowhere/at-all.toml", "no scheme file 'nowhere/at-all.toml'"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_scheme(name)
    assert message in str(caught.value)


def test_a_folder_is_not_a_scheme(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        find_scheme(f"{tmp_path}/")


def test_stages_may_differ_in_norm_and_alpha(tmp_path: Path) -> None:
    path = write(tmp_path, "until = 0.5\nthen = 'ngpt-lerp'\nnorm = 'layer'\n[attention]\nstream = 'norm'")
    record = scheme_record(find_scheme(path))
    assert record["norm"] == "LayerNorm for t < 0.5·T, then RMSNorm"
    assert record["alpha"] == "1 for t < 0.5·T, then 0.05"
