"""Tables as plain rows."""

from typing import Any

import pandas as pd


def plain_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries, with None for what is missing."""
    plain = table.astype(object)
    return [{str(key): value for key, value in row.items()} for row in plain.where(plain.notna(), None).to_dict("records")]
