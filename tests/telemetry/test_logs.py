"""Structured logs: one JSON object per line, with the IDs of run, rollout and attempt."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine
from rookery.core import Failed
from rookery.engine.retry import RetryPolicy
from rookery.telemetry.logs import JsonFormatter, current_attempt, with_data
from tests.servers import ModelServer


def format_one(message: str, *args: Any, **options: Any) -> dict[str, Any]:
    record = logging.getLogger("a.library").makeRecord(
        "a.library",
        logging.WARNING,
        "file.py",
        1,
        message,
        args,
        options.get("exc_info"),
        extra=options.get("extra"),
    )
    line = JsonFormatter("a-run", "runner-1").format(record)
    assert line.isascii()
    assert line.isprintable()
    return json.loads(line)


def test_hostile_message_stays_on_one_line() -> None:
    text = "a\nb\r\x1b[31m\u2028\u202e\ud800" + "x" * 10
    assert format_one("said %s", text)["message"] == f"said {text}"


def test_ids_come_from_the_task_that_logs_or_from_the_record() -> None:
    assert "rollout" not in format_one("no attempt")
    token = current_attempt.set("12.3.2")
    try:
        line = format_one("in an attempt")
        assert (line["run"], line["process"], line["rollout"], line["attempt"]) == (
            "a-run",
            "runner-1",
            "12.3",
            "12.3.2",
        )
        line = format_one("for another", extra=with_data("kind", attempt="4.0.1", value={1, 2}, other=object))
        assert (line["rollout"], line["attempt"], line["event"]) == ("4.0", "4.0.1", "kind")
        assert set(line["data"]) == {"value", "other"}
    finally:
        current_attempt.reset(token)


def test_exception_is_a_field() -> None:
    try:
        raise ValueError("deep")
    except ValueError as error:
        line = format_one("failed", exc_info=(ValueError, error, error.__traceback__))
    assert line["message"] == "failed"
    assert line["exception"].endswith("ValueError: deep")


@pytest.mark.long
async def test_every_log_of_a_run_is_json_with_ids(model: ModelServer, tmp_path: Path) -> None:
    tasks = [{"prompt": "fine"}, {"prompt": "raises", "run": "raise"}]
    env = "tests.engine.envs:Misbehaving"
    options: dict[str, Any] = {
        "runners": 1,
        "log_format": "json",
        "retry": RetryPolicy(attempts=1),
        "breaker": None,
    }
    handlers = list(logging.getLogger().handlers)
    async with Engine(env, policy=model.url, out=tmp_path, **options) as engine:
        rollouts = [one async for group in engine.groups(tasks, k=2) for one in group.rollouts]
        assert engine.folder is not None
        folder = engine.folder
    assert logging.getLogger().handlers == handlers
    logs = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("logs/*")
    }
    for lines in logs.values():
        assert all(line["run"] == folder.name for line in lines)
    finished = {line["rollout"]: line for line in logs["supervisor"] if line.get("event") == "rollout.finished"}
    assert set(finished) == {rollout.id for rollout in rollouts}
    for rollout in rollouts:
        line = finished[rollout.id]
        assert line["attempt"] == rollout.attempts[-1].id
        assert (line["data"]["task"], line["data"]["reward"]) == (rollout.task, rollout.reward)
    failed = {
        rollout.attempts[-1].id: rollout.outcome for rollout in rollouts if isinstance(rollout.outcome, Failed)
    }
    said = {line["attempt"]: line for line in logs["runner-1"] if line.get("event") == "attempt.failed"}
    assert set(said) == set(failed)
    assert len(failed) == 2
    for attempt, outcome in failed.items():
        assert said[attempt]["data"] == {"cause": outcome.cause, "stage": "run"}
        assert said[attempt]["process"] == "runner-1"
        assert said[attempt]["rollout"] == attempt.rpartition(".")[0]
