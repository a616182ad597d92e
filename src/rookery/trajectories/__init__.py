"""Turns as they happened, and the segments that train.

Promises:
- what trains is what was sampled: tokens are only ever copied from what an engine returned;
- every sampled token of the role is trained exactly once, also where histories branch;
- a turn extends another only where its prompt ids begin with the other's prompt and sampled ids, exactly;
- a history that was edited forks; one that is only spelled differently does not.
"""

from rookery.trajectories.canonical import MessageError, key_of, message_of
from rookery.trajectories.histories import Entry
from rookery.trajectories.recorder import Counts, Kind, Place, Recorder
from rookery.trajectories.segments import answered, segments, transcript
from rookery.trajectories.strands import Cut, Node

__all__ = [
    "Counts",
    "Cut",
    "Entry",
    "Kind",
    "MessageError",
    "Node",
    "Place",
    "Recorder",
    "answered",
    "key_of",
    "message_of",
    "segments",
    "transcript",
]
