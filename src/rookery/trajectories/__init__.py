"""Record model calls as turns, and build segments (token sequences for training) from them.

Guarantees:
- sampled tokens are copied from the inference engine's response and never re-tokenised;
- every sampled token of a model role (policy, judge, …) is trained exactly once, also if message histories branch;
- a turn shares the tokens of an earlier turn only if its prompt starts with exactly the token IDs of the earlier
  turn's prompt and reply;
- a message history that a client edited starts a new branch; one whose JSON is only formatted differently does
  not.
"""

from rookery.trajectories.branches import CutPoint, RecordedTurn
from rookery.trajectories.client_messages import MessageError, get_message_key, parse_message
from rookery.trajectories.message_tree import HistoryMatch, MatchKind, MessageInput
from rookery.trajectories.recorder import Recorder, TurnCounts
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
