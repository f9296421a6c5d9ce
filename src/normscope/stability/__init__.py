"""What norm noise does to circuits: spread, noise sensitivity, circuit collapse, sparsity."""

from normscope.measures.sample import SAMPLE_TOKENS, chosen_sample, sample_text
from normscope.stability.clean import CLEAN_MEASURES, measure_clean
from normscope.stability.collapse import NOISES, collapse_margin, collapse_probability, sampled_collapse
from normscope.stability.findings import findings
from normscope.stability.noise import measure_noise, norm_noise
from normscope.stability.propagation import first_order_change
from normscope.stability.setting import MEASURES, StabilitySetting, measure_stability
from normscope.stability.spread import weighted_quantiles

__all__ = [
    "CLEAN_MEASURES",
    "MEASURES",
    "NOISES",
    "SAMPLE_TOKENS",
    "StabilitySetting",
    "chosen_sample",
    "collapse_margin",
    "collapse_probability",
    "findings",
    "first_order_change",
    "measure_clean",
    "measure_noise",
    "measure_stability",
    "norm_noise",
    "sample_text",
    "sampled_collapse",
    "weighted_quantiles",
]
