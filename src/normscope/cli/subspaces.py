"""normscope subspaces: what each head of a model can see, and what the rest of a token does to it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.output import (
    DeviceOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    SeedOption,
    chosen_device,
    chosen_names,
    console,
    examples,
    named_schemes,
    print_folder,
    print_json,
    print_table,
    progress,
    with_report,
)
from normscope.cli.reading import ExamplesOption, TextOption, read_text
from normscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = examples(
    "normscope subspaces builtin:addition-small-pre",
    "normscope subspaces package:smollm2 --tokens 128 --measure interference",
    "normscope subspaces world",
    "normscope subspaces world --schemes none,pre,peri,qkv --types 20 --json",
)
WORLD = "world"
_RECORDS = {"rank": "rank", "spheres": "sphere", "angles": "angle", "interference": "interference"}
_WORLD_RECORDS = {"worlds": "interference", "points": "breaking point", "curves": "solved"}
_TOKENS = 128
_SCHEMES, _TYPES = "none,pre,qkv", 12


def subspaces(
    model: Annotated[
        str,
        typer.Argument(
            help="A run folder, transformers folder, hub name, GGUF file, builtin:NAME or package:smollm2; or 'world' for "
            "constructed worlds and the induction circuit, where theory gives the numbers.",
        ),
    ],
    text: TextOption = None,
    tokens: Annotated[
        int | None, typer.Option(min=3, help="Read the first tokens of the text.", show_default=f"all, or {_TOKENS} of ours")
    ] = None,
    examples: ExamplesOption = None,
    measure: Annotated[
        str | None, typer.Option(help="Some of rank, spheres, angles, interference, with commas.", show_default="all")
    ] = None,
    schemes: Annotated[
        str | None, typer.Option(help="For a world: schemes, names or files, with commas.", show_default=_SCHEMES)
    ] = None,
    types: Annotated[
        int | None, typer.Option(min=3, max=200, help="For a world: types that the circuit repeats.", show_default=str(_TYPES))
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """What each head sees of a token, whether such parts are orthogonal spheres, and what others do to its scores."""
    from normscope.runs import check_writable, fresh_path

    if model == WORLD:
        _refuse(f"'{WORLD}' reads its own tokens", text=text, tokens=tokens, examples=examples, measure=measure)
    else:
        _refuse(f"'{model}' has a scheme of its own: that is for '{WORLD}'", schemes=schemes, types=types)
    folder = out or fresh_path("runs/subspaces")
    check_writable(folder, overwrite=overwrite)
    if model == WORLD:
        _world(schemes or _SCHEMES, types or _TYPES, seed, folder, overwrite, json)
    else:
        _model(model, text, tokens, examples, measure, seed, device, folder, overwrite, json)


def _model(
    model: str,
    text: Path | None,
    tokens: int | None,
    examples: int | None,
    measure: str | None,
    seed: int,
    device: str,
    folder: Path,
    overwrite: bool,
    json: bool,
) -> None:
    """Measure a model."""
    from normscope.measures.sample import chosen_sample
    from normscope.models import open_model
    from normscope.subspaces import MEASURES, findings, measure_subspaces

    wanted, where, content, started = (
        chosen_names(measure, MEASURES, "measure"),
        chosen_device(device),
        read_text(text),
        datetime.now(UTC),
    )
    with console(stderr=True).status(f"opening {model}"):
        view = open_model(model, where)
        sample = chosen_sample(view, content, tokens, examples, seed, bundled=_TOKENS)
    with progress("looking at subspaces", total=view.layers) as advance:
        tables = measure_subspaces(view, sample, wanted, seed, advance)
    configuration = {
        "model": model,
        "scheme": None if view.scheme is None else view.scheme.name,
        "text": None if text is None else str(text),
        "rows": sample.tokens.shape[0],
        "tokens": int(sample.attention_mask.sum()),
        "measures": wanted,
    }
    said = findings(view, tables)
    settings = f"{model}; {configuration['tokens']:,} tokens; seed {seed}"
    _write(folder, configuration, tables, said, settings, seed, where, overwrite, started)
    if json:
        print_json(_records(tables, _RECORDS))
    else:
        _print_layers(tables)
        _end(said, folder)


def _world(schemes: str, types: int, seed: int, folder: Path, overwrite: bool, json: bool) -> None:
    """Measure constructed worlds and the circuit."""
    from normscope.subspaces import circuit_tables, interference_table, world_findings

    found, started = named_schemes(schemes), datetime.now(UTC)
    tables = {"worlds": interference_table(found, seed)}
    with progress("taking orthogonality and constant norm away", total=len(found)) as advance:
        tables |= circuit_tables(found, types, seed, advance)
    said = world_findings(tables)
    configuration = {"model": WORLD, "schemes": [scheme.name for scheme in found], "types": types}
    settings = f"constructed worlds; {types} types; seed {seed}"
    _write(folder, configuration, tables, said, settings, seed, "cpu", overwrite, started)
    if json:
        print_json(_records(tables, _WORLD_RECORDS))
    else:
        _print_world(tables)
        _end(said, folder)


def _refuse(why: str, **given: Any) -> None:
    """Refuse options that do not go with what is looked at."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"--{name} does not go here: {why}")


def _write(
    folder: Path,
    configuration: dict[str, Any],
    tables: "dict[str, pd.DataFrame]",
    said: list[str],
    settings: str,
    seed: int,
    device: str,
    overwrite: bool,
    started: datetime,
) -> None:
    """The run folder with its page."""
    import pandas as pd

    from normscope.report.subspaces import write_subspaces_report
    from normscope.runs import new_run

    with new_run(folder, "subspaces", configuration, seed=seed, device=device, overwrite=overwrite, started=started) as run:
        for name, table in {"findings": pd.DataFrame({"text": said}), **tables}.items():
            run.write_table(name, table)
        with_report(lambda: write_subspaces_report(run, settings))


def _end(said: list[str], folder: Path) -> None:
    from normscope.runs import run_path

    out = console()
    for sentence in said:
        out.print(sentence, soft_wrap=True)
    print_folder(run_path(folder))


def _records(tables: "dict[str, pd.DataFrame]", names: dict[str, str]) -> list[dict[str, Any]]:
    """A record for every row: its measure, layer and head where it has them, and its own fields."""
    from normscope.runs import plain_rows

    records = []
    for name, measure in names.items():
        for row in plain_rows(tables[name]) if name in tables else ():
            first = {"measure": measure, "layer": row.pop("layer", None), "head": row.pop("head", None)}
            records.append(first | row)
    return records


def _print_layers(tables: "dict[str, pd.DataFrame]") -> None:
    """A line for each layer, each column the mean over its heads."""
    columns: dict[str, pd.Series[Any]] = {}
    if "rank" in tables:
        by_layer = tables["rank"].groupby("layer")
        columns["rank"] = by_layer["rank"].mean().map("{:.3g}".format)
        columns["effective"] = by_layer["effective_rank"].mean().map("{:.3g}".format)
    if "spheres" in tables:
        for side, rows in tables["spheres"].query("place == 'before'").groupby("side", sort=False):
            columns[f"spread before norm, {side}"] = rows.groupby("layer")["spread"].mean().map("{:.3f}".format)
    if "overlaps" in tables:
        for side, rows in tables["overlaps"].groupby("side", sort=False):
            columns[f"overlap, {side}"] = rows.groupby("layer")["weighted_cosine"].mean().map("{:.3f}".format)
    if "interference" in tables:
        both = tables["interference"].query("exchanged == 'both'")
        for place, rows in both.groupby("place", sort=False):
            columns[f"change {place} norm"] = (100 * rows.groupby("layer")["change"].mean()).map("{:.3g} %".format)
        before = both[both["place"] == "before"].groupby("layer")
        columns["moved"] = (100 * before["moved"].mean()).map("{:.3g} %".format)
    if columns:
        layers = sorted(set().union(*(column.index for column in columns.values())))
        print_table(
            ("layer", *columns), [[layer, *(column.get(layer, "–") for column in columns.values())] for layer in layers]
        )


def _print_world(tables: "dict[str, pd.DataFrame]") -> None:
    from normscope.runs import plain_rows
    from normscope.subspaces import in_words

    means = tables["worlds"].groupby(["world", "scheme"], as_index=False, sort=False)[["before", "predicted", "after"]].mean()
    print_table(
        ("world", "scheme", "change before norm", "by theory", "after norm"),
        [
            [row["world"], row["scheme"], *(f"{row[name]:.6g}" for name in ("before", "predicted", "after"))]
            for row in plain_rows(means)
        ],
    )
    points = plain_rows(tables["points"])
    print_table(
        ("knob", "scheme", "part", "breaks at, by Theorem 7", "as seen"),
        [
            [row["knob"], row["scheme"], row["part"], *(in_words(row["knob"], row[name]) for name in ("predicted", "observed"))]
            for row in points
        ],
    )
