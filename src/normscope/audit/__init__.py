"""What the labs say of one model, side by side with theory."""

from normscope.audit.motion import effective_rank, effective_speed, measure_motion
from normscope.audit.replay import replay_table, replayed_turns

__all__ = ["effective_rank", "effective_speed", "measure_motion", "replay_table", "replayed_turns"]
