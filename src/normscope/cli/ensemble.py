"""normscope ensemble: random-weight ensembles, all schemes on the same starts and weights."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.output import (
    SIX_SCHEMES,
    DeviceOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    SeedOption,
    chosen_device,
    examples,
    print_folder,
    print_json,
    print_table,
    progress,
    say,
    with_report,
)

if TYPE_CHECKING:
    import pandas as pd

    from normscope.dynamics.ensemble_run import EnsembleRun

EXAMPLES = examples(
    "normscope ensemble --panel 5a --runs 1000",
    "normscope ensemble --panel 5d --runs 200 --scheme pre,peri+qk,./mine.toml",
    "normscope ensemble --dim 256 --heads 4 --beta 8 --weights gaussian --scale 0.05 --time 30",
    "normscope ensemble --panel 5a --runs 100000 --out runs/5a     (interrupted? the same command goes on)",
)


def ensemble(
    panel: Annotated[
        str | None,
        typer.Option(help="A published panel, 4 or 5a to 5g; the options below then change it.", show_default=False),
    ] = None,
    runs: Annotated[int, typer.Option(help="Number of independent runs.")] = 100,
    scheme: Annotated[str, typer.Option(help="Schemes with commas: names, or paths of TOML files.")] = SIX_SCHEMES,
    tokens: Annotated[int | None, typer.Option(help="Number of tokens n.", show_default="128")] = None,
    dim: Annotated[int | None, typer.Option(help="Dimension d.", show_default="512")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads, each of width d/heads.", show_default="1")] = None,
    beta: Annotated[
        float | None, typer.Option(help="Factor on the scores.", show_default="the panel's, else √(d/heads)")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="kaiming or gaussian.", show_default="kaiming")] = None,
    gain: Annotated[float | None, typer.Option(help="Gain of Kaiming W_Q, W_K, W_V.", show_default="√2")] = None,
    output_gain: Annotated[float | None, typer.Option(help="Gain of Kaiming W_O.", show_default="1")] = None,
    scale: Annotated[float | None, typer.Option(help="Standard deviation of gaussian weights.", show_default="0.02")] = None,
    redraw: Annotated[
        float | None, typer.Option(help="Draw new weights after this much time; 0 keeps them.", show_default="0")
    ] = None,
    time: Annotated[float | None, typer.Option(help="The last time.", show_default="10")] = None,
    step: Annotated[float | None, typer.Option(help="Longest step in time.", show_default="0.1")] = None,
    solver: Annotated[str | None, typer.Option(help="euler or midpoint.", show_default="midpoint")] = None,
    samples: Annotated[int | None, typer.Option(help="Times at which the mean cosine is taken.", show_default="101")] = None,
    norm: Annotated[str | None, typer.Option(help="The norm in every slot: rms or layer.", show_default="rms")] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Runs computed together and kept together.", show_default="16; 256 on a GPU")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32 or bfloat16 products.", show_default="float32; bfloat16 on a GPU")
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Mean cosine over time with a 90% band over random starts and weights.

    All schemes see the same starts and weights, so differences between them are not noise. An interrupted ensemble goes on
    from its last chunk when the same command is given again, and ends with the same numbers.
    """
    from normscope.dynamics.ensemble_run import ensemble_from
    from normscope.runs import resumable_path

    given = {
        "tokens": tokens, "dim": dim, "heads": heads, "beta": beta, "weights": weights, "gain": gain,
        "output_gain": output_gain, "scale": scale, "redraw": redraw, "time": time, "step": step, "solver": solver,
        "samples": samples,
    }  # fmt: skip
    where = chosen_device(device)
    fields = {**given, "panel": panel, "scheme": scheme, "norm": norm, "runs": runs, "chunk": chunk, "precision": precision}
    job = ensemble_from({**{name: value for name, value in fields.items() if value is not None}, "seed": seed}, where)
    _run(job, out or resumable_path(f"runs/ensemble-{panel}" if panel else "runs/ensemble", job.record), overwrite, json)


def _run(job: "EnsembleRun", folder: Path, overwrite: bool, json: bool) -> None:
    from normscope.report.dynamics import write_ensemble_report
    from normscope.runs import Parts, check_writable, new_run, run_path

    check_writable(folder, overwrite=overwrite)
    parts = Parts.of(folder, job.record)
    if parts.folder.exists():
        say("going on from the chunks that are finished")
    started = datetime.now(UTC)
    try:
        with progress("running", total=job.runs) as advance:
            cosines = job.compute(parts, advance)
    except KeyboardInterrupt:
        say(f"interrupted; the same command with --out {folder} goes on from the last finished chunk")
        raise
    table, broken = job.table(cosines), job.not_finite(cosines)
    if broken:
        say("\n".join(f"stopped: {line}; means and bands are over the other runs" for line in broken))
    with new_run(folder, "ensemble", job.record, seed=job.seed, device=job.device, overwrite=overwrite, started=started) as run:
        run.write_table("cosines", table)
        with_report(lambda: write_ensemble_report(run, job.summary))
    parts.discard()
    if json:
        print_json(table.to_dict("records"))
    else:
        _print(job, table)
        print_folder(run_path(folder))
    if broken:
        raise typer.Exit(1)


def _print(job: "EnsembleRun", table: "pd.DataFrame") -> None:
    shown = table[table["time"].isin([job.setting.times[round(i * (job.setting.samples - 1) / 5)] for i in range(1, 6)])]
    rows = [
        [row.scheme, f"{row.time:g}", f"{row.mean:.4f}", f"{row.low:.4f}", f"{row.high:.4f}", f"{row.stderr:.1e}"]
        for row in shown.itertuples(index=False)
    ]
    print_table(("scheme", "time", "mean cosine", "5%", "95%", "standard error"), rows, title=f"up to t = {job.setting.time:g}")
