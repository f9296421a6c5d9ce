"""Tokens as particles: flows, layers, ensembles, the symmetric reduction, measures and rates, for any scheme."""

from normscope.core import Attention
from normscope.dynamics.ensemble import PANELS, Ensemble
from normscope.dynamics.ensemble_run import EnsembleRun
from normscope.dynamics.gradients import gradient_by_depth
from normscope.dynamics.measures import interaction_energy, measure
from normscope.dynamics.motion import FeedForward, Motion
from normscope.dynamics.schedules import SCHEDULES
from normscope.dynamics.simulate import simulate
from normscope.dynamics.starts import make_start, read_start
from normscope.dynamics.symmetric import SymmetricFlow
from normscope.dynamics.trajectory import Trajectory
from normscope.dynamics.weights import random_weights

__all__ = [
    "PANELS",
    "SCHEDULES",
    "Attention",
    "Ensemble",
    "EnsembleRun",
    "FeedForward",
    "Motion",
    "SymmetricFlow",
    "Trajectory",
    "gradient_by_depth",
    "interaction_energy",
    "make_start",
    "measure",
    "random_weights",
    "read_start",
    "simulate",
]
