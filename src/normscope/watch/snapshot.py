"""What one probe of a training showed: tables of one step."""

from dataclasses import dataclass

import pandas as pd

TABLES = ("steps", "layers", "sublayers", "heads", "norms", "scales", "faults", "alarms")


@dataclass(frozen=True)
class Snapshot:
    """The tables of one probe; each begins with the column ``step``.

    Attributes:
        step: the step of the training after which the model was probed.
        tables: ``steps``, ``layers``, ``sublayers``, ``heads``, ``norms``, ``scales``, ``faults``, ``alarms``; empty ones are
            left out.
    """

    step: int
    tables: dict[str, pd.DataFrame]
