"""Writes a gallery into the documentation: its page with pictures and commands, and the verdicts that the package lists.

python -m normscope.papers.publish runs/papers docs/results
"""

import re
import shutil
import sys
from importlib import resources
from pathlib import Path

from PIL import Image

from normscope.report.write import FOOTER
from normscope.runs import open_run

_PAGE, _PICTURES, _COLOURS = "papers.md", "papers", 128
_TABLES = f"---\n\n{FOOTER}\n"


def publish(gallery: Path, docs: Path, package: Path) -> None:
    """Copy ``report.md`` and its figures to ``docs``, and the last verdicts to ``package``."""
    text = (gallery / "report.md").read_text(encoding="utf-8").replace("(figures/", f"({_PICTURES}/")
    text = re.sub(
        rf"^!\[.*\({_PICTURES}/(\w+?)-([\w-]+)\.png\)$",
        r"\g<0>\n\nMade by `normscope reproduce \1:\2`",
        text,
        flags=re.MULTILINE,
    )
    text = text.removesuffix(_TABLES).rstrip() + "\n"  # which stay in the gallery
    (docs / _PAGE).write_text(text, encoding="utf-8")
    shutil.rmtree(docs / _PICTURES, ignore_errors=True)
    (docs / _PICTURES).mkdir()
    for file in (gallery / "figures").glob("*.png"):  # a palette makes them a third as large
        Image.open(file).convert("RGB").quantize(_COLOURS).save(docs / _PICTURES / file.name, optimize=True)
    entries = open_run(gallery).table("entries")[["entry", "verdict", "date", "request"]]
    entries.to_csv(package / "verdicts.csv", index=False)


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[2]), Path(str(resources.files("normscope.papers"))))
