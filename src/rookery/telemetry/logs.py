"""Logs of all processes, as text or as JSON with the IDs of run, rollout and attempt.

- A JSON log has one line per record: line breaks and control characters in messages are escaped.
- The ID of the attempt is a context variable of the asyncio task that logs, so log records of libraries have it,
  too.
"""

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from rookery.core import Rollout, label

LogFormat: TypeAlias = Literal["text", "json"]

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
current_attempt: Final[ContextVar[str]] = ContextVar("rookery_log_attempt", default="")
"""ID of the attempt that the current asyncio task works for; empty if there is none."""
events: Final = logging.getLogger("rookery.events")
_DATA: Final = "rookery_data"


def with_data(event: str = "", /, **data: Any) -> dict[str, Any]:
    """Return the argument `extra` of a logging call, with the event's kind and data for JSON logs.

    `attempt` and `rollout` in the data become fields of their own.
    """
    return {_DATA: (event, data)}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, run, rollout, attempt, event and data."""

    def __init__(self, run: str = "", process: str = "") -> None:
        super().__init__()
        self._own = {key: value for key, value in {"run": run, "process": process}.items() if value}

    def format(self, record: logging.LogRecord) -> str:
        found: tuple[str, dict[str, Any]] | None = getattr(record, _DATA, None)
        event, data = found or ("", {})
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._own,
        }
        attempt = data.get("attempt") or current_attempt.get()
        if rollout := data.get("rollout") or attempt.rpartition(".")[0]:
            fields["rollout"] = rollout
        if attempt:
            fields["attempt"] = attempt
        if event:
            fields["event"] = event
        if rest := {key: value for key, value in data.items() if key not in ("attempt", "rollout")}:
            fields["data"] = rest
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = self.formatException(record.exc_info)
        # ASCII, because messages may contain lone surrogates.
        return json.dumps(fields, default=str, separators=(",", ":"))


def make_formatter(kind: LogFormat, *, run: str = "", process: str = "") -> logging.Formatter:
    """Return the formatter for a log handler."""
    return JsonFormatter(run, process) if kind == "json" else logging.Formatter(TEXT)


def set_log_format(kind: LogFormat, *, run: str = "", process: str = "") -> None:
    """Change the format of this process's log to JSON, if `kind` is `json`."""
    if kind == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(make_formatter(kind, run=run, process=process))


def log_event(kind: str, payload: Mapping[str, Any]) -> None:
    """Log an event of a run."""
    data = dict(payload)
    level = logging.WARNING if kind.endswith(("failed", "died", "blocked", "stuck", "error")) else logging.INFO
    events.log(level, "%s", data.get("detail") or kind, extra=with_data(kind, **data))


def log_record(record: Rollout) -> None:
    """Log the final record of a rollout."""
    data = {
        "rollout": record.id,
        "attempt": record.attempts[-1].id if record.attempts else "",
        "task": record.task,
        "outcome": label(record.outcome),
        "reward": record.reward,
        "attempts": len(record.attempts),
        "seconds": round(record.timing.setup + record.timing.run + record.timing.score, 3),
        "turns": record.usage.turns,
        "sampled_tokens": record.usage.sampled_tokens,
    }
    events.info("rollout %s: %s", record.id, data["outcome"], extra=with_data("rollout.finished", **data))


def open_log_file(path: Path, formatter: logging.Formatter) -> logging.Handler:
    """Return a handler that writes to a file and ignores errors: a full disk stops a run with a clear message."""
    try:
        path.parent.mkdir(exist_ok=True)
        handler: logging.Handler = _LogFile(path, delay=True, encoding="utf-8")
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(formatter)
    return handler


class _LogFile(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file could not be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore the error: a full disk stops the run, and tracebacks would hide its message."""
