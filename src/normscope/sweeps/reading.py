"""What measurements of a model share in a sweep: the model, what it reads, and the totals of what comes out."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.errors import InputError
from normscope.models import Model, Sample, open_model
from normscope.models.open import check_model, model_digest
from normscope.runs import RunFolder, plain_rows
from normscope.stability import chosen_sample
from normscope.training.recipe import checked_value

READING: dict[str, Any] = {"model": str, "text": str, "tokens": int, "examples": int}


@dataclass(frozen=True)
class Reading:
    """A model and what it reads."""

    model: str
    device: str
    seed: int
    text: str | None = None
    tokens: int | None = None
    examples: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], device: str) -> "Reading":
        """The reading of a run's fields; a model that is not there is refused."""
        if "model" not in values:
            raise InputError('a run needs a model, such as model = "builtin:addition-small-pre"')
        given = {name: checked_value(name, values[name], kind) for name, kind in READING.items() if name in values}
        check_model(given["model"])
        reading = cls(device=device, seed=checked_value("seed", values.get("seed", 0), int), **given)
        reading.content  # noqa: B018  # refuse a text that cannot be read
        return reading

    @property
    def content(self) -> str | None:
        """The text, if there is one."""
        try:
            return None if self.text is None else Path(self.text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the text '{self.text}': {error}") from error

    @property
    def digests(self) -> dict[str, str | None]:
        """What is behind the names of the model and the text."""
        content = self.content
        read = None if content is None else hashlib.sha256(content.encode()).hexdigest()
        return {"model_digest": model_digest(self.model), "text_digest": read}

    def fits(self, run: RunFolder) -> bool:
        """Whether a run was of the model and the text that are there now, not of others under the same names."""
        kept = run.description["configuration"]
        return all(kept.get(name) == value for name, value in self.digests.items())

    def open(self) -> tuple[Model, Sample]:
        """The model, and what it reads."""
        view = open_model(self.model, self.device)
        return view, chosen_sample(view, self.content, self.tokens, self.examples, self.seed)


def totals(run: RunFolder) -> dict[str, float]:
    """Plain numbers of a whole model: its widest spread, what noise costs, collapse by noise, the share that is sparse."""
    numbers: dict[str, float] = {}
    rows = {name: plain_rows(run.table(name)) for name in ("spread", "noise", "collapse", "sparsity") if name in run.tables}
    layers = [row for row in rows.get("spread", ()) if row["head"] is None]
    if layers:
        numbers["widest_spread"] = max(row["high90"] - row["low90"] for row in layers)
    for row in rows.get("noise", ()):
        if row["layer"] is None and (row["perturbed"], row["where"]) == ("q,k,m", "all"):
            numbers[f"accuracy_at_{row['noise']:g}"] = row["accuracy"]
            numbers[f"loss_at_{row['noise']:g}"] = row["loss"]
    for row in rows.get("collapse", ()):
        if row["layer"] is None and row["definition"] == "loose":
            numbers[f"collapse_at_{row['noise']:g}"] = row["probability"]
    for row in rows.get("sparsity", ()):
        if row["layer"] is None:
            numbers["sparse"] = row["share"]
    return numbers
