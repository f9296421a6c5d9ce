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

_TEST_EXAMPLES = 4000
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
    from normscope.training import Training, evaluate, read_recipe
    from normscope.training.recipe import task_of
    from normscope.transformer import BUILTIN, load_model

    schemes = list(NAMED.values())
    six = tuple(named_schemes(SIX_SCHEMES))
    simulation = Simulation.prepare(SimulationSetting(six, tokens=64, dim=64, seed=seed))
    ensemble = EnsembleRun(PANELS["5d"], six, runs=64, chunk=16, seed=seed)
    recipes = [read_recipe("tiny", {"scheme": name, "examples": 51_200, "seed": seed}) for name in ("pre", "qkv")]
    models = {name.rpartition("-")[2]: load_model(f"builtin:{name}") for name in BUILTIN}
    configuration = {
        "schemes": list(NAMED),
        "simulation": simulation.setting.record,
        "ensemble": ensemble.record,
        "training": [recipe.record for recipe in recipes],
        "models": list(BUILTIN),
    }
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
        with progress("learning to add", total=sum(recipe.steps for recipe in recipes)) as advance:
            metrics, before = [], 0
            for recipe in recipes:
                training = Training(recipe)
                for row in training.run():
                    advance(before + row.step)
                metrics.append(training.table.assign(scheme=recipe.scheme))
                before += recipe.steps
        run.write_table("metrics", pd.concat(metrics, ignore_index=True))
        with progress("testing trained models", total=len(models)) as advance:
            tables = []
            for done, (name, saved) in enumerate(models.items(), 1):
                task = task_of(saved.about["recipe"])
                tested = evaluate(saved.model, task, list(task.splits), _TEST_EXAMPLES, seed=seed, worked=0)
                both = (tested.accuracy, tested.positions)
                tables.append([table.assign(split=name + ", " + table["split"]) for table in both])
                advance(done)
        for name, parts in zip(("accuracy", "positions"), zip(*tables, strict=True), strict=True):
            run.write_table(name, pd.concat(parts, ignore_index=True))
        write_demo_report(
            run,
            simulation.setting.summary,
            ensemble.summary,
            f"the tiny recipe, stopped early: {recipes[0].summary}",
            f"{', '.join(f'builtin:{name}' for name in BUILTIN)}; {_TEST_EXAMPLES:,} examples a split; seed {seed}",
        )
    report = run_path(out) / "report.html"
    if json:
        print_json([{"report": str(report), "schemes": list(NAMED)}])
    else:
        typer.echo(report)
