"""Schemes: what a block normalises and where, and everything that follows from it.

The residual update itself, which needs torch, is in ``normscope.schemes.update``.
"""

from normscope.schemes.display import dash
from normscope.schemes.drawing import block_records
from normscope.schemes.expressions import Expression, Product
from normscope.schemes.files import find_scheme, scheme_files, scheme_from, scheme_values
from normscope.schemes.named import NAMED
from normscope.schemes.records import same_feedforward, scheme_record
from normscope.schemes.scheme import NORM_TITLES, At, NormKind, Scheme, Slots

__all__ = [
    "NAMED",
    "NORM_TITLES",
    "At",
    "Expression",
    "NormKind",
    "Product",
    "Scheme",
    "Slots",
    "block_records",
    "dash",
    "find_scheme",
    "same_feedforward",
    "scheme_files",
    "scheme_from",
    "scheme_record",
    "scheme_values",
]
