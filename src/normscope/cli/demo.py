"""normscope demo: the main job on a small scale, ending in a report page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from normscope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from normscope.training import Recipe

_TEST_EXAMPLES = 4000
_TEXT_TOKENS = 128
_JOURNEY = "To kill two birds with one stone"
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
    from normscope.training import read_recipe
    from normscope.transformer import BUILTIN

    schemes = list(NAMED.values())
    six = tuple(named_schemes(SIX_SCHEMES))
    simulation = Simulation.prepare(SimulationSetting(six, tokens=64, dim=64, seed=seed))
    ensemble = EnsembleRun(PANELS["5d"], six, runs=64, chunk=16, seed=seed)
    recipes = [read_recipe("tiny", {"scheme": name, "examples": 51_200, "seed": seed}) for name in ("pre", "qkv")]
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
        run.write_table("metrics", _trained(recipes))
        for name, table in _tested(seed).items():
            run.write_table(name, table)
        model, tables = _looked_into(seed)
        for name, table in tables.items():
            run.write_table(name, table)
        write_demo_report(
            run,
            simulation.setting.summary,
            ensemble.summary,
            f"the tiny recipe, stopped early: {recipes[0].summary}",
            f"{', '.join(f'builtin:{name}' for name in BUILTIN)}; {_TEST_EXAMPLES:,} examples a split; seed {seed}",
            f"{model}; seed {seed}",
        )
    report = run_path(out) / "report.html"
    if json:
        print_json([{"report": str(report), "schemes": list(NAMED)}])
    else:
        typer.echo(report)


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


def _looked_into(seed: int) -> "tuple[str, dict[str, pd.DataFrame]]":
    """Stability of SmolLM2 and a journey in it, where its package is installed; else of one of our own; and which it was."""
    import pandas as pd

    from normscope.models import open_model
    from normscope.models.open import PACKAGES, need_gguf, packaged_model
    from normscope.stability import findings, measure_clean, sample_text
    from normscope.words import follow, places

    name = f"package:{next(iter(PACKAGES))}"
    try:
        packaged_model(name.partition(":")[2])
        need_gguf()
        content, size = sample_text(), _TEXT_TOKENS
    except InputError as error:
        say(f"no language model to look into: {error}")
        name, content, size = "builtin:addition-small-pre", None, _TEXT_TOKENS
    say(f"opening {name}")
    view = open_model(name)
    with progress("looking at attention", total=view.layers) as advance:
        tables = measure_clean(view, view.sample(content, size, seed), draws=0, seed=seed, progress=advance)
    tables = {"findings": pd.DataFrame({"text": findings(view, tables)}), **tables}
    if content is not None:
        journey = follow(view, _JOURNEY, -2)
        tables |= {"journey": journey.table, "places": places(view, journey, "sphere", seed)}
    return name, tables


def _tested(seed: int) -> "dict[str, pd.DataFrame]":
    """Accuracy and accuracy by position of the package's own models."""
    import pandas as pd

    from normscope.training import evaluate
    from normscope.training.recipe import task_of
    from normscope.transformer import BUILTIN, load_model

    tables: dict[str, list[pd.DataFrame]] = {"accuracy": [], "positions": []}
    with progress("testing trained models", total=len(BUILTIN)) as advance:
        for done, name in enumerate(BUILTIN, 1):
            saved = load_model(f"builtin:{name}")
            task, offsets = task_of(saved.about["recipe"])
            tested = evaluate(saved.model, task, list(task.splits), _TEST_EXAMPLES, seed=seed, offsets=offsets, worked=0)
            scheme = saved.model.config.scheme.name
            for kind, table in (("accuracy", tested.accuracy), ("positions", tested.positions)):
                tables[kind].append(table.assign(split=scheme + ", " + table["split"]))
            advance(done)
    return {kind: pd.concat(parts, ignore_index=True) for kind, parts in tables.items()}
