"""Which replica answers a call: a pure decision, without clock, socket or random source.

Promises:
- without an affinity the replica with the least load, for its size, is taken, and equals take turns;
- calls of one affinity go to one replica for as long as it has about as little to do as the idlest one, so that
  its prefix cache is used; else to the next one in an order that is the affinity's own;
- a replica that comes or goes moves only the affinities that were, or will be, at home there;
- nobody waits at home for a place while another replica has one free.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

SLACK: Final = 8
"""How many calls more than the idlest replica the one with the warm cache may have and still be taken."""

_MASK: Final = 2**64 - 1


class Candidate(Protocol):
    """What is looked at of a replica."""

    load: int
    """Calls that wait for a place or hold one."""

    @property
    def limit(self) -> int: ...

    @property
    def salt(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def mark(text: str) -> int:
    """A number for a name, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def choose(among: Sequence[C], *, affinity: str, turn: int) -> C:
    """One of the candidates, of which there is at least one. `turn` grows by one with every call."""
    if len(among) == 1:
        return among[0]
    first = turn % len(among)
    idlest = among[first]
    least = idlest.load / idlest.limit
    for at in range(first + 1 - len(among), first):
        if (load := among[at].load / among[at].limit) < least:
            idlest, least = among[at], load
    if not affinity:
        return idlest
    key = mark(affinity)
    most = idlest.load + SLACK
    room = idlest.load < idlest.limit
    home, best = idlest, -1
    for candidate in among:
        if candidate.load > most or (room and candidate.load >= candidate.limit):
            continue
        if (weight := _weight(key, candidate.salt)) > best:
            home, best = candidate, weight
    return home


def _weight(key: int, salt: int) -> int:
    """Every bit of both decides every bit of this: the order of an affinity says nothing about another's."""
    mixed = (key ^ salt) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93 & _MASK
    return mixed ^ (mixed >> 29)
