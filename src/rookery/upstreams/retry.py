"""Decide whether and when a failed model call is retried: a pure controller without clock or random source.

Guarantees:
- a call is retried only after a failure after which repeating it is safe, and at most `retries` times;
- a call whose connection was dropped before the first byte of a response is retried once. Nothing can be recorded
  twice, but a request that crashes its server must not reach every replica in turn;
- a server error is retried once and only at another replica, since the same server would fail in the same way;
- a call whose server hangs is retried only at a replica that is not known to hang;
- once a piece of a streamed reply was delivered to the caller, the call is not retried;
- a call is not retried if the delay would end at or after its deadline; it fails at once;
- the server's `Retry-After` is honoured up to `MAX_RETRY_AFTER` seconds, plus jitter, so that a thousand waiting
  calls do not return at the same moment.

`replica.py` classifies failures:

| failure | kind | retried |
|---|---|---|
| no connection, DNS, connect timeout | connect | yes: the request was never sent |
| connection closed before any byte of the response, or before any piece of a streamed reply | dropped | once |
| 429, 503, 529 | overloaded | yes: the server refused the request |
| 502 | gateway | yes: the server behind the proxy is down, usually for a restart |
| 504 | final | no: the server behind the proxy is working on it, and a retry would double its load |
| other 5xx | error | once, at another replica: a request that makes servers fail must not reach all of them |
| the server was found hung | hung | yes, at a replica that is not known to hang |
| 4xx, incomplete or invalid responses, deadline, certificate | final | no |
"""

from typing import Literal, TypeAlias

import msgspec

FailureKind: TypeAlias = Literal["connect", "dropped", "overloaded", "gateway", "error", "hung", "final"]

MAX_RETRY_AFTER = 60.0


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Exponential back-off with full jitter: delay n is uniform in 0 to `base * 2**n`, at most `cap`."""

    retries: int = 4
    base: float = 0.25
    cap: float = 8.0

    def delay(
        self,
        kind: FailureKind,
        *,
        attempt: int,
        elapsed: float,
        deadline: float,
        draw: float,
        dropped: int = 0,
        elsewhere: bool = False,
        retry_after: float | None = None,
    ) -> float | None:
        """Return the seconds to wait before the next try, or None to give up.

        `kind` is the kind of the failure. `attempt` is the number of failed tries before this one; `dropped` is
        how many of those were of the kind `dropped` or `error`. `elsewhere` is True if another replica can be
        tried (after a hang, a replica that is not known to hang). `retry_after` is the server's `Retry-After` in
        seconds. `elapsed` and `deadline` are seconds since the call began; `draw` is a random number in [0, 1).
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
