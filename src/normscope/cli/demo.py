"""normscope demo: the main job in one page: an audit, the schemes compared, a tiny training and the ledger."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.output import (
    SIX_SCHEMES,
    FormatOption,
    JsonOption,
    OverwriteOption,
    SeedOption,
    chosen_names,
    console,
    examples,
    named_schemes,
    print_json,
    progress,
)

if TYPE_CHECKING:
    import pandas as pd

    from normscope.runs import RunFolder
    from normscope.training import Recipe

EXAMPLES = examples(
    "normscope demo", "normscope demo builtin:addition-small-pre", "normscope demo --out /tmp/first-look --overwrite"
)
_EXAMPLES = 51_200  # of each training
_RUNS = 64  # with random weights


def demo(
    model: Annotated[str | None, typer.Argument(help="A model, as for audit.")] = None,
    out: Annotated[Path, typer.Option(help="The run folder to write.")] = Path("runs/demo"),
    seed: SeedOption = 0,
    overwrite: OverwriteOption = False,
    format: FormatOption = "html",
    json: JsonOption = False,
) -> None:
    """Audit a model, compare six schemes, train two of them a little, check the ledger: one report page."""
    from normscope.experiments.audit import Audit
    from normscope.report import FORMATS
    from normscope.report.demo import write_demo_report
    from normscope.runs import check_writable, new_run, run_path
    from normscope.theorems import LEDGER
    from normscope.training import read_recipe

    formats = chosen_names(format, FORMATS, "format")
    check_writable(out, overwrite=overwrite)
    audit = Audit(model=model, seed=seed, device="cpu")
    subject = audit.subject()
    name = subject.model.name
    recipes = [read_recipe("tiny", {"scheme": scheme, "examples": _EXAMPLES, "seed": seed}) for scheme in ("pre", "qkv")]
    about = subject.about
    configuration = {"audit": about, "schemes": SIX_SCHEMES, "training": [recipe.record for recipe in recipes]}
    with new_run(out, "demo", configuration, seed=seed, overwrite=overwrite) as run:
        _write(run.part("audit"), audit.measure(subject).tables)
        settings = _compared(run.part("schemes"), seed)
        _write(run.part("training"), {"metrics": _trained(recipes)})
        _write(run.part("ledger"), _checked(seed))
        settings |= {
            "audit": f"{name}; {about['tokens']:,} tokens; seed {seed}",
            "training": f"the tiny recipe, stopped early: {recipes[0].summary}",
            "ledger": f"{len(LEDGER)} statements; quick; seed {seed}",
        }
        with console(stderr=True).status("drawing"):
            write_demo_report(run, settings, formats)
    report = run_path(out) / f"report.{formats[0]}"
    if json:
        print_json([{"report": str(report), "model": name, "schemes": SIX_SCHEMES.split(",")}])
    else:
        typer.echo(report)


def _write(part: "RunFolder", tables: "dict[str, pd.DataFrame]") -> None:
    for name, table in tables.items():
        part.write_table(name, table)


def _compared(part: "RunFolder", seed: int) -> dict[str, str]:
    """Six schemes in theory, as particles, and with random weights; returns with which settings."""
    import pandas as pd

    from normscope.dynamics import PANELS, EnsembleRun, Simulation, SimulationSetting
    from normscope.runs import Parts
    from normscope.schemes import block_records, scheme_record

    six = tuple(named_schemes(SIX_SCHEMES))
    simulation = Simulation.prepare(SimulationSetting(six, tokens=64, dim=64, seed=seed))
    ensemble = EnsembleRun(PANELS["5d"], six, runs=_RUNS, chunk=16, seed=seed)
    with progress("tokens as particles", total=len(six) * len(simulation.setting.grid)) as advance:
        result = simulation.run(advance)
    with progress("random weights", total=ensemble.runs) as advance:
        cosines = ensemble.compute(Parts(part.path / "parts"), advance)
    Parts(part.path / "parts").discard()
    _write(
        part,
        {
            "schemes": pd.DataFrame([scheme_record(scheme) for scheme in six]),
            "blocks": pd.DataFrame([record for scheme in six for record in block_records(scheme)]),
            "trajectories": result.trajectories,
            "milestones": result.milestones,
            "cosines": ensemble.table(cosines),
        },
    )
    return {"simulation": simulation.setting.summary, "ensemble": ensemble.summary}


def _trained(recipes: "list[Recipe]") -> "pd.DataFrame":
    """The metrics of some short trainings."""
    import pandas as pd

    from normscope.training import Training

    tables, before = [], 0
    with progress("learning to add", total=sum(recipe.steps for recipe in recipes)) as advance:
        for recipe in recipes:
            training = Training(recipe)
            for row in training.run():
                advance(before + row.step)
            tables.append(training.table.assign(scheme=recipe.scheme))
            before += recipe.steps
    return pd.concat(tables, ignore_index=True)


def _checked(seed: int) -> "dict[str, pd.DataFrame]":
    """The ledger, quickly."""
    from normscope.theorems import check_all, find_statements, tables

    statements = find_statements([])
    with progress("checking statements", total=len(statements)) as advance:
        return tables(check_all(statements, seed, 1, advance))
