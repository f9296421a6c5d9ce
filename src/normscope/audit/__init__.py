"""What the labs say of one model, side by side with theory."""

from normscope.audit.compare import Comparison, Subject, compare

__all__ = [
    "Comparison",
    "Subject",
    "compare",
]
