"""Notebooks as pages: their cells and saved outputs as Markdown; nothing is executed."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$([^\s$][^$\n]*)\$(?!\w)", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures of its outputs by the names under which the page shows them."""
    pictures: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = _joined(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(_FORMULA.sub(_math, text))
        elif cell["cell_type"] == "code" and text:
            parts.append(f"```python\n{text}\n```")
            for output in cell["outputs"]:
                parts.append(_output(output, pictures, path.stem))
    title, _, rest = "\n\n".join(filter(None, parts)).partition("\n")
    return f"{title}\n\n[Download this notebook]({path.name}){{ .notebook }}\n{rest}\n", pictures


def _output(output: dict[str, Any], pictures: dict[str, bytes], stem: str) -> str:
    if output["output_type"] == "stream":
        return "" if output["name"] == "stderr" else _text(_joined(output["text"]))
    if output["output_type"] == "error":
        return _text(_joined("\n".join(output["traceback"])))
    data = output["data"]
    if "image/png" in data:
        name = f"{stem}-{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode(_joined(data["image/png"]))
        return f"![Output of the cell above]({name})"
    if "image/svg+xml" in data:
        return _html(_joined(data["image/svg+xml"]))
    if "text/html" in data:
        return _html(_joined(data["text/html"]))
    return _text(_joined(data.get("text/plain", "")))


def _math(found: re.Match[str]) -> str:
    """A formula as MathML, which browsers draw by themselves."""
    block, line = found.groups()
    return convert(block, display="block") if block else convert(line)


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _text(text: str) -> str:
    return f"```text\n{_ESCAPES.sub('', text).rstrip()}\n```" if text.strip() else ""


def _html(text: str) -> str:
    """A block of HTML without empty lines, at which Markdown would end it."""
    dense = re.sub(r"\n\s*\n", "\n", text.strip())
    return f'<div class="output">{dense}</div>'
