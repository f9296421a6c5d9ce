"""Everything that the deprecation policy protects, one line each: names, attributes, settings and options.

``python tests/helpers/public_api.py`` writes ``tests/public_api.txt``, which a release renews.
"""

from pathlib import Path

import typer

import normscope as ns
from normscope.cli.commands import app

FILE = Path(__file__).parent.parent / "public_api.txt"
MEMBERS = {  # those that the docs describe; the others may change
    "Finding": "text figure title severity number comparison advice weight",
    "Model": "attention_layers capture dim embeddings head_dim heads kv_heads layers name offers reconstruction scheme schemes "
    "streams tokenizer unembedding vocabulary",
    "Result": "figures findings model plot records save sections tables to_html to_markdown",
    "Scheme": "attention block check feedforward feedforward_law flow law law_of name norm place update with_norm",
    "Slots": "carry gate heads inner input output scores step stream",
}


def public_api() -> list[str]:
    """All of it, sorted."""
    names = [f"ns.{name}" for name in dir(ns)]
    members = [f"ns.{kind}.{name}" for kind, wanted in MEMBERS.items() for name in wanted.split() if _has(kind, name)]
    group = typer.main.get_command(app())
    given = [
        f"normscope {name} {max(parameter.opts, key=len)}"
        for name, command in getattr(group, "commands", {}).items()
        for parameter in command.params
    ]
    return sorted({*names, *members, *given})


def _has(kind: str, name: str) -> bool:
    """Whether a class has a method, property or field."""
    return any(name in vars(base) or name in getattr(base, "__annotations__", {}) for base in getattr(ns, kind).__mro__)


if __name__ == "__main__":
    FILE.write_text("\n".join(public_api()) + "\n", encoding="utf-8")
