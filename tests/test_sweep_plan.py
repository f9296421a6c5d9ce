"""The plan of a sweep: its runs, their names, and one line for every mistake before anything runs."""

import os
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from helpers.cli import run
from normscope import InputError
from normscope.core.threads import usable_cores
from normscope.dynamics import PANELS
from normscope.runs import new_run
from normscope.sweeps.folder import SweepFolder
from normscope.sweeps.plan import PRESETS, Plan, read_plan
from normscope.sweeps.scheduler import begin

GRID = """
kind = "train"
preset = "tiny"
[fixed]
examples = 1000
[grid]
scheme = ["pre", "qkv"]
dim = [64, 128]
rate = [1e-3, 1e-4]
"""


def planned(text: str) -> Plan:
    return read_plan(tomllib.loads(text))


def test_a_grid_is_every_combination_in_its_order() -> None:
    sweep = planned(GRID)
    assert sweep.varied == ("scheme", "dim", "rate")
    assert [point.name for point in sweep.points] == [
        f"scheme={scheme},dim={dim},rate={rate}" for scheme in ("pre", "qkv") for dim in (64, 128) for rate in (0.001, 0.0001)
    ]
    last = sweep.points[-1].experiment.field_values
    assert (last["scheme"], last["dim"], last["rate"], last["examples"]) == ("qkv", 128, 1e-4, 1000)
    assert last["layers"] == 2  # the preset's


def test_points_stand_beside_the_grid_and_have_names_of_their_own() -> None:
    sweep = planned(GRID + '[[points]]\nname = "mine"\nscheme = "peri"\nexamples = 500\n[[points]]\nseed = 7\n')
    assert [point.name for point in sweep.points[8:]] == ["mine", "seed=7"]
    assert sweep.varied == ("scheme", "dim", "rate", "examples", "seed")
    mine = sweep.points[8].experiment.field_values
    assert (mine["scheme"], mine["examples"], mine["dim"]) == ("peri", 500, 64)  # its own field replaces a fixed one


def test_names_are_safe_as_folders_and_differ() -> None:
    sweep = planned('kind = "train"\npreset = "tiny"\n[grid]\nintegers = [[2, 3], [4]]\nfeedforward_norm = ["layer", "rms"]\n')
    assert sweep.points[0].name == "integers=2+3,feedforward_norm=layer"
    long = planned(
        'kind = "train"\npreset = "tiny"\n[grid]\n'
        + "\n".join(f"{name} = [1, 2]" for name in ("layers", "warmup", "patience", "epoch"))
        + "\nintegers = [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [2, 3]]\nextrapolation = [[30], [31]]\n"
        + 'interpolation = [[20], [21]]\ndigits = [[1], [2]]\nfinal_norm = ["layer", "rms"]\n'
    )
    names = [point.name for point in long.points]
    assert len(set(names)) == len(names) == 2**9
    assert all(len(name) <= 150 and re.fullmatch(r"[\w.,=+-]+", name) for name in names)


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text('[attention]\ninput = "norm"\noutput = "norm"\n')
    (tmp_path / "recipe.toml").write_text("layers = 3\n")
    (tmp_path / "sweep.toml").write_text('kind = "train"\nrecipe = "./recipe.toml"\n[grid]\nscheme = ["./mine.toml", "pre"]\n')
    sweep = read_plan(str(tmp_path / "sweep.toml"))
    assert [point.name for point in sweep.points] == ["scheme=mine", "scheme=pre"]
    assert sweep.points[0].experiment.field_values["scheme"] == "mine"
    assert sweep.points[0].values["scheme"] == str(tmp_path / "mine.toml")
    assert sweep.points[0].experiment.field_values["layers"] == 3
    (tmp_path / "here").mkdir()
    (tmp_path / "mine.toml").rename(tmp_path / "here" / "mine.toml")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=re.escape(f"no scheme file '{tmp_path / 'mine.toml'}'")):
        read_plan(str(tmp_path / "sweep.toml"))


def test_a_dot_in_the_name_of_a_folder_stays_in_the_name_of_its_run(tmp_path: Path) -> None:
    for version in ("v1.0", "v1.5"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.json").write_text("{}")
    sweep = read_plan({"kind": "audit", "grid": {"model": [str(tmp_path / "v1.0"), str(tmp_path / "v1.5")]}})
    assert [point.name for point in sweep.points] == ["model=v1.0", "model=v1.5"]


def test_lists_are_shown_as_in_the_table() -> None:
    sweep = planned('kind = "train"\npreset = "tiny"\n[grid]\nintegers = [[2, 3], [4]]\n')
    assert [sweep.shared(points) for points in sweep.shapes] == ["integers 2,3", "integers 4"]


def test_panels_of_ensembles_are_a_field_too() -> None:
    sweep = planned('kind = "ensemble"\n[fixed]\nscheme = "pre,peri"\nruns = 100\n[grid]\npanel = ["5a", "5d", "5g"]\n')
    assert [point.experiment.field_values["dim"] for point in sweep.points] == [
        PANELS[panel].dim for panel in ("5a", "5d", "5g")
    ]
    assert [point.experiment.parts for point in sweep.points] == [7, 7, 7]


def test_runs_of_one_shape_are_timed_once() -> None:
    sweep = planned(GRID)
    assert [sweep.shared(points) for points in sweep.shapes] == [
        "scheme pre, dim 64", "scheme pre, dim 128", "scheme qkv, dim 64", "scheme qkv, dim 128"
    ]  # fmt: skip


def test_whole_runs_are_not_divided_in_the_estimate_and_chunks_are() -> None:
    three = planned('kind = "train"\npreset = "tiny"\n[grid]\nseed = [1, 2, 3]\n')
    assert three.duration({three.points[0].experiment.shape: 10.0}, 2) == 20.0
    one = planned('kind = "ensemble"\nscheme = "pre"\nruns = 64\nchunk = 16\n[grid]\nseed = [1]\n')
    assert one.duration({one.points[0].experiment.shape: 10.0}, 2) == 5.0


def test_the_plans_of_the_package_can_be_read() -> None:
    for name in PRESETS:
        assert files("normscope.sweeps").joinpath("presets", f"{name}.toml").is_file()
        assert len(read_plan(name).points) >= 12


MISTAKES = [
    ("", "begins with its kind"),
    ('kind = "trian"', "did you mean 'train'?"),
    ("kind = 3", "the kind of a sweep is one of"),
    ('kind = ["train"]', "the kind of a sweep is one of"),
    ('kind = "sweep"', "the kind of a sweep is one of"),
    ('kind = "train"\npreset = "tiny"', "no run: give [grid]"),
    ('kind = "train"\npreset = "tiny"\n[grid]\n', "no run: give [grid]"),
    ('kind = "train"\npreset = "tiny"\n[grid]\ndim = []\n', "'dim' in [grid] is an empty list"),
    ('kind = "train"\npreset = "tiny"\n[grid]\ndim = 64\n', "belongs to [fixed]"),
    ('kind = "train"\npreset = "tiny"\n[grid]\ndmi = [64]\n', "unknown field 'dmi' in [grid]; did you mean 'dim'?"),
    ('kind = "train"\npreset = "tiny"\n[fixed]\nraet = 1.0\n[grid]\ndim = [64]\n', "did you mean 'rate'?"),
    ('kind = "train"\npreset = "tiny"\ngird = 1\n[grid]\ndim = [64]\n', "did you mean 'grid'?"),
    ('kind = "train"\npreset = "tiny"\n[[points]]\nsede = 1\n', "in point 1; did you mean 'seed'?"),
    ('kind = "train"\npreset = "tiny"\n[[points]]\nname = "a"\n', "point 1 of [[points]] is empty"),
    ('kind = "train"\npreset = "tiny"\n[fixed]\ndim = 8\n[grid]\ndim = [64]\n', "both fixed and in the grid"),
    ('kind = "train"\npreset = "tiny"\nseed = 1\n[fixed]\nseed = 2\n[grid]\ndim = [64]\n', "both at the top and in [fixed]"),
    ('kind = "train"\npreset = "tiny"\n[grid]\nrate = [{a = 1}]\n', "a value is a text, a number"),
    ('kind = "train"\npreset = "tiny"\n[grid]\nscheme = ["~nobody-here/a.toml"]\n', "cannot use the scheme '~nobody-here"),
    (
        'kind = "train"\npreset = "tiny"\n[grid]\ndim = [64, "wide"]\n',
        "point 'dim=wide': dim='wide': should be a valid",
    ),
    ('kind = "train"\npreset = "tiny"\n[grid]\nscheme = ["pre", "perl"]\n', "did you mean 'peri'?"),
    ('kind = "train"\npreset = "tiny"\n[grid]\nseed = [1, 2, 1]\n', "two points have the name 'seed=1'"),
    (
        'kind = "train"\npreset = "tiny"\n[[points]]\nname = "a"\nseed = 1\n[[points]]\nname = "a"\nseed = 2\n',
        "two points have the name 'a'",
    ),
    (
        'kind = "train"\npreset = "tiny"\n[[points]]\nname = "a"\nseed = 1\n[[points]]\nname = "b"\nseed = 1\n',
        "points 'a' and 'b' are the same run",
    ),
    ('kind = "train"\npreset = "tiny"\n[grid]\nlayers = [2]\n[[points]]\nheads = 4\n', "are the same run"),
    ('kind = "train"\npreset = "tiny"\n[[points]]\nname = "../a"\nseed = 1\n', "a point's name becomes a folder"),
    ('kind = "train"\n[grid]\ndim = [64]\n', "a training needs either preset"),
    ('kind = "train"\npreset = "tinny"\n[grid]\ndim = [64]\n', "unknown preset 'tinny'"),
    ('kind = "train"\npreset = "tiny"\n[grid]\nseed = [' + "1," * 101 + "]\nwarmup = [" + "1," * 101 + "]", "at most 10,000"),
    ('kind = "ensemble"\n[grid]\ndim = ["wide"]\n', "point 'dim=wide': dim='wide': should be a valid"),
    (
        'kind = "simulate"\ngradient = true\n[grid]\nseed = [1]\n',
        "point 'seed=1': gradient=True goes back through whole layers",
    ),
    ('kind = "ensemble"\nscheme = "pre"\nruns = 4\n[grid]\npanel = ["5z"]\n', "unknown panel '5z'"),
    ('kind = "stability"\n[grid]\nmodel = ["builtin:addition-small"]\n', "no model 'builtin:addition-small' in the package"),
    ('kind = "stability"\nmodel = "builtin:addition-small-pre"\n[grid]\nlevels = [[0.1], [0.9]]\n', "below 0.577"),
    ('kind = "stability"\n[grid]\nseed = [1]\n', "point 'seed=1': stability needs model="),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_reported_before_anything_runs(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        planned(text)


def test_the_command_reports_a_mistake_in_one_line_and_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (("nowhere.toml",), "no plan 'nowhere.toml'"),
        (("status",), "status needs the sweep's folder"),
        (("status", "nowhere"), "does not exist"),
        (("scan", "there"), "--out there"),
    ):
        status, out, err = run(capsys, "sweep", *arguments)
        assert (status, out) == (2, ""), arguments
        assert message in err
        assert len(err.splitlines()) == 1
        assert list(here.iterdir()) == []
    Path("mine.toml").write_text('kind = "train"\npreset = "tiny"\n[grid]\ndmi = [64]\n')
    status, out, err = run(capsys, "sweep", "mine.toml")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "in 'mine.toml': unknown field 'dmi'" in err
    assert [path.name for path in here.iterdir()] == ["mine.toml"]


def test_a_plan_that_is_partial_or_has_no_runs_yet_may_begin_in_another_way(tmp_path: Path) -> None:
    folder, sweep = SweepFolder.of(tmp_path), planned(GRID)
    (tmp_path / ".sweep.json.123.partial").write_text('{"kind": "tra')  # killed while it wrote the plan
    assert folder.empty
    assert begin(folder, sweep, {"threads": 64})["threads"] == 64
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    assert begin(folder, sweep, {"threads": 1})["threads"] == 1  # nothing has run with 64
    folder.run("a").mkdir(parents=True)
    assert begin(folder, sweep, {"threads": 2})["threads"] == 1
    for content in ("{}", "[]", "{"):
        (tmp_path / "sweep.json").write_text(content)
        with pytest.raises(InputError, match=r"holds no sweep|sweep\.json' is not valid JSON"):
            folder.plan  # noqa: B018


def test_unfinished_work_is_removed_for_complete_runs_alone(tmp_path: Path) -> None:
    folder = SweepFolder.of(tmp_path)
    with new_run(folder.run("seed=1"), "train", {}):
        pass
    for name in ("seed=1", "seed=2"):
        (tmp_path / "runs" / f".{name}.unfinished-0123456789ab").mkdir()  # killed before it was removed
    folder.tidy()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".seed=2.unfinished-0123456789ab", "seed=1"]


def test_all_cores_count_where_the_system_restricts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no affinity of processes to cores."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cores() == 7
