"""The ledger: every published statement as an executable check, with a search that tries to make it fail."""

from normscope.results.conventions import FAILS, HOLDS, IN_RANGE
from normscope.theorems.cases import Case
from normscope.theorems.check import THOROUGH, VERDICTS, check, check_all
from normscope.theorems.comparison import MISTAKES, Comparison
from normscope.theorems.ledger import FAMILIES, LEDGER, find_statements, tables
from normscope.theorems.statement import Statement

__all__ = [
    "FAILS",
    "FAMILIES",
    "HOLDS",
    "IN_RANGE",
    "LEDGER",
    "MISTAKES",
    "THOROUGH",
    "VERDICTS",
    "Case",
    "Comparison",
    "Statement",
    "check",
    "check_all",
    "find_statements",
    "tables",
]
