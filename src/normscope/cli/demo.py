"""normscope demo: the main job on a small scale, ending in a report page."""

from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.output import (
    SIX_SCHEMES,
    JsonOption,
    OverwriteOption,
    SeedOption,
    examples,
    named_schemes,
    print_json,
    progress,
    say,
)

EXAMPLES = examples("normscope demo", "normscope demo --out /tmp/first-look --overwrite")


def demo(
    out: Annotated[Path, typer.Option(help="The run folder to write.")] = Path("runs/demo"),
    seed: SeedOption = 0,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Compare the schemes, in theory and in motion, and write a report page; prints its path."""
    import pandas as pd

    from normscope.dynamics import PANELS, EnsembleRun, Simulation, SimulationSetting
    from normscope.report.demo import write_demo_report
    from normscope.results import Parts, new_run, run_path
    from normscope.schemes import NAMED, block_records, scheme_record

    schemes = list(NAMED.values())
    six = tuple(named_schemes(SIX_SCHEMES))
    simulation = Simulation.prepare(SimulationSetting(six, tokens=64, dim=64, seed=seed))
    ensemble = EnsembleRun(PANELS["5d"], six, runs=64, chunk=16, seed=seed)
    configuration = {"schemes": list(NAMED), "simulation": simulation.setting.record, "ensemble": ensemble.record}
    with new_run(out, "demo", configuration, seed=seed, overwrite=overwrite) as run:
        say(f"comparing {len(schemes)} schemes")
        run.write_table("schemes", pd.DataFrame([scheme_record(scheme) for scheme in schemes]))
        run.write_table("blocks", pd.DataFrame([record for scheme in schemes for record in block_records(scheme)]))
        with progress("tokens as particles", total=len(six) * len(simulation.setting.grid)) as advance:
            result = simulation.run(advance)
        run.write_table("trajectories", result.trajectories)
        run.write_table("milestones", result.milestones)
        with progress("random weights", total=ensemble.runs) as advance:
            cosines = ensemble.compute(Parts(run.path / "parts"), advance)
        Parts(run.path / "parts").discard()
        run.write_table("cosines", ensemble.table(cosines))
        write_demo_report(run, simulation.setting.summary, ensemble.summary)
    report = run_path(out) / "report.html"
    if json:
        print_json([{"report": str(report), "schemes": list(NAMED)}])
    else:
        typer.echo(report)
