"""normscope stability: what norm noise does to the circuits of a model."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.output import (
    DeviceOption,
    FormatOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    SeedOption,
    chosen_device,
    chosen_names,
    console,
    examples,
    numbers,
    print_folder,
    print_json,
    print_table,
    progress,
    say,
    with_report,
)
from normscope.cli.reading import ExamplesOption, ModelArgument, TextOption, read_text

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = examples(
    "normscope stability builtin:addition-small-pre",
    "normscope stability ./SmolLM2-135M-Instruct.Q4_1.gguf --measure spread,collapse,sparsity",
    "normscope stability runs/train-baseline-pre --examples 1000 --device cuda",
    "normscope stability gpt2 --text notes.txt --tokens 512 --json",
)
_RECORDS = {"spread": "spread", "noise": "noise", "collapse": "collapse", "margins": "margin", "sparsity": "sparsity"}
_SHOWN = 0.1  # the noise whose collapse the table by layer shows


def stability(
    model: ModelArgument,
    text: TextOption = None,
    tokens: Annotated[
        int | None, typer.Option(min=3, help="Read the first tokens of the text.", show_default="all, or 512 of ours")
    ] = None,
    examples: ExamplesOption = None,
    measure: Annotated[
        str | None, typer.Option(help="Some of spread, noise, collapse, sparsity, with commas.", show_default="all")
    ] = None,
    levels: Annotated[
        str | None, typer.Option(help="Noise levels (RMS) of the collapse curve.", show_default="25 from 0.005 to 0.3")
    ] = None,
    noise_levels: Annotated[str, typer.Option(help="Noise levels at which the model is run.")] = "0.003,0.01,0.03,0.1,0.3",
    layer_noise: Annotated[str, typer.Option(help="Noise levels for one layer at a time; none to leave it out.")] = "0.1",
    noise: Annotated[str, typer.Option(help="Distribution of the noise for collapse: uniform or gaussian.")] = "uniform",
    draws: Annotated[int, typer.Option(min=1, max=1000, help="Draws of the noise; 16 times as many for strict collapse.")] = 1,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    format: FormatOption = "html",
    json: JsonOption = False,
) -> None:
    """Norm spread, noise sensitivity, circuit collapse and sparsity of a model's attention, by layer and head."""
    from normscope.models import open_model
    from normscope.report import FORMATS
    from normscope.report.stability import write_stability_report
    from normscope.runs import check_writable, fresh_path, new_run, run_path
    from normscope.stability import MEASURES, StabilitySetting, chosen_sample, measure_stability

    formats = chosen_names(format, FORMATS, "format")
    given = {"levels": levels, "noise_levels": noise_levels, "layer_noise": layer_noise}
    setting = StabilitySetting(
        measures=None if measure is None else tuple(chosen_names(measure, MEASURES, "measure")),
        **{name: _levels(value, f"--{name.replace('_', '-')}") for name, value in given.items() if value is not None},
        noise=noise,
        draws=draws,
        seed=seed,
    )
    where = chosen_device(device)
    folder = out or fresh_path("runs/stability")
    check_writable(folder, overwrite=overwrite)
    content = read_text(text)
    started = datetime.now(UTC)
    with console(stderr=True).status(f"opening {model}"):
        view = open_model(model, where)
        sample = chosen_sample(view, content, tokens, examples, seed)
    if setting.wanted(view) != list(setting.measures or MEASURES):
        say(f"{model} predicts no tokens: noise, which is measured by what predictions lose, is left out")
    tables = measure_stability(view, sample, setting, progress)
    said = list(tables["findings"]["text"])
    configuration = {**setting.record(view, sample), "text": None if text is None else str(text)}
    settings = f"{model}; {configuration['tokens']:,} tokens; collapse by {noise} noise; seed {seed}"
    with new_run(folder, "stability", configuration, seed=seed, device=where, overwrite=overwrite, started=started) as written:
        for name, table in tables.items():
            written.write_table(name, table)
        with_report(lambda: write_stability_report(written, settings, formats))
    if json:
        print_json(_records(tables))
    else:
        _print(tables, said)
        print_folder(run_path(folder))


def _levels(text: str, what: str) -> tuple[float, ...]:
    return () if text.strip().lower() == "none" else tuple(sorted(set(numbers(text, what))))


def _records(tables: "dict[str, pd.DataFrame]") -> list[dict[str, Any]]:
    """A record for every row: its measure, layer and head, null for totals, and its own fields."""
    from normscope.runs import plain_rows

    records = []
    for name, measure in _RECORDS.items():
        for row in plain_rows(tables[name]) if name in tables else ():
            first = {"measure": measure, "layer": row.pop("layer", None), "head": row.pop("head", None)}
            records.append(first | row)
    return records


def _print(tables: "dict[str, pd.DataFrame]", said: list[str]) -> None:
    """A line for each layer, the noise curve, and what it comes to."""
    from normscope.runs import plain_rows

    columns = _by_layer({name: plain_rows(table) for name, table in tables.items()})
    layers = sorted({layer for column in columns.values() for layer in column})
    if layers:
        rows = [[str(layer), *(column.get(layer, "–") for column in columns.values())] for layer in layers]
        print_table(("layer", *columns), rows)
    if "noise" in tables:
        curve = [
            [
                row["perturbed"],
                row["where"],
                f"{100 * row['noise']:g} %",
                f"{100 * row['accuracy']:.2f} ± {100 * row['accuracy_stderr']:.2f} %",
                f"{row['loss']:.4g} ± {row['loss_stderr']:.2g}",
            ]
            for row in plain_rows(tables["noise"])
            if row["layer"] is None
        ]
        print_table(("noise on", "where attention is", "noise", "accuracy", "loss"), curve)
    out = console()
    for sentence in said:
        out.print(sentence, soft_wrap=True)


def _by_layer(tables: dict[str, list[dict[str, Any]]]) -> dict[str, dict[int, str]]:
    """A column for each thing measured: what it says of each layer."""
    columns: dict[str, dict[int, str]] = {}

    def whole_layers(name: str) -> list[dict[str, Any]]:
        return [row for row in tables.get(name, ()) if row["layer"] is not None and row.get("head") is None]

    for row in whole_layers("spread"):
        columns.setdefault("90 % of lengths / median", {})[row["layer"]] = f"{row['low90']:.2f} … {row['high90']:.2f}"
    for row in whole_layers("sparsity"):
        columns.setdefault("sparse", {})[row["layer"]] = f"{100 * row['share']:.1f} %"
    loose = [row for row in whole_layers("collapse") if row["definition"] == "loose" and row["probability"] is not None]
    level = min((row["noise"] for row in loose), key=lambda noise: abs(float(noise) - _SHOWN), default=_SHOWN)
    for row in loose:
        if row["noise"] == level:
            columns.setdefault(f"collapse at {100 * level:.3g} %", {})[row["layer"]] = f"{100 * row['probability']:.2g} %"
    margins: dict[int, float] = {}
    for row in tables.get("margins", ()):
        if row["margin"] is not None:
            margins[row["layer"]] = min(row["margin"], margins.get(row["layer"], 1.0))
    for layer, margin in margins.items():
        columns.setdefault("possible from", {})[layer] = f"±{100 * margin:.2g} %"
    for row in whole_layers("noise"):
        name = f"loss at {100 * row['noise']:g} % here alone"
        columns.setdefault(name, {})[row["layer"]] = f"{row['loss_change']:+.2g} ± {row['loss_change_stderr']:.1g}"
    return columns
