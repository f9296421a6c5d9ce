"""What the labs say of one model, side by side with theory; and advice on a scheme for a model that is yet to be built."""

from normscope.audit.advise import Advice, advise
from normscope.audit.advise_findings import advice_findings
from normscope.audit.advise_layers import Spectrum
from normscope.audit.advise_setting import AdviceSetting, fitting_width
from normscope.audit.compare import Comparison, Subject, compare

__all__ = [
    "Advice",
    "AdviceSetting",
    "Comparison",
    "Spectrum",
    "Subject",
    "advice_findings",
    "advise",
    "compare",
    "fitting_width",
]
