"""Turns as they happened, and the segments that train.

Promises:
- what trains is what was sampled: tokens are only ever copied from what an engine returned;
- every sampled token of the role is trained exactly once, also where histories branch;
- a turn extends another only where its prompt ids begin with the other's prompt and sampled ids, exactly.
"""

from rookery.trajectories.recorder import Recorder
from rookery.trajectories.segments import segments, transcript

__all__ = ["Recorder", "segments", "transcript"]
