"""What the labs say of one model, side by side with theory."""

from normscope.audit.compare import Comparison, Subject, compare
from normscope.audit.findings import Finding
from normscope.audit.motion import effective_speed, measure_motion, token_rank
from normscope.audit.parts import Audit, Question, audit
from normscope.audit.replay import replay_table, replayed_speeds, replayed_turns

__all__ = [
    "Audit",
    "Comparison",
    "Finding",
    "Question",
    "Subject",
    "audit",
    "compare",
    "effective_speed",
    "measure_motion",
    "replay_table",
    "replayed_speeds",
    "replayed_turns",
    "token_rank",
]
