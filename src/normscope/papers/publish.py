"""Writes a gallery into the documentation: the page with its pictures, and the verdicts that the package lists.

python -m normscope.papers.publish runs/papers docs/results
"""

import shutil
import sys
from importlib import resources
from pathlib import Path

from normscope.runs import open_run

_PAGE, _PICTURES = "papers.md", "papers"


def publish(gallery: Path, docs: Path, package: Path) -> None:
    """Copy ``report.md`` and its figures to ``docs``, and the last verdicts to ``package``."""
    text = (gallery / "report.md").read_text(encoding="utf-8")
    (docs / _PAGE).write_text(text.replace("(figures/", f"({_PICTURES}/"), encoding="utf-8")
    shutil.rmtree(docs / _PICTURES, ignore_errors=True)
    shutil.copytree(gallery / "figures", docs / _PICTURES)
    entries = open_run(gallery).table("entries")[["entry", "verdict", "date", "request"]]
    entries.to_csv(package / "verdicts.csv", index=False)


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[2]), Path(str(resources.files("normscope.papers"))))
