"""The ledger: every published statement as an executable check, with a search that tries to make it fail."""

from normscope.results.conventions import FAILS, HOLDS, IN_RANGE
from normscope.theorems.cases import Case, Choice, Range
from normscope.theorems.check import THOROUGH, VERDICTS, Evidence, check, check_all
from normscope.theorems.comparison import MISTAKES, Comparison
from normscope.theorems.ledger import FAMILIES, LEDGER, find_statements, record, tables
from normscope.theorems.statement import Correction, Curves, Statement

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
    "Choice",
    "Comparison",
    "Correction",
    "Curves",
    "Evidence",
    "Range",
    "Statement",
    "check",
    "check_all",
    "find_statements",
    "record",
    "tables",
]
