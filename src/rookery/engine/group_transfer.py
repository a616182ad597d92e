"""Send a group to another process in parts, so that a rollout that cannot be sent fails without its group.

`split_group` runs in the supervisor's process and `join_group` in the process of the client. Each rollout is
encoded and decoded separately. A rollout that cannot be encoded, is too large for a frame, or cannot be decoded
arrives as `Failed` with cause `bug.send`, and the group still has k records.
"""

from collections.abc import Callable, Sequence

import msgspec

from rookery.core import Group, Rollout, RookeryError, Task, failed_outcome, mark_failed
from rookery.core.errors import describe
from rookery.engine.framing import MAX_FRAME, encoder

PART_BYTES = 32 << 20
"""Maximum size in bytes of the rollouts that are sent together in one part. A larger rollout is sent alone."""
MAX_ROLLOUT = MAX_FRAME - (1 << 20)


class SendError(RookeryError):
    """One rollout cannot be sent or received."""

    cause = "bug.send"


class SentRollout(msgspec.Struct, frozen=True, array_like=True):
    """An encoded rollout on its way to another process.

    The fields besides `data` identify the rollout in the error that is reported if `data` cannot be decoded.
    """

    id: str
    group: int
    member: int
    task: str
    seed: int
    data: bytes


class GroupPart(msgspec.Struct, frozen=True, array_like=True):
    """Some of the rollouts of a group, in order. `more` is True if further parts of the group follow."""

    index: int
    task: Task
    rollouts: list[SentRollout]
    more: bool = False


_decode = msgspec.msgpack.Decoder(Rollout).decode


def split_group(
    group: Group, on_failed: Callable[[Group, Group], None] | None = None, *, limit: int = MAX_ROLLOUT
) -> list[GroupPart]:
    """Encode a group as one or more parts.

    If a rollout cannot be encoded or has more than `limit` bytes, it becomes `Failed`, and `on_failed` is called
    with the group before and after that change.
    """
    sent: list[SentRollout] = []
    kept: list[Rollout] = []
    for rollout in group.rollouts:
        kept_rollout, one = _encode_rollout(rollout, limit)
        kept.append(kept_rollout)
        sent.append(one)
    if on_failed is not None and any(now is not was for now, was in zip(kept, group.rollouts, strict=True)):
        on_failed(group, msgspec.structs.replace(group, rollouts=tuple(kept)))
    parts: list[list[SentRollout]] = [[]]
    size = 0
    for one in sent:
        if parts[-1] and size + len(one.data) > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += len(one.data)
    last = len(parts) - 1
    return [GroupPart(group.index, group.task, part, at < last) for at, part in enumerate(parts)]


def _encode_rollout(rollout: Rollout, limit: int) -> tuple[Rollout, SentRollout]:
    try:
        data = encoder.encode(rollout)
        if len(data) > limit:
            raise SendError(
                f"rollout {rollout.id} has {len(data):,} bytes; at most {limit:,} can be sent to another process"
            )
    except Exception as error:  # noqa: BLE001  (it fails this rollout alone)
        rollout = mark_failed(rollout, _to_send_error(rollout.id, error), cause="bug.send")
        rollout = msgspec.structs.replace(rollout, info={}, metrics={}, rewards={}, segments=[])
        data = encoder.encode(rollout)
    return rollout, SentRollout(rollout.id, rollout.group, rollout.member, rollout.task, rollout.seed, data)


def join_group(parts: Sequence[GroupPart]) -> Group:
    """Decode the parts that `split_group` returned, and return the group."""
    rollouts = tuple(_decode_rollout(one) for part in parts for one in part.rollouts)
    return Group(index=parts[0].index, task=parts[0].task, rollouts=rollouts)


def _decode_rollout(sent: SentRollout) -> Rollout:
    try:
        return _decode(sent.data)
    except Exception as error:  # noqa: BLE001  (it fails this rollout alone)
        outcome = failed_outcome(_to_send_error(sent.id, error), "load", cause="bug.send")
        return Rollout(
            id=sent.id, group=sent.group, member=sent.member, task=sent.task, seed=sent.seed, outcome=outcome
        )


def _to_send_error(rollout: str, error: Exception) -> SendError:
    if isinstance(error, SendError):
        return error
    made = SendError(f"rollout {rollout} cannot be sent to another process: {describe(error)}")
    made.__cause__ = error
    return made
