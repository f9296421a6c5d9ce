"""How many runs the published means of Figure 5 of paper 2 may be of: ``normscope.papers.scatter`` on all panels.

python benchmarks/panel_scatter.py                                    # 20 minutes on two cores; stores what it finds
python benchmarks/panel_scatter.py 5d --runs 1024 --instead beta=1.6  # what another setting would look like
python benchmarks/panel_scatter.py 5e --runs 2048 --upper-edges       # whether fewer runs would move the upper edges alone
"""

import argparse
from pathlib import Path

import pandas as pd

from normscope.experiments.progress import progress_bar
from normscope.papers.scatter import RUNS, STORED, of_panel, stored_scatter, upper_edges_of

FILE = Path(__file__).parent.parent / "src" / "normscope" / "papers" / "measured" / f"{STORED}.csv"


def main() -> None:
    """Print a row for each panel, and store them unless a setting is changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("panels", nargs="*", choices=[*RUNS, []], help=f"of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--runs", type=int, help=f"(default: {RUNS})")
    parser.add_argument("--instead", nargs="*", default=[], metavar="NAME=VALUE", help="settings of normscope ensemble")
    parser.add_argument("--upper-edges", action="store_true", help="how often samples differ as published, there alone")
    options = parser.parse_args()
    if options.upper_edges and options.instead:
        parser.error("--upper-edges compares with the published panel: it takes no --instead")
    if options.upper_edges:
        for name in options.panels or RUNS:
            with progress_bar() as shown:
                table = upper_edges_of(name, options.runs or RUNS[name], shown)
            print(name, table.to_string(index=False), sep="\n")
        return
    instead = {name: float(value) for name, _, value in (item.partition("=") for item in options.instead)}
    with progress_bar() as shown:
        rows = pd.DataFrame([of_panel(name, options.runs or RUNS[name], instead, shown) for name in options.panels or RUNS])
    print(rows.T.to_string())
    if not instead:
        others = stored_scatter()
        rows = pd.concat([others[~others["panel"].isin(rows["panel"])], rows]).sort_values("panel")
        rows.round(5).to_csv(FILE, index=False)


if __name__ == "__main__":
    main()
