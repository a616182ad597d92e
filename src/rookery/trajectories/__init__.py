"""Record model calls as turns and build the token segments for training.

Guarantees:
- sampled tokens are copied from the inference engine's response and never re-tokenised;
- every sampled token of a role is trained exactly once, also if histories branch;
- a turn extends another only if its prompt starts with exactly the other's prompt and sampled token IDs;
- a history that was edited forks; a history whose JSON is only formatted differently does not.
"""

from rookery.trajectories.branches import CutPoint, RecordedTurn
from rookery.trajectories.client_messages import MessageError, get_message_key, parse_message
from rookery.trajectories.message_tree import MessageInput
from rookery.trajectories.recorder import HistoryMatch, MatchKind, Recorder, TurnCounts
from rookery.trajectories.segments import build_segments, build_transcript, get_continued_response

__all__ = [
    "CutPoint",
    "HistoryMatch",
    "MatchKind",
    "MessageError",
    "MessageInput",
    "RecordedTurn",
    "Recorder",
    "TurnCounts",
    "build_segments",
    "build_transcript",
    "get_continued_response",
    "get_message_key",
    "parse_message",
]
