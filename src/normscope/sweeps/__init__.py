"""Many runs, here or on Ray: a plan, who executes it, and one table of what all runs came to."""

from normscope.sweeps.drive import Standing, begin, check_folder, holds, read_standing, run_sweep, telling_a_full_disk
from normscope.sweeps.execute import Event, Executor, Task, attempt
from normscope.sweeps.job import Job, Outcome
from normscope.sweeps.local import LocalExecutor, visible_gpus
from normscope.sweeps.on_ray import RayExecutor, check_cluster
from normscope.sweeps.plan import SWEEPS, Point, Sweep, read_sweep, sweep_from
from normscope.sweeps.ray_process import Needs
from normscope.sweeps.shares import Shares
from normscope.sweeps.state import STATES, Progress, SweepFolder
from normscope.sweeps.tables import sweep_tables

__all__ = [
    "STATES",
    "SWEEPS",
    "Event",
    "Executor",
    "Job",
    "LocalExecutor",
    "Needs",
    "Outcome",
    "Point",
    "Progress",
    "RayExecutor",
    "Shares",
    "Standing",
    "Sweep",
    "SweepFolder",
    "Task",
    "attempt",
    "begin",
    "check_cluster",
    "check_folder",
    "holds",
    "read_standing",
    "read_sweep",
    "run_sweep",
    "sweep_from",
    "sweep_tables",
    "telling_a_full_disk",
    "visible_gpus",
]
