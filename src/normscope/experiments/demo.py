"""demo: Audit, simulate, train and verify: one report page.

First steps: normscope demo
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from normscope.experiments import completed, kind_of
from normscope.experiments.audit import Audit
from normscope.experiments.ensemble import Ensemble
from normscope.experiments.experiment import Experiment, Shown
from normscope.experiments.on_model import TRUST_HELP, ModelSource
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import SIX_SCHEMES, Seed, setting
from normscope.experiments.simulate import Simulate
from normscope.experiments.train import Train, training_section
from normscope.experiments.verify import Verify
from normscope.results.figures import Blocks
from normscope.results.findings import Finding, cards_text
from normscope.results.sections import PageTable, Section
from normscope.runs import unfinished_folder
from normscope.schemes import Scheme, block_records, find_scheme, scheme_record

_TRAINED = ("pre", "qkv")
_EXAMPLES, _TESTS = 51_200, 512  # of each training
_RUNS = 64  # with random weights
_CLAIMS: tuple[str, ...] = ()  # all


class Demo(Experiment):
    """Audit, simulate, train and verify: one report page.

    Audits a model, compares six schemes, trains two of them briefly, and checks the published claims.
    The demo consists of other experiments: audit, simulate, ensemble, train (twice) and verify. If interrupted, the same
    command resumes after those that are complete.

    Example:
        >>> from normscope.experiments.demo import Demo
        >>> list(Demo(model="builtin:addition-small-pre").members)
        ['audit', 'simulation', 'ensemble', 'pre', 'qkv', 'claims']
    """

    command: ClassVar[str] = "demo"
    title: ClassVar[str] = "What normalization does to a transformer's geometry"
    resumable: ClassVar[bool] = True
    usage: ClassVar[tuple[str, ...]] = (
        "normscope demo",
        "normscope demo builtin:addition-small-pre",
        "normscope demo --out /tmp/first-look --overwrite",
    )

    model: ModelSource | None = copy(Audit.model_fields["model"])
    trust_remote_code: bool = setting(False, TRUST_HELP)
    seed: Seed = setting(0, "Seed of everything random.")

    @cached_property
    def members(self) -> dict[str, Experiment]:
        """The experiments that the demo consists of, by the names that their tables begin with."""
        common: dict[str, Any] = {"seed": self.seed, "device": "cpu"}
        changes = {"examples": _EXAMPLES, "test_examples": _TESTS}
        return {
            "audit": Audit(model=self.model, trust_remote_code=self.trust_remote_code, **common),
            "simulation": Simulate(tokens=64, dim=64, **common),
            "ensemble": Ensemble(panel="5d", runs=_RUNS, chunk=16, **common),
            **{name: Train(preset="tiny", scheme=name, set=changes, **common) for name in _TRAINED},
            "claims": Verify(statements=_CLAIMS, seed=self.seed),
        }

    @property
    def record(self) -> dict[str, Any]:
        """The settings of all members."""
        return {"seed": self.seed, "members": {name: member.record for name, member in self.members.items()}}

    def default_folder(self) -> Path:
        """Always the same, so that a second demo replaces the first."""
        return Path("runs/demo")

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Run the members one after the other; each is saved beside ``folder`` until all are complete."""
        unfinished = None if folder is None else unfinished_folder(folder, self.record)
        results = {
            name: completed(member, None if unfinished is None else unfinished / name, progress)
            for name, member in self.members.items()
        }
        about = {
            name: {
                "command": result.kind.command,
                "configuration": dict(result.configuration),
                "summary": result.summary,
                "seed": result.seed,
                "device": result.device,
            }
            for name, result in results.items()
        }
        return Result(
            type(self),
            {"seed": self.seed, "model": results["audit"].configuration["model"], "members": about},
            {f"{name}.{table}": rows for name, result in results.items() for table, rows in result.tables.items()},
            "A model as it is, the schemes that it might have had, how two of them learn, and what is proved about them: an "
            f"audit of {results['audit'].summary}; six schemes in theory, in simulation and with random weights; two short "
            "trainings; the published claims.",
            self.seed,
            problems=tuple(problem for result in results.values() for problem in result.problems),
            unfinished=unfinished,
        )

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """Where the page is, and what it is about."""
        pages = () if result.path is None else (result.path / "report.html", result.path / "report.md")
        page = next((str(page) for page in pages if page.is_file()), None)
        return [{"report": page, "model": result.configuration["model"], "schemes": SIX_SCHEMES.split(",")}]

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """Those of the audit."""
        audit = members_of(result)["audit"]
        return audit.kind.facts(audit)

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The findings that matter most."""
        yield from cards_text(result.findings)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The sections of all members, with both trainings in one."""
        members = members_of(result)
        yield from _within("audit", members["audit"].sections)
        yield _schemes_section([find_scheme(name) for name in SIX_SCHEMES.split(",")])
        for name in ("simulation", "ensemble"):
            yield from _within(name, members[name].sections)
        metrics = {name: members[name].tables["metrics"] for name in _TRAINED}
        trained = training_section(metrics, f"the tiny recipe, stopped early: {members[_TRAINED[0]].summary}")
        yield from _within("training", [replace(trained, title="Training, scheme by scheme")])
        yield from _within("claims", members["claims"].sections)


def members_of(result: Result) -> dict[str, Result]:
    """The results of a demo's members."""
    return {
        name: Result(
            kind_of(about["command"]),
            about["configuration"],
            {key.removeprefix(f"{name}."): table for key, table in result.tables.items() if key.startswith(f"{name}.")},
            about["summary"],
            about["seed"],
            about["device"],
        )
        for name, about in result.configuration["members"].items()
    }


def _within(member: str, sections: Iterable[Section]) -> Iterator[Section]:
    """Sections whose names and figures do not clash with those of other members."""

    def named(finding: Finding) -> Finding:
        return replace(finding, figure=f"{member}-{finding.figure}" if finding.figure else None)

    for section in sections:
        figures = {f"{member}-{name}": figure for name, figure in section.figures.items()}
        findings = tuple(map(named, section.findings))
        yield replace(section, figures=figures, findings=findings, name=f"{member}-{section.name}")


def _schemes_section(schemes: list[Scheme]) -> Section:
    records = [scheme_record(scheme) for scheme in schemes]
    slots = {name: name for name in ("input", "heads", "output", "step", "carry", "stream")}
    blocks = [row for scheme in schemes for row in block_records(scheme)]
    return Section(
        "The schemes side by side",
        (
            "Every sublayer f updates the residual stream as x ← stream(carry·x + step·output(f(input(x)))), and inside "
            "attention q, k, v ← heads(q, k, v). t is the layer, 0 the first, and T their number.",
            "Write x_j = r_j θ_j. In every scheme the directions obey θ̇_j = (1/s_j) P_θj A_j: the speed factor s_j is the "
            "divisor between attention's update and the rotation that it causes, and the radial rate ṙ_j how fast the residual "
            "norm grows.",
        ),
        (
            _table("Slots of the attention sublayer", records, {"name": "scheme", **slots, "users": "who uses it"}),
            _table(
                "What follows from the slots", records,
                {
                    "name": "scheme", "update": "update", "flow": "flow", "speed": "damping s_j", "radial": "radial ṙ_j",
                    "attention": "A_j taken at",
                },
            ),
        ),
        {
            "blocks": Blocks(
                "Blocks", blocks,
                "Where each scheme normalises: a norm on the trunk fixes the residual norm, a norm at the end of a branch "
                "fixes the size of the update.",
                "Drawn from the slots; attention below, feed-forward layer above.",
            )
        },
        name="schemes",
    )  # fmt: skip


def _table(caption: str, records: list[dict[str, Any]], columns: Mapping[str, str]) -> PageTable:
    rows = tuple(tuple("–" if record[key] in ("none", "") else str(record[key]) for key in columns) for record in records)
    return PageTable(caption, tuple(columns.values()), rows)
