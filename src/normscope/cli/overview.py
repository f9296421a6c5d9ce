"""What ``normscope --help`` prints: all commands by purpose, each with its most used example."""

from normscope.experiments import catalog
from normscope.experiments.headers import Entry, entries

PURPOSES = ("First steps", "Look into a model", "Schemes and theory", "Train", "Many runs")
_FIRST = ("demo", "audit", "explore", "schemes", "advise", "train", "sweep")  # of their purpose
_HEAD = """\
Usage: normscope COMMAND [OPTIONS]

What normalization does to a transformer's geometry: in theory, in simulation,
in training, and in existing models. A scheme is where a block puts its norms,
and how it scales branch and residual.
"""
_TAIL = """\
normscope COMMAND --help  Options of a command, and more examples.
normscope --version       The version.
--debug                   Show the traceback of an error (allowed anywhere).
--install-completion      Set up completion for your shell: Tab completes
                          commands, options, schemes, models and run folders.
--show-completion         Print the completion script instead.
"""


def commands() -> dict[str, Entry]:
    """All commands by name: those of experiments, and those that are none."""
    listed = {**catalog(), **entries("cli")}
    return {**{name: listed[name] for name in _FIRST}, **listed}


def overview() -> str:
    """All commands by purpose, for a terminal of 80 columns."""
    listed = commands()
    width = max(map(len, listed)) + 2
    lines = [_HEAD]
    for purpose in PURPOSES:
        lines.append(f"{purpose}:")
        for name, entry in listed.items():
            if entry.purpose == purpose:
                lines += [f"  {name:<{width}}{entry.summary}", f"  {'':<{width}}{entry.example}"]
        lines.append("")
    return "\n".join([*lines, _TAIL])
