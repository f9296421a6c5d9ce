"""The anchors of a page: a name for every section and figure, no two the same, and the figure that a finding refers to."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from normscope.results.figures import Figure
from normscope.results.findings import Finding
from normscope.results.sections import Section


@dataclass(frozen=True)
class Target:
    """A figure on the page."""

    anchor: str
    name: str
    figure: Figure

    @property
    def title(self) -> str:
        """The figure's title."""
        return self.figure.title


@dataclass(frozen=True)
class Outline:
    """The anchors of the page's sections and figures."""

    sections: Sequence[Section]

    def section(self, index: int) -> str:
        """The anchor of the section at that place."""
        return self._anchors[len(self._figures) + index]

    def figures(self, index: int) -> list[Target]:
        """The figures of the section at that place."""
        before = sum(len(section.figures) for section in self.sections[:index])
        return self.targets[before : before + len(self.sections[index].figures)]

    def target(self, finding: Finding) -> Target | None:
        """The figure that a finding names; none if it names none or it is not on the page."""
        return next((target for target in self.targets if target.name == finding.figure), None)

    @cached_property
    def targets(self) -> list[Target]:
        """All figures, in their order."""
        return [Target(anchor, *item) for anchor, item in zip(self._anchors, self._figures, strict=False)]

    @cached_property
    def _figures(self) -> list[tuple[str, Figure]]:
        return [item for section in self.sections for item in section.figures.items()]

    @cached_property
    def _anchors(self) -> list[str]:
        """Those of all figures, which links from elsewhere know by their names, then those of the sections."""
        wanted = [f"figure-{name}" for name, _ in self._figures] + [section.title for section in self.sections]
        anchors = ["contents", "theme", "tip", "head", "figures-data"]
        taken = len(anchors)
        for text in wanted:
            plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"
            anchor, number = plain, 2
            while anchor in anchors:
                anchor, number = f"{plain}-{number}", number + 1
            anchors.append(anchor)
        return anchors[taken:]
