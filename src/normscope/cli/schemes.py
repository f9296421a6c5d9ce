"""schemes: Show all schemes (norm placements), or some of them in full.

Schemes and theory: normscope schemes peri
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.output import JsonOption, console, examples, print_json, print_table, say
from normscope.cli.values import completing

if TYPE_CHECKING:
    from normscope.schemes import Scheme

EXAMPLES = examples(
    "normscope schemes",
    "normscope schemes peri",
    "normscope schemes peri+qk res-post+qk",
    "normscope schemes ./mine.toml --norm layer --draw mine.png",
    "normscope schemes --json",
)
_WIDE = 160
_LEGEND = (
    "x ← stream(carry·x + step·output(f(input(x)))), and inside attention q, k, v ← heads(q, k, v) and "
    "f = (gate ⊙ inner(scores(q·k) v)) W_O: carry is the residual scale, step the branch scale; t is the layer, 0 the first, "
    "T their number. Token j has the norm r_j, the direction θ_j = x_j/r_j, and A_j is what attention computes for it; "
    "θ̇_j = (1/s_j) P_θj A_j, so a large s_j slows it down. m_j is the share of attention that a sink takes, M_j what a head "
    "mixes. A_j = A_j(Θ), except:"
)


def schemes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Schemes to show in full: a name, a name with further slots (peri+qk, pre+sink), or the path of a TOML file. "
            "Without any: the table of all.",
            show_default=False,
            autocompletion=completing("schemes"),
        ),
    ] = None,
    norm: Annotated[
        str | None,
        typer.Option(
            help="The norm in every slot: rms, layer, tanh or erf.",
            show_default="rms",
            autocompletion=completing(("rms", "layer", "tanh", "erf")),
        ),
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(help="Also draw the blocks to this file (.png, .svg or .pdf).", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show all schemes (norm placements), or some of them in full.

    A scheme consists of slots: the norms of a block, and how it scales branch and residual. Update and theory follow from them.
    """
    from normscope.schemes import NAMED, find_scheme, scheme_record

    chosen = [find_scheme(name) for name in names] if names else list(NAMED.values())
    if norm is not None:
        chosen = [scheme.with_norm(norm) for scheme in chosen]
    if draw is not None:
        _draw(chosen, draw)
    if json:
        print_json(scheme_record(scheme) for scheme in chosen)
    elif names:
        console().print("\n\n".join(str(scheme) for scheme in chosen), soft_wrap=True)
    else:
        _print_all(chosen)


def _print_all(chosen: "list[Scheme]") -> None:
    from normscope.schemes import dash, same_feedforward, scheme_record

    rows: list[list[str]] = []
    remarks: list[str] = []
    for scheme in chosen:
        for stage in scheme.stages:
            law = stage.law_of(stage.attention)
            cells = [dash(text) for text in stage.attention.texts.values()]
            label = scheme.name if stage is scheme else "  then"
            when = f"  (t < {stage.end_text})" if stage.then else ""
            users = scheme.users if stage is scheme else ""
            rows.append([label, *cells, str(law.speed), str(law.radial), users + when])
        record = scheme_record(scheme)
        if record["attention"] != "A_j(Θ)":
            remarks.append(f"{scheme.name}: A_j is {record['attention']}")
        if not same_feedforward(scheme):
            remarks.append(f"{scheme.name}: feed-forward {record['feedforward']['update']}")
        if record["statement"]:
            remarks.append(f"{scheme.name}: {record['statement']}")
    columns = ("scheme", *chosen[0].attention.texts, "damping s_j", "radial ṙ_j", "who uses it")
    if console().width >= _WIDE:
        print_table(columns, rows)
    else:
        print_table(columns[:7], [row[:7] for row in rows])
        print_table((columns[0], *columns[7:]), [[row[0], *row[7:]] for row in rows])
    console().print(_LEGEND + "\n" + "; ".join(remarks), style="dim")


def _draw(chosen: "list[Scheme]", path: Path) -> None:
    from normscope.report import save_figure
    from normscope.results import Blocks
    from normscope.schemes import block_records

    save_figure(Blocks("Blocks", [record for scheme in chosen for record in block_records(scheme)], ""), path)
    say(f"drew {path}")
