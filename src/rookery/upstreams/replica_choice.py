"""Choose the replica (server) for a call: a pure decision without clock, socket or random source.

The affinity of a call is a key, such as the ID of an attempt, whose calls should use the same replica.

Guarantees:
- without an affinity, the replica with the lowest load relative to its limit is chosen; equal replicas take turns;
- calls with the same affinity go to the same replica, to use its prefix cache, unless its load exceeds that of the
  least loaded replica by more than `SLACK`. Then they go to the next replica in an order that depends on the
  affinity (rendezvous hashing);
- adding or removing a replica changes the preferred replica only of the affinities that move to it or from it;
- a call never waits at its preferred replica while the least loaded replica has a free slot.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

SLACK: Final = 8
"""Number of calls that a preferred replica may have more than the least loaded one and still be chosen."""

_MASK: Final = 2**64 - 1


class Candidate(Protocol):
    """The attributes of a replica that the choice depends on."""

    load: int
    """Calls in flight and calls that wait for the concurrency gate."""

    @property
    def limit(self) -> int: ...

    @property
    def salt(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def stable_hash(text: str) -> int:
    """Return a 64-bit hash of a text that is the same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def choose(among: Sequence[C], *, affinity: str, turn: int) -> C:
    """Return the replica for a call, out of the non-empty list `among`.

    `affinity` may be empty. `turn` is the number of the call; it makes equally loaded replicas take turns.
    """
    if len(among) == 1:
        return among[0]
    first = turn % len(among)
    least_loaded = among[first]
    least = least_loaded.load / least_loaded.limit
    for at in range(first + 1 - len(among), first):
        if (load := among[at].load / among[at].limit) < least:
            least_loaded, least = among[at], load
    if not affinity:
        return least_loaded
    key = stable_hash(affinity)
    most = least_loaded.load + SLACK
    has_free_slot = least_loaded.load < least_loaded.limit
    home, best = least_loaded, -1
    for candidate in among:
        if candidate.load > most or (has_free_slot and candidate.load >= candidate.limit):
            continue
        if (weight := _weight(key, candidate.salt)) > best:
            home, best = candidate, weight
    return home


def _weight(key: int, salt: int) -> int:
    """Return the rendezvous weight of a replica (`salt`) for an affinity (`key`): the highest weight is
    preferred."""
    mixed = (key ^ salt) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93 & _MASK
    return mixed ^ (mixed >> 29)
