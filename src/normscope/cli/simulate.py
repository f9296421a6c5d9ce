"""normscope simulate: tokens as particles under one or more schemes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    named_schemes,
    numbers,
    print_folder,
    print_json,
    print_table,
    progress,
    say,
    with_report,
)
from normscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from normscope.dynamics.settings import Simulation


EXAMPLES = examples(
    "normscope simulate --tokens 256 --dim 512 --beta 5 --time 20",
    "normscope simulate --scheme peri,./mine.toml --start cone --delta 0.01",
    "normscope simulate --scheme pre,post --layers --time 48 --weights kaiming --gradient",
    "normscope simulate --symmetric --tokens 1000000 --time 1000 --times 1,10,1000",
    "normscope simulate --scheme ngpt --alpha linear --json",
)


def simulate(
    scheme: Annotated[str, typer.Option(help="Schemes with commas: names, or paths of TOML files.")] = SIX_SCHEMES,
    tokens: Annotated[int, typer.Option(help="Number of tokens n.")] = 256,
    dim: Annotated[
        int | None,
        typer.Option(help="Dimension d.", show_default="2·tokens up to 512, or tokens if orthogonal"),
    ] = None,
    beta: Annotated[float, typer.Option(help="Inverse temperature of the scores.")] = 5.0,
    start: Annotated[
        str, typer.Option(help="orthogonal, uniform, gaussian, cone, or a file (.npy, .csv, .safetensors).")
    ] = "orthogonal",
    delta: Annotated[float, typer.Option(help="The cone's width: every pairwise cosine is at least 1 - delta.")] = 0.01,
    radius: Annotated[float, typer.Option(help="Radius of the start (its mean, for gaussian).")] = 1.0,
    time: Annotated[float | None, typer.Option(help="The last time.", show_default="20, or the last of --times")] = None,
    times: Annotated[
        str | None, typer.Option(help="Times to report, with commas.", show_default="five between 0 and --time")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Apply layers, one per unit of time, not the flow.")] = False,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="Solve the two-variable reduction of the orthogonal start.")
    ] = False,
    solver: Annotated[str, typer.Option(help="euler, midpoint, rk4, dopri5 or dopri8.")] = "rk4",
    step: Annotated[float | None, typer.Option(help="Longest step in time.", show_default="0.025; 1 with --layers")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Times at which the curves are taken.")] = 201,
    norm: Annotated[str | None, typer.Option(help="The norm in every slot: rms or layer.", show_default="rms")] = None,
    alpha: Annotated[
        str | None,
        typer.Option(help="Step of nGPT: constant, root, linear, mixed, power, or a formula in t.", show_default="1"),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="identity, kaiming, gaussian, or a .safetensors file with W_Q, W_K, W_V, W_O.")
    ] = "identity",
    heads: Annotated[int, typer.Option(help="Number of heads of random weights.")] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="A token sees only itself and those before it.")] = False,
    feedforward: Annotated[int, typer.Option(help="Width of a random feed-forward layer in every block; 0 for none.")] = 0,
    gradient: Annotated[
        bool, typer.Option("--gradient", help="Also the gradient of the last token by depth (needs --layers).")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="float64, float32, or bfloat16 (products only; the state stays float32).")
    ] = "float64",
    save_states: Annotated[
        bool, typer.Option("--save-states", help="Keep the tokens at the reported times (states.safetensors).")
    ] = False,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Integrate schemes from one start: how tokens cluster, grow and slow down."""
    from normscope.dynamics.settings import Simulation, SimulationSetting
    from normscope.runs import check_writable, fresh_path

    stride = step if step is not None else (1.0 if layers else 0.025)
    last, reported = _times(time, times, stride if layers else None)
    setting = SimulationSetting(
        schemes=tuple(named_schemes(scheme, norm)),
        tokens=tokens,
        dim=dim if dim is not None else _dimension(tokens, start),
        beta=beta,
        start=start,
        delta=delta,
        radius=radius,
        time=last,
        times=tuple(reported),
        samples=samples,
        solver="layers" if layers else solver,
        step=stride,
        symmetric=symmetric,
        alpha=alpha,
        weights=weights,
        heads=heads,
        causal=causal,
        feedforward=feedforward,
        gradient=gradient,
        precision=precision,
        save_states=save_states,
        seed=seed,
        device=chosen_device(device),
    )
    folder = out or fresh_path("runs/simulate")
    check_writable(folder, overwrite=overwrite)
    _run(Simulation.prepare(setting), folder, overwrite, json)


def _run(simulation: "Simulation", folder: Path, overwrite: bool, json: bool) -> None:
    from normscope.report.dynamics import write_simulation_report
    from normscope.runs import new_run, run_path

    setting = simulation.setting
    with new_run(folder, "simulate", setting.record, seed=setting.seed, device=setting.device, overwrite=overwrite) as run:
        with progress("simulating", total=len(setting.schemes) * len(setting.grid)) as advance:
            result = simulation.run(advance)
        run.write_table("trajectories", result.trajectories)
        run.write_table("milestones", result.milestones)
        if result.gradients is not None:
            run.write_table("gradients", result.gradients)
        if result.states:
            from safetensors.torch import save_file

            save_file(result.states, run.path / "states.safetensors")
        if result.stopped:
            run.write_text("stopped.txt", "\n".join(result.stopped) + "\n")
            say("\n".join(f"stopped: {message}; what came before is kept" for message in result.stopped))
        with_report(lambda: write_simulation_report(run, setting.summary))
    reported = result.trajectories[result.trajectories["time"].isin(setting.times)]
    if json:
        print_json(reported.to_dict("records"))
    else:
        _print(reported, result.milestones)
        print_folder(run_path(folder))
    if result.stopped:
        raise typer.Exit(1)


def _print(reported: "pd.DataFrame", milestones: "pd.DataFrame") -> None:
    rows: list[list[Any]] = []
    for row in reported.itertuples(index=False):
        rows.append(
            [
                row.scheme,
                f"{row.time:g}",
                f"{row.cosine:.6f}",
                f"{row.variance:.3e}",
                f"{row.radius:.4g}",
                f"{row.speed:.3e}",
            ]
        )
    print_table(("scheme", "time", "mean cosine", "Var", "mean radius", "mean speed"), rows)
    ends = [[row.scheme, _reached(row.half), _reached(row.ninety)] for row in milestones.itertuples(index=False)]
    print_table(("scheme", "time to half of collapse", "to 90%"), ends)


def _reached(time: Any) -> str:
    return "not reached" if time != time else f"{time:.3f}"


def _dimension(tokens: int, start: str) -> int:
    usual = min(2 * tokens, 512)
    return max(tokens, usual) if start == "orthogonal" else usual


def _times(time: float | None, times: str | None, stride: float | None) -> tuple[float, list[float]]:
    """The last time, and those to report: with layers of a stride, at some of the layers."""
    from normscope.dynamics.trajectory import check_times

    reported = None if times is None else check_times(numbers(times, "--times"))
    last = time if time is not None else (reported[-1] if reported else 20.0)
    check_times([last])
    if last <= 0:
        raise InputError(f"--time is above 0, not {last:g}")
    if reported and reported[-1] > last:
        raise InputError(f"--times goes up to {reported[-1]:g}, past --time {last:g}")
    if reported is None:
        reported = [last * share for share in (0, 0.05, 0.25, 0.5, 1)]
        if stride is not None and stride > 0:
            reported = sorted({*(round(t / stride) * stride for t in reported[:-1]), last})
    return last, reported
