"""What the labs say of one model, side by side with theory; and advice on a scheme for a model that is yet to be built."""

from normscope.audit.advise import Advice, advise
from normscope.audit.advise_findings import advice_findings
from normscope.audit.advise_layers import Spectrum
from normscope.audit.advise_setting import AdviceSetting, fitting_width
from normscope.audit.compare import Comparison, Subject, compare
from normscope.audit.findings import Finding
from normscope.audit.motion import effective_speed, measure_motion, token_rank
from normscope.audit.parts import Audit, Question, audit
from normscope.audit.replay import replay_table, replayed_speeds, replayed_turns

__all__ = [
    "Advice",
    "AdviceSetting",
    "Audit",
    "Comparison",
    "Finding",
    "Question",
    "Spectrum",
    "Subject",
    "advice_findings",
    "advise",
    "audit",
    "compare",
    "effective_speed",
    "fitting_width",
    "measure_motion",
    "replay_table",
    "replayed_speeds",
    "replayed_turns",
    "token_rank",
]
