"""Print one rollout: outcome, transcript by turn, tokens, timings, attempts and failure."""

import struct
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rookery.cli.terminal import (
    bold,
    dim,
    escape_controls,
    format_duration,
    format_table,
    one_line,
    plural,
    truncate_middle,
)
from rookery.core import Attempt, Completed, Failed, Message, Rollout, Turn, get_cause, label, mark_failed
from rookery.view.stats import get_readable_info

if TYPE_CHECKING:
    from rookery.journal import RunReader, Superseded
    from rookery.journal.schema import Event

MAX_TEXT = 6_000
MAX_EVENTS = 50
_COLOURS = {"system": "magenta", "developer": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def print_rollout(reader: "RunReader", record: Rollout, *, tokens: bool, full: bool) -> None:
    """Print a rollout to stdout. `tokens` adds token IDs, and `full` does not shorten long texts."""
    limit = 1 << 30 if full else MAX_TEXT
    from rookery.journal import LoadError, load_turns, merge_turns

    turns: list[Turn] = []
    damage = ""
    try:
        turns = load_turns(record, reader.tokens)
        if record.valid:
            merge_turns(record, turns)
    except LoadError as error:  # the rollout counts as failed wherever it is loaded, so show it as failed
        damage = str(error)
        record = mark_failed(record, error, cause=error.code)
    lines = _format_head(record)
    if damage:
        lines += ["", click.style(one_line(damage, 300), fg="red")]
    for turn in turns:
        lines += ["", *_format_turn(turn, limit, tokens=tokens)]
    lines += _format_events(reader.events_of(record.id), full=full)
    attempts = reader.attempts(record.id)
    lines += _format_attempts(attempts, record)
    lines += _format_evidence(attempts or list(record.attempts))
    lines += _format_superseded(reader.earlier(record.id))
    if isinstance(record.outcome, Failed):
        lines += ["", *_format_failure(record.outcome)]
    click.echo("\n".join(lines))


def _format_head(record: Rollout) -> list[str]:
    outcome = record.outcome
    colour = "red" if isinstance(outcome, Failed) else "green" if isinstance(outcome, Completed) else "yellow"
    reward = f"reward {record.reward:.4g}" if record.reward is not None else "no reward"
    head = f"{bold(f'rollout {record.id}')}  {click.style(label(outcome), fg=colour)}  {bold(reward)}"
    usage = record.usage
    rows = [
        ["task", one_line(record.task, 120)],
        [
            "tokens",
            f"{usage.sampled_tokens:,} sampled in {plural(usage.turns, 'turn')}, "
            f"{usage.prompt_tokens:,} of prompts"
            + (f", {plural(usage.tool_calls, 'tool call')}" if usage.tool_calls else ""),
        ],
        ["time", _format_timing(record)],
        ["seed", str(record.seed)],
    ]
    for name, data in (
        ("rewards", record.rewards),
        ("metrics", record.metrics),
        ("info", get_readable_info(record)),
    ):
        if data:
            rows.append([name, one_line(_encode_json(data), 600)])
    if usage.others:
        rows.append(
            ["others", ", ".join(f"{one_line(role, 40)} {count:,} tokens" for role, count in usage.others.items())]
        )
    return [head, *format_table([[dim(row[0]), row[1]] for row in rows], indent="  ")]


def _format_timing(record: Rollout) -> str:
    spent = msgspec.structs.asdict(record.timing)
    stages = ("queue", "setup", "run", "score", "teardown", "paused")
    parts = [f"{stage} {format_duration(spent[stage])}" for stage in stages if spent[stage] >= 0.0005]
    waits = [f"{name} {format_duration(spent[name])}" for name in ("model", "sandbox") if spent[name] >= 0.0005]
    text = ", ".join(parts) or "none"
    return f"{text} (of it waiting on {', '.join(waits)})" if waits else text


def _encode_json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=repr).decode()


def _format_turn(turn: Turn, limit: int, *, tokens: bool) -> list[str]:
    role = "" if turn.role == "policy" else f" {turn.role}"
    after = f", after turn {turn.parent}" if turn.parent is not None and turn.parent != turn.index - 1 else ""
    about = (
        f"{turn.prompt_tokens:,} → {turn.sampled_tokens:,} tokens, {format_duration(turn.seconds)}"
        f"{f', {format_duration(turn.queued)} queued' if turn.queued >= 0.05 else ''}, {turn.finish}{after}"
    )
    lines = [f"{bold(f'turn {turn.index}{one_line(role, 40)}')}  {dim(about)}"]
    for message in (*turn.messages, turn.response):
        lines += _format_message(message, limit)
    if tokens:
        lines += _format_tokens(turn)
    return lines


def _format_message(message: Message, limit: int) -> list[str]:
    name = message.role + (f" {one_line(message.tool_call_id, 40)}" if message.tool_call_id else "")
    lines = [click.style(name, fg=_COLOURS.get(message.role), bold=True)]
    if message.reasoning:
        lines += [
            dim(f"  {text}") for text in escape_controls(truncate_middle(message.reasoning, limit)).split("\n")
        ]
    if message.content is not None:
        text = message.text if isinstance(message.content, str) else _join_content(message)
        lines += [f"  {one}" for one in escape_controls(truncate_middle(text, limit)).split("\n")] if text else []
    for call in message.tool_calls:
        lines.append(
            f"  {bold(one_line(call.name, 80))}({escape_controls(truncate_middle(call.arguments, limit))})"
        )
    return lines


def _join_content(message: Message) -> str:
    assert isinstance(message.content, tuple)
    return "\n".join(
        str(part.get("text", "")) if part.get("type") == "text" else f"[{part.get('type', 'part')}]"
        for part in message.content
    )


def _format_tokens(turn: Turn) -> list[str]:
    count = len(turn.sampled) // 4
    if not count:
        return [dim("  the server returned no token IDs")]
    ids = struct.unpack(f"<{count}i", turn.sampled)
    before = struct.unpack(f"<{len(turn.prompt) // 4}i", turn.prompt)
    probs = struct.unpack(f"<{count}f", turn.logprobs) if turn.logprobs else None
    kept = f" after {turn.prefix:,} that the turn before it ended with" if turn.prefix else ""
    lines = [dim(f"  prompt ids{kept}"), *_wrap_numbers([str(one) for one in before])]
    lines.append(dim(f"  sampled ids{'' if probs is None else ', with logprobs'}, policy version {turn.version}"))
    pairs = (
        [str(one) for one in ids] if probs is None else [f"{a}:{b:.3f}" for a, b in zip(ids, probs, strict=True)]
    )
    return [*lines, *_wrap_numbers(pairs)]


def _wrap_numbers(texts: list[str], width: int = 100) -> list[str]:
    lines, here = [], "   "
    for text in texts:
        if len(here) + len(text) + 1 > width and here.strip():
            lines.append(here)
            here = "   "
        here += f" {text}"
    return [*lines, here] if here.strip() else lines


def _format_evidence(attempts: list[Attempt]) -> list[str]:
    """Return lines with the observations about replicas that did not reply, one line for each observation."""
    rows = [
        [one_line(one.id, 40), one_line(str(seen.get("verdict", "")), 20), one_line(_encode_json(seen), 600)]
        for one in attempts
        for seen in one.evidence.get("upstream", ())
    ]
    return (
        ["", bold("evidence") + dim("  observations about the inference engine"), *format_table(rows, indent="  ")]
        if rows
        else []
    )


def _format_attempts(attempts: list[Attempt], record: Rollout) -> list[str]:
    if len(attempts) < 2:
        return []
    rows = []
    for one in attempts:
        detail = one.outcome.detail if isinstance(one.outcome, Failed) else ""
        rows.append(
            [
                one_line(one.id, 40),
                one_line(label(one.outcome), 40),
                one_line(one.runner, 40),
                format_duration(max(0.0, one.ended - one.started)),
                one_line(detail, 120),
            ]
        )
    return [
        "",
        bold(plural(len(attempts), "attempt"))
        + dim(f"  the turns are those of {record.attempts[-1].id}" if record.attempts else ""),
        *format_table(rows, indent="  "),
    ]


def format_event(event: "Event", limit: int) -> str:
    """Return an event's message and its other fields, in one line."""
    payload = dict(event.payload)
    message = str(payload.pop("message", payload.pop("detail", "")))
    fields = {name: value for name, value in payload.items() if name not in ("attempt", "runner")}
    return one_line(f"{message}  {_encode_json(fields)}" if fields else message, limit)


def _format_events(events: "list[Event]", *, full: bool) -> list[str]:
    """Return lines with the events of the rollout's attempts: what the environment logged, and other events."""
    if not events:
        return []
    shown = events if full else events[:MAX_EVENTS]
    rows = [
        [
            time.strftime("%H:%M:%S", time.localtime(event.ts)),
            one_line(str(event.payload.get("attempt", "")), 40),
            click.style(one_line(event.kind, 40), fg="yellow" if event.kind == "log.warning" else None),
            format_event(event, 10_000 if full else 200),
        ]
        for event in shown
    ]
    left = len(events) - len(shown)
    more = [dim(f"  {plural(left, 'more event')}: --full shows all")] if left else []
    return ["", bold("events"), *format_table(rows, indent="  "), *more]


def _format_superseded(records: "list[Superseded]") -> list[str]:
    """Return lines about the rollout's earlier records, which the newest record replaced."""
    if not records:
        return []
    from rookery.cli.summary import format_time

    rows = [
        [
            format_time(one.ts),
            one_line(label(one.record.outcome), 40),
            "no reward" if one.record.reward is None else f"reward {one.record.reward:.4g}",
            one_line(one.reason, 120),
        ]
        for one in records
    ]
    head = bold(plural(len(records), "earlier record")) + dim("  only the newest record counts")
    return ["", head, *format_table(rows, indent="  ")]


def _format_failure(outcome: Failed) -> list[str]:
    cause = get_cause(outcome.cause)
    where = f" in {outcome.stage}: {bold(one_line(outcome.cause, 60))} ({outcome.fault})"
    head = click.style("failed", fg="red", bold=True) + where
    lines = [head, f"  {escape_controls(outcome.detail)}", dim(f"  {cause.meaning} {cause.advice}")]
    if outcome.traceback:
        lines += ["", *(f"  {one}" for one in escape_controls(outcome.traceback).rstrip().split("\n"))]
    return lines
