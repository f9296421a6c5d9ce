"""Schemes: what a block normalises and where, and everything that follows from it.

The layer and the flow themselves, which need torch, are in ``normscope.schemes.update``.
"""

from normscope.schemes.drawing import block_parts, block_records, draw_block
from normscope.schemes.expressions import Expression, Product
from normscope.schemes.files import find_scheme, find_schemes, read_scheme, scheme_from, scheme_values
from normscope.schemes.law import Derived, derive, flow_text, update_text
from normscope.schemes.named import NAMED
from normscope.schemes.records import same_feedforward, scheme_record
from normscope.schemes.scheme import NORM_TITLES, At, NormKind, Scheme, Slots

__all__ = [
    "NAMED",
    "NORM_TITLES",
    "At",
    "Derived",
    "Expression",
    "NormKind",
    "Product",
    "Scheme",
    "Slots",
    "block_parts",
    "block_records",
    "derive",
    "draw_block",
    "find_scheme",
    "find_schemes",
    "flow_text",
    "read_scheme",
    "same_feedforward",
    "scheme_from",
    "scheme_record",
    "scheme_values",
    "update_text",
]
