"""normscope advise: which scheme for a model of a given shape."""

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
    named_schemes,
    print_folder,
    print_json,
    print_table,
    progress,
    with_report,
)
from normscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from normscope.audit import Advice, Spectrum
    from normscope.schemes import Scheme

EXAMPLES = examples(
    "normscope advise --depth 48 --width 2048 --heads 16 --context 4096",
    "normscope advise --depth 12 --width 768 --heads 12 --weights gaussian --schemes pre,peri,./mine.toml",
    "normscope advise --depth 30 --width 576 --heads 9 --weights spectrum-of package:smollm2",
    "normscope advise --depth 24 --width 1024 --heads 16 --rank-by late,collapse,noise=2 --json",
)


def advise(
    model: Annotated[
        str | None, typer.Argument(help="The model of --weights spectrum-of: a folder, hub name, GGUF file, package:smollm2.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Number of layers.")] = ...,  # type: ignore[assignment]
    width: Annotated[int, typer.Option(min=1, help="Dimension of the model.")] = ...,  # type: ignore[assignment]
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = ...,  # type: ignore[assignment]
    context: Annotated[int, typer.Option(min=2, help="Tokens that the model will attend to.")] = 4096,
    weights: Annotated[
        str, typer.Option(help="kaiming, gaussian (0.02), or spectrum-of MODEL: singular values of a model's heads.")
    ] = "kaiming",
    schemes: Annotated[
        str | None, typer.Option(help="Schemes with commas: names, or paths of TOML files.", show_default="all that have names")
    ] = None,
    rank_by: Annotated[
        str | None,
        typer.Option(
            help="Criteria with commas, with weights if not alike: early, late, collapse, gradient, noise=2.",
            show_default="all five alike",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=2, help="Independent draws of start, weights and noise.")] = 8,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens to simulate.", show_default="the context, at most 128")
    ] = None,
    simulated_width: Annotated[
        int | None, typer.Option(min=1, help="Width to simulate.", show_default="the width, or less to fit the time")
    ] = None,
    feedforward: Annotated[
        float, typer.Option(min=0, help="Hidden width of a random feed-forward layer in every block, in widths; 0 for none.")
    ] = 0.0,
    causal: Annotated[bool, typer.Option("--causal", help="A token sees only itself and those before it.")] = False,
    radius: Annotated[float, typer.Option(help="Length of the first states; norms give length 1.")] = 1.0,
    norm: Annotated[str | None, typer.Option(help="The norm in every slot: rms or layer.", show_default="rms")] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    format: FormatOption = "html",
    json: JsonOption = False,
) -> None:
    """Rank schemes for a model of that shape by movement, collapse, gradients and noise, in simulation beside theory."""
    from normscope.audit import AdviceSetting, advice_findings, fitting_width
    from normscope.audit import advise as advise_on
    from normscope.audit.advise_ranks import chosen_criteria
    from normscope.audit.advise_setting import MOST_TOKENS
    from normscope.dynamics.motion import check_schemes
    from normscope.report import FORMATS
    from normscope.report.advise import write_advice_report
    from normscope.runs import check_writable, fresh_path, new_run, run_path

    criteria, formats = chosen_criteria(rank_by), chosen_names(format, FORMATS, "format")
    compared = _schemes(schemes, norm)
    check_schemes(compared)
    where = chosen_device(device)
    simulated = min(context, MOST_TOKENS) if tokens is None else tokens
    if simulated_width is None:
        simulated_width = fitting_width(depth, width, heads, simulated, feedforward, len(compared), runs, where)
    setting = AdviceSetting(
        depth=depth,
        width=width,
        heads=heads,
        context=context,
        weights=weights,
        tokens=simulated,
        simulated_width=simulated_width,
        feedforward=feedforward,
        causal=causal,
        radius=radius,
        runs=runs,
        seed=seed,
        device=where,
    )
    folder = out or fresh_path("runs/advise")
    check_writable(folder, overwrite=overwrite)
    started = datetime.now(UTC)
    spectrum = _spectrum(weights, model)
    with progress("simulating layers", total=2 * depth * runs) as advance:
        advice = advise_on(setting, compared, spectrum=spectrum, weights=criteria, progress=advance)
    findings = advice_findings(advice)
    configuration = setting.record | {"model": model, "schemes": [scheme.name for scheme in compared], "criteria": criteria}
    with new_run(folder, "advise", configuration, seed=seed, device=where, overwrite=overwrite, started=started) as written:
        for name, table in {"findings": findings, **advice.tables}.items():
            written.write_table(name, table)
        with_report(lambda: write_advice_report(written, setting.summary, formats))
    if json:
        print_json(_records(advice))
    else:
        _print(advice, findings)
        print_folder(run_path(folder))


def _schemes(text: str | None, norm: str | None) -> "list[Scheme]":
    from normscope.schemes import NAMED

    return named_schemes(",".join(NAMED) if text is None else text, norm)


def _spectrum(weights: str, model: str | None) -> "Spectrum | None":
    from normscope.audit.advise_setting import SPECTRUM

    if weights != SPECTRUM:
        if model is not None:
            raise InputError(f"'{model}': a model belongs to --weights {SPECTRUM}, not to --weights {weights}")
        return None
    if model is None:
        raise InputError(f"--weights {SPECTRUM} needs a model, such as --weights {SPECTRUM} package:smollm2")
    from normscope.audit import Spectrum
    from normscope.models import open_model

    with console(stderr=True).status(f"singular values of {model}"):
        return Spectrum.of(open_model(model, "cpu"))


def _records(advice: "Advice") -> list[dict[str, Any]]:
    """A record for every scheme, the best first: place, ranks, criteria, noise, theory, and what training measured."""
    from normscope.runs import plain_rows

    tables = {name: plain_rows(table) for name, table in advice.tables.items()}

    def of(name: str, scheme: str) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in row.items() if key != "scheme"} for row in tables[name] if row["scheme"] == scheme
        ]

    return [
        {
            **row,
            "level_with": [name for name in row["level_with"].split(", ") if name],
            "criteria": {found.pop("criterion"): found for found in of("criteria", row["scheme"])},
            **{name: of(name, row["scheme"]) for name in ("noise", "theory", "trained")},
        }
        for row in tables["ranks"]
    ]


def _print(advice: "Advice", findings: "pd.DataFrame") -> None:
    from normscope.audit.advise_facts import NOT_TRAINED
    from normscope.audit.advise_ranks import CRITERIA

    means = {(row.scheme, row.criterion): row for row in advice.ranking.criteria.itertuples(index=False)}
    trained = set(advice.trained.loc[advice.trained["what"] != NOT_TRAINED, "scheme"])
    rows = []
    for row in advice.ranking.order.itertuples(index=False):
        cells = [_cell(means[row.scheme, criterion.name]) for criterion in CRITERIA]
        rows.append(
            [
                row.place,
                row.scheme,
                f"{row.rank:.1f} ({row.low:.1f}–{row.high:.1f})",
                *cells,
                "yes" if row.scheme in trained else "no",
            ]
        )
    titles = [f"{criterion.name}, {criterion.unit}" for criterion in CRITERIA]
    print_table(("place", "scheme", "mean rank", *titles, "trained here"), rows)
    out = console()
    for basis, text in zip(findings["basis"], findings["text"], strict=True):
        out.print(f"[{basis}] {text}", soft_wrap=True)


def _cell(row: Any) -> str:
    """A mean with the half width of its interval."""
    if row.mean != row.mean:
        return "not finite"
    return f"{row.mean:.3g} ± {(row.high - row.low) / 2:.1g}"
