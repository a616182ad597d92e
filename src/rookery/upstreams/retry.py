"""Whether and when a model call is tried again: a pure controller without clock, socket or random source.

Promises:
- a call is tried again only for a failure that is safe to repeat, and at most `retries` times;
- a connection that was dropped before the first byte of an answer is tried again once: nothing was
  answered, so nothing can be recorded twice, but a request that brings its server down is not passed on
  to every replica in turn;
- a server's own error is tried again once, and only at another replica: nothing was answered, and the same server
  would fail in the same way;
- a call whose server hangs is tried again only at a replica that is not known to hang;
- once a piece of the answer was passed on, the call is not tried again, whatever happens;
- no delay ends at or after the deadline: a call that cannot be tried in time fails at once;
- a server's Retry-After is honoured up to `MAX_RETRY_AFTER`, with jitter on top, so that a thousand
  waiting calls do not come back in the same instant.

Which answers count as what is decided where the answer is read (`replica.py`, `http.py`):

| failure | kind | tried again |
|---|---|---|
| no connection, DNS, connect timeout | connect | yes: the request was never sent |
| closed before any byte of the answer, or before any piece of a stream | dropped | once |
| 429, 503, 529 | overloaded | yes: the server says it did not take the request |
| 502 | gateway | yes: the proxy says its server was not there; it is usually restarting |
| 504 | final | no: the server behind the proxy is working on it; again would only double its load |
| other 5xx | error | once, at another replica: a request that fails its server is not passed on to every one |
| the server was found hung | hung | yes, at a replica that works |
| 4xx, half or broken answers, deadline, certificate | final | no |
"""

from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["connect", "dropped", "overloaded", "gateway", "error", "hung", "final"]

MAX_RETRY_AFTER = 60.0


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Full jitter: the n-th delay is drawn evenly from 0 to `base * 2**n`, never above `cap`."""

    retries: int = 4
    base: float = 0.25
    cap: float = 8.0

    def delay(
        self,
        kind: Kind,
        *,
        attempt: int,
        elapsed: float,
        deadline: float,
        draw: float,
        dropped: int = 0,
        elsewhere: bool = False,
        retry_after: float | None = None,
    ) -> float | None:
        """Seconds to wait before the next try, or None to give up.

        `attempt` counts the tries that failed before this one, `dropped` those of them that were dropped or ended
        with a server's error; `elsewhere` says whether there is another replica to try (after a hang, one that
        works);
        `elapsed` and `deadline` are seconds since the call began; `draw` is a random number in [0, 1).
        """
        if kind == "final" or attempt >= self.retries:
            return None
        if (kind in ("dropped", "error") and dropped >= 1) or (kind in ("error", "hung") and not elsewhere):
            return None
        window = min(self.cap, self.base * 2.0 ** min(attempt, 32))
        delay = draw * window
        if retry_after is not None:
            delay += min(max(retry_after, 0.0), MAX_RETRY_AFTER)
        return delay if elapsed + delay < deadline else None
