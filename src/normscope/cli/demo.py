"""normscope demo: the main job on a small scale, ending in a report page."""

from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.output import JsonOption, OverwriteOption, examples, print_json, say

EXAMPLES = examples("normscope demo", "normscope demo --out /tmp/first-look --overwrite")


def demo(
    out: Annotated[Path, typer.Option(help="The run folder to write.")] = Path("runs/demo"),
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Compare the schemes and write a report page; prints its path."""
    import pandas as pd

    from normscope.report.demo import write_demo_report
    from normscope.results import new_run, run_path
    from normscope.schemes import NAMED, block_records, scheme_record

    schemes = list(NAMED.values())
    with new_run(out, "demo", {"schemes": list(NAMED)}, overwrite=overwrite) as run:
        say(f"comparing {len(schemes)} schemes")
        run.write_table("schemes", pd.DataFrame([scheme_record(scheme) for scheme in schemes]))
        run.write_table("blocks", pd.DataFrame([record for scheme in schemes for record in block_records(scheme)]))
        write_demo_report(run)
    report = run_path(out) / "report.html"
    if json:
        print_json([{"report": str(report), "schemes": list(NAMED)}])
    else:
        typer.echo(report)
