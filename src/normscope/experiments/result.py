"""A result: tables, findings and figures of an experiment; saved, loaded and rendered in one way for all of them."""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from normscope.errors import InputError, did_you_mean
from normscope.machine.files import full_disk_explained, read_text
from normscope.results.figures import Figure
from normscope.results.findings import Finding, Findings
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.runs import grown_run, has_segments, new_run, open_run, run_path

if TYPE_CHECKING:
    from normscope.experiments.experiment import Experiment
    from normscope.models import Model
    from normscope.report.write import Report


PROBLEMS = "stopped.txt"


@dataclass(frozen=True, repr=False)
class Result:
    """What an experiment returns: tables, findings and figures.

    Example:
        >>> import normscope as ns
        >>> run = ns.simulate("pre", tokens=8, dim=8, time=1, progress=False)
        >>> list(run.tables), list(run.figures)
        (['trajectories', 'milestones'], ['cosine', 'speed', 'rate', 'phase', 'radius'])
        >>> run.plot("cosine").name
        'cosine'

    Attributes:
        kind: the experiment's class.
        configuration: its settings and what they resolved to, as plain values.
        tables: tidy tables by name.
        summary: the settings in one line.
        seed, device: of the run.
        problems: why the result is not whole (a scheme that became non-finite); the command then exits with status 1.
        files: what else the run folder holds: file name → function that writes it to a path.
        objects: live objects, such as the trained model.
        unfinished: where the work was saved so far; removed once the run folder is complete.
        path: the run folder, once saved or loaded.
        started: when the work began.
        older: whether it was loaded from a folder of an earlier version, whose tables may lack what the report needs.
    """

    kind: "type[Experiment]"
    configuration: Mapping[str, Any]
    tables: dict[str, pd.DataFrame]
    summary: str = ""
    seed: int | None = None
    device: str = "cpu"
    problems: tuple[str, ...] = ()
    files: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    unfinished: Path | None = None
    path: Path | None = None
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    older: bool = False

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Text, findings, tables and figures that belong together."""
        try:
            return tuple(self.kind.sections(self))
        except (KeyError, AttributeError, TypeError, ValueError) as missing:
            if not self.older or isinstance(missing, InputError):
                raise
            raise InputError(
                f"'{self.path}' was saved by an earlier version of normscope, without {missing}: its tables can be read, its "
                f"figures and report cannot be made; run {self.kind.command} again"
            ) from missing

    @cached_property
    def findings(self) -> Findings:
        """What the tables come to, the most important first within each section."""
        if "findings" in self.tables:
            return Findings(Finding.of(row) for row in plain_rows(self.tables["findings"]))
        return Findings(finding for section in self.sections for finding in section.findings)

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """All figures by name; no two have the same."""
        named = [(name, figure) for section in self.sections for name, figure in section.figures.items()]
        assert len(dict(named)) == len(named), f"figures of one name: {sorted(name for name, _ in named)}"
        return dict(named)

    @property
    def model(self) -> "Model":
        """The model that the experiment made."""
        from normscope.models import open_model

        if "model" in self.objects:
            return open_model(self.objects["model"], self.device)
        if self.path is None:
            raise InputError(f"a result of {self.kind.command} has no model")
        return open_model(str(self.path), self.device)

    def __getitem__(self, name: str) -> Section:
        """One section by its name."""
        named = {section.name: section for section in self.sections}
        if name not in named:
            raise InputError(f"no section '{name}'; there are: {', '.join(named)}{did_you_mean(name, named)}")
        return named[name]

    def plot(self, name: str) -> "Plot":
        """A figure by its name, shown in a notebook or saved with ``.save(path)``."""
        if name not in self.figures:
            raise InputError(f"no figure '{name}'; there are: {', '.join(self.figures)}{did_you_mean(name, self.figures)}")
        return Plot(self.figures[name], name)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The result as ``--json`` prints it."""
        return self.kind.records(self)

    @property
    def report(self) -> "Report":
        """What the page shows."""
        from normscope.report.write import Report

        return Report(self.kind.title, self.summary, self.sections, self.kind.facts(self), self.findings)

    def to_html(self, follow: Mapping[str, Any] | None = None) -> str:
        """The report: one self-contained page; ``follow`` says how it gets news while its run grows."""
        from normscope.report.page import render_page

        report = self.report
        texts: dict[str, Any] = {"facts": report.facts, "findings": report.findings}
        return render_page(report.title, report.lead, report.sections, **texts, follow=follow)

    def to_markdown(self) -> str:
        """The report as Markdown."""
        from normscope.report.markdown import render_markdown

        report = self.report
        return render_markdown(report.title, report.lead, report.sections, facts=report.facts, findings=report.findings)

    def save(self, path: Path | str, *, formats: Sequence[str] = ("html",), overwrite: bool = False) -> "Result":
        """Write the run folder: complete or absent. ``formats``: html, md, png, csv; without any there is no page.

        In the folder of a watched run, which grows with the training, only the report is written.
        """
        if self.path is not None and has_segments(self.path) and run_path(self.path) == run_path(path):
            self._write_report(self.path, formats)
            return self
        about: dict[str, Any] = {
            "command": self.kind.command, "configuration": self.configuration, "seed": self.seed, "device": self.device,
            "started": self.started, "summary": self.summary,
        }  # fmt: skip
        saving = (
            grown_run(path, **about)
            if self.kind.grows
            else new_run(path, **about, overwrite=overwrite, unfinished=self.unfinished)
        )
        with full_disk_explained(path), saving as run:
            for name, table in self.tables.items():
                run.write_table(name, table)
            for name, write in self.files.items():
                write(run.path / name)
            if self.problems:
                run.write_text(PROBLEMS, "\n".join(self.problems) + "\n")
            self._write_report(run.path, formats)
        if self.kind.grows and not self.problems:
            (run_path(path) / PROBLEMS).unlink(missing_ok=True)  # of an earlier command in the same folder
        object.__setattr__(self, "path", run_path(path))
        return self

    def _write_report(self, folder: Path, formats: Sequence[str]) -> None:
        if formats:
            from normscope.report.write import write_report

            write_report(folder, self.report, (formats,) if isinstance(formats, str) else formats)

    def _repr_html_(self) -> str:
        from normscope.report.notebook import render_summary

        return render_summary(self.kind.title, self.summary, self.findings, list(self.tables), list(self.figures))

    def __repr__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.kind.title}: {self.summary}"
        yield from (f"- {finding.text}" for finding in self.findings)
        yield f"tables: {', '.join(self.tables)}"
        yield f"figures: {', '.join(self.figures)}"


@dataclass(frozen=True, repr=False)
class Plot:
    """A figure that a notebook shows and that can be saved as PNG, SVG, HTML or CSV."""

    figure: Figure
    name: str

    def save(self, path: Path | str) -> Path:
        """Write the figure; the ending of the path says in which form."""
        from normscope.report.files import save_figure

        return save_figure(self.figure, Path(path))

    @property
    def chart(self) -> Any:
        """The Altair chart, to be changed further; None for diagrams and scenes, which are no charts."""
        from normscope.report.charts import chart_of

        return chart_of(self.figure)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        """A PNG, which every viewer of notebooks shows, and how wide; and the title as text."""
        from normscope.report.notebook import render_picture

        picture, width = render_picture(self.figure)
        return {"image/png": b64encode(picture).decode(), "text/plain": repr(self)}, {"image/png": {"width": width}}

    def __repr__(self) -> str:
        return f"<figure {self.name}: {self.figure.title}>"


def load(path: Path | str) -> Result:
    """A saved result: the same tables, findings and figures.

    Example:
        >>> import normscope as ns
        >>> run = ns.simulate("pre", tokens=8, dim=8, time=1, out="runs/mine", progress=False)
        >>> ns.load("runs/mine").summary == run.summary
        True
    """
    from normscope.experiments import kind_of

    run = open_run(path)
    about, problems = run.description, run.path / PROBLEMS
    return Result(
        kind=kind_of(about["command"]),
        configuration=about["configuration"],
        tables=run.all_tables(),
        summary=about.get("summary", ""),
        seed=about["seed"],
        device=about["device"],
        problems=tuple(read_text(problems, "text").splitlines()) if problems.exists() else (),
        path=run.path,
        older="digest" not in about,
    )


__all__ = ["PageTable", "Plot", "Result", "load"]
