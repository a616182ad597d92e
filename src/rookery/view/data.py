"""Read one run for the viewer, as JSON-compatible data. Runs in a worker thread of `rookery view`.

- Nothing is written to the run.
- A rollout whose tokens cannot be read is shown as failed, with the reason in `damage`. Others are not affected.
- Advantages come from `make_batch`, the function that trainers use, and are not computed again here.
"""

import time
from collections.abc import Iterator, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from rookery.core import (
    Attempt,
    Failed,
    Group,
    Message,
    Outcome,
    Rollout,
    RookeryError,
    Segment,
    Task,
    Turn,
    UsageError,
    get_cause,
    label,
    mark_failed,
)
from rookery.core.errors import BatchError, describe
from rookery.core.lifetimes import ClosesOnExit
from rookery.journal import LoadError, RunReader, load_segments, load_turns, merge_turns
from rookery.journal.export import get_price_table, run_facts
from rookery.trainer.folder import METRICS, Settings, read_metrics, read_settings
from rookery.trainer.ratios import read_ratios
from rookery.trainer.setup import batch_config
from rookery.training import BatchConfig, compute_advantages, is_informative, make_batch
from rookery.trajectories import build_transcript
from rookery.trajectories.alternatives import TOP_IDS, TOP_LOGPROBS
from rookery.view.comparison import Comparison, compare_runs
from rookery.view.index import RunIndex
from rookery.view.runs import ViewedRun
from rookery.view.series import build_series, running_mean
from rookery.view.stats import get_readable_info
from rookery.view.summary import build_summary, flatten_settings
from rookery.view.token_text import TokenText

TOKENS_PER_PAGE: Final = 20_000
SEARCH_SECONDS: Final = 2.0
"""Time after which a search returns what it found so far; the page continues it."""
GROUP_TEXT: Final = 4_000
"""Characters of each message that the view of a group shows."""
MAX_EVENTS: Final = 1_000
RATIO: Final = "importance ratio"
"""Name under which the page shows the ratios that a trainer wrote."""


class NotFoundError(RookeryError):
    """The run has no such rollout or group."""


class RunData(ClosesOnExit):
    """Reads one run or training run. Not thread-safe."""

    def __init__(self, run: ViewedRun, journal: Path | None, *, tokenizer: str = "") -> None:
        self.run = run
        self.journal = journal
        self._reader: RunReader | None = None
        self._index = RunIndex()
        self._tokenizer = tokenizer
        self._text: TokenText | None = None

    @property
    def reader(self) -> RunReader:
        if self._reader is None:
            if self.journal is None:
                raise NotFoundError(f"{self.run.name} has no rollouts yet")
            self._reader = RunReader(self.journal)
        return self._reader

    def close(self) -> None:
        """Close the journal."""
        if self._reader is not None:
            self._reader.close()

    # ---- the run

    def fingerprint(self) -> tuple[Any, ...]:
        """Return a value that changes when the run does."""
        metrics = self.run.folder / METRICS
        size = metrics.stat().st_size if self.run.is_training and metrics.exists() else 0
        if self.journal is None:
            return (size,)
        return (self.reader.data_version, self.reader.status, size)

    def summary(self) -> dict[str, Any]:
        """Return settings, counts, estimates and failures of the run, and the metrics of a training run."""
        found: dict[str, Any] = {"name": self.run.name, "kind": "training" if self.run.is_training else "run"}
        if self.run.is_training:
            found["learning"] = read_metrics(self.run.folder) if (self.run.folder / METRICS).exists() else []
            settings = self._training_settings()
            found["training"] = flatten_settings(msgspec.to_builtins(settings.train)) if settings else {}
        if self.journal is None:
            return {**found, "status": "running", "rollouts": 0}
        index = self._updated_index()
        summary = build_summary(self.reader, index.stats, index.groups)
        failures = [
            {
                "cause": cause,
                "count": failure.count,
                "first": failure.first,
                "fault": failure.fault,
                "detail": failure.detail,
                "meaning": get_cause(cause).meaning,
                "advice": get_cause(cause).advice,
            }
            for cause, failure in index.stats.causes()
        ]
        plain = summary.plain()
        return {
            **plain,
            **found,
            "journal": self.reader.folder.name,
            "settings": flatten_settings(plain["settings"]),
            "attempts": index.stats.attempts,
            "failures": failures,
            "events": self._recent_events(),
        }

    def _recent_events(self, limit: int = 50) -> list[dict[str, Any]]:
        """Return the last events of the run that do not belong to one attempt."""
        last = self.reader.last_event()
        events = self.reader.events(max(0, last - 1_000), limit=1_000)
        shown = [event for event in events if "attempt" not in event.payload]
        return [{"ts": event.ts, "kind": event.kind, "payload": event.payload} for event in shown[-limit:]]

    def series(self) -> dict[str, Any]:
        """Return the curves of the run over time."""
        series = build_series(self._updated_index())
        return {**series, "running": running_mean(series)}

    def rollouts(self, start: int = 0, generation: int = 0, *, seconds: float = inf) -> bytes:
        """Return the columns of the table of rollouts, from row `start` of a generation of the index.

        Read new records for at most `seconds`; see `RunIndex.encode_columns`.
        """
        index = self._index
        complete = index.update(self.reader, seconds=seconds)
        return index.encode_columns(start if generation == index.generation else 0, complete=complete)

    def update_index(self, seconds: float) -> bool:
        """Read new records for at most `seconds`. Return True if all records of the run are known."""
        return self.journal is None or self._index.update(self.reader, seconds=seconds)

    def _updated_index(self) -> RunIndex:
        self._index.update(self.reader)
        return self._index

    def compare(self, other: "RunData") -> Comparison:
        """Compare the run `other` with this one."""
        return compare_runs(self.reader, other.reader)

    # ---- a rollout

    def _record(self, rollout_id: str) -> Rollout:
        record = self.reader.rollout(rollout_id)
        if record is None:
            raise NotFoundError(f"{self.run.name} has no record of a rollout {rollout_id!r:.40}")
        return record

    def _load(self, record: Rollout) -> tuple[Rollout, list[Turn], list[Segment], str]:
        """Return the record with its turns and segments, and why they cannot be read, if so."""
        turns: list[Turn] = []
        try:
            turns = load_turns(record, self.reader.tokens)
            return record, turns, merge_turns(record, turns) if record.valid else [], ""
        except LoadError as error:
            return mark_failed(record, error, cause=error.code), turns, [], str(error)

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """Return everything that the page of a rollout shows, except tokens."""
        record, turns, segments, damage = self._load(self._record(rollout_id))
        reader = self.reader
        cause = get_cause(record.outcome.cause) if isinstance(record.outcome, Failed) else None
        attempts = reader.attempts(record.id) or list(record.attempts)
        prices = get_price_table(reader.config())
        return {
            **_dump_record(record),
            "run": run_facts(reader)["name"],
            "cost": prices.compute_cost(record.usage) if prices is not None else None,
            "cause": {"meaning": cause.meaning, "advice": cause.advice} if cause else None,
            "attempts": [_dump_attempt(one) for one in attempts],
            "earlier": [
                {"ts": one.ts, "reason": one.reason, "label": label(one.record.outcome)}
                for one in reader.earlier(record.id)
            ],
            "events": [
                {"ts": event.ts, "kind": event.kind, "payload": event.payload}
                for event in reader.events_of(record.id, limit=MAX_EVENTS)
            ],
            "turns": [_dump_turn(turn) for turn in turns],
            "segments": [
                {"turns": one.turns, "length": len(one), "trained": one.trained, "extras": sorted(one.extras)}
                for one in segments
            ],
            "damage": damage,
            "task_content": _dump_task(reader.task_of(record.group)),
            "members": [
                {"id": one.id, "reward": one.reward, "label": label(one.outcome)}
                for one in self._members(record.group)
            ],
        }

    def tokens(self, rollout_id: str, segment: int = 0, start: int = 0) -> dict[str, Any]:
        """Return a page of the tokens of one segment: IDs, mask, log probabilities, versions, extras and texts."""
        _, turns, segments, damage = self._load(self._record(rollout_id))
        if not 0 <= segment < len(segments):
            reason = damage or ("it is not valid" if not segments else f"it has {len(segments)} segments")
            raise NotFoundError(f"rollout {rollout_id:.40} has no tokens to show: {reason}")
        one = segments[segment]
        stop = min(start + TOKENS_PER_PAGE, len(one))
        ids = np.frombuffer(one.tokens, "<i4")[start:stop].tolist()
        logprobs = np.frombuffer(one.logprobs, "<f4")[start:stop].tolist()
        text = self._token_text()
        alternatives = _read_alternatives(one, start, stop)
        named = {token for pairs in alternatives for token, _ in pairs or ()}
        return {
            "segment": segment,
            "segments": len(segments),
            "start": start,
            "length": len(one),
            "tokens": ids,
            "mask": list(one.mask[start:stop]),
            "logprobs": [value if isfinite(value) else None for value in logprobs],
            "versions": [
                [max(span.start, start), min(span.end, stop), span.version]
                for span in one.versions
                if span.start < stop and span.end > start
            ],
            "turns": [[turn, *bounds] for turn, bounds in _find_turns(one, turns) if bounds[0] < stop],
            "extras": {
                name: values
                for name in one.extras
                if (values := _scalar_extra(one, name, start, stop)) is not None
            }
            | self._importance_ratios(rollout_id, segment, one, start, stop),
            "alternatives": alternatives,
            "texts": {str(token): text.get(token) for token in {*ids, *named}},
            "tokenizer": text.source,
        }

    def _importance_ratios(
        self, rollout_id: str, number: int, segment: Segment, start: int, stop: int
    ) -> dict[str, list[float | None]]:
        """Return the importance ratio of each token, if the trainer of this run wrote them."""
        if not self.run.is_training or self.journal is None:
            return {}
        data = read_ratios(self.run.folder, self.journal.name, rollout_id).get(number, b"")
        trained = np.frombuffer(segment.mask, np.uint8) > 0
        if not data or len(data) != 4 * int(trained.sum()):
            return {}  # not trained, or the trainer left some of its tokens out
        ratios = np.full(len(trained), np.nan)
        ratios[trained] = np.frombuffer(data, "<f4")
        values: list[float] = ratios[start:stop].tolist()
        return {RATIO: [value if isfinite(value) else None for value in values]}

    def _token_text(self) -> TokenText:
        if self._text is None:
            self._text = TokenText.for_run(self.reader.config(), self._tokenizer)
        return self._text

    # ---- a group

    def _members(self, group: int) -> list[Rollout]:
        return self.reader.rollouts_of(group)

    def group(self, number: int) -> dict[str, Any]:
        """Return the rollouts of a group, with their advantages and where their transcripts first differ."""
        members, row = self._members(number), self.reader.group(number)
        task = self.reader.task_of(number)
        if row is None or task is None:
            raise NotFoundError(f"{self.run.name} has no group {number}")
        config = self._batch_config()
        loaded = [load_segments(one, self.reader.tokens) for one in members]
        found = _compute_advantages(Group(index=number, task=task, rollouts=tuple(loaded)), config)
        transcripts = [self._transcript(one) for one in members]
        return {
            "group": number,
            "task": task.id,
            "k": row.k,
            "stream": row.stream,
            "status": row.status,
            "baseline": config.baseline,
            "scale": config.scale,
            "kind": found.kind,
            "warning": found.warning,
            "task_content": _dump_task(task),
            "members": [
                {
                    **_dump_record(one),
                    **_explain_advantage(found, at, members, config),
                    "attempts": len(one.attempts),
                    "messages": [_shorten(message) for message in transcripts[at]],
                }
                for at, one in enumerate(members)
            ],
            "first_difference": _first_difference(transcripts),
        }

    def _batch_config(self) -> BatchConfig:
        settings = self._training_settings()
        return batch_config(settings.train) if settings else BatchConfig()

    def _training_settings(self) -> Settings | None:
        """Return the settings of a training run; None for another run, or if another version wrote them."""
        try:
            return read_settings(self.run.folder) if self.run.is_training else None
        except UsageError:
            return None

    def _transcript(self, record: Rollout) -> list[Message]:
        try:
            return build_transcript(load_turns(record, self.reader.tokens))
        except LoadError:
            return []

    # ---- search

    def search(self, query: str, after: int = 0) -> dict[str, Any]:
        """Return the rollouts whose transcript contains a text, in any case, after a sequence number.

        The search ends after `SEARCH_SECONDS`; `next` is the number to continue from, or None at the end.
        """
        end = time.monotonic() + SEARCH_SECONDS
        found: list[tuple[int, int]] = []
        searched = 0
        while rows := self.reader.rollouts_after(after, limit=64):
            for seq, record in rows:
                if self._contains(record, query.casefold()):
                    found.append((record.group, record.member))
                after, searched = seq, searched + 1
            if time.monotonic() > end:
                return {"matches": found, "next": after, "searched": searched}
        return {"matches": found, "next": None, "searched": searched}

    def _contains(self, record: Rollout, query: str) -> bool:
        try:
            turns = load_turns(record, self.reader.tokens)
        except LoadError:
            return False
        return any(query in text.casefold() for turn in turns for text in _turn_texts(turn))


def _turn_texts(turn: Turn) -> Iterator[str]:
    for message in (*turn.messages, turn.response):
        yield message.text
        if message.reasoning:
            yield message.reasoning
        for call in message.tool_calls:
            yield call.name
            yield call.arguments


def _dump_outcome(outcome: Outcome) -> dict[str, Any]:
    return {"kind": outcome.__struct_config__.tag, **msgspec.structs.asdict(outcome)}


def _dump_record(record: Rollout) -> dict[str, Any]:
    return {
        "id": record.id,
        "group": record.group,
        "member": record.member,
        "task": record.task,
        "environment": record.environment,
        "seed": str(record.seed),
        "label": label(record.outcome),
        "outcome": _dump_outcome(record.outcome),
        "valid": record.valid,
        "ungraded": record.ungraded,
        "reward": record.reward,
        "rewards": _finite(record.rewards),
        "metrics": _finite(record.metrics),
        "info": get_readable_info(record),
        "usage": msgspec.structs.asdict(record.usage),
        "timing": msgspec.structs.asdict(record.timing),
    }


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if isfinite(value) else None for name, value in values.items()}


def _dump_attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(attempt),
        "outcome": _dump_outcome(attempt.outcome),
        "label": label(attempt.outcome),
    }


def _dump_turn(turn: Turn) -> dict[str, Any]:
    logprobs = np.frombuffer(turn.logprobs, "<f4")
    mean = float(logprobs.mean()) if len(logprobs) else None
    return {
        "index": turn.index,
        "role": turn.role,
        "parent": turn.parent,
        "messages": [msgspec.to_builtins(message) for message in turn.messages],
        "response": msgspec.to_builtins(turn.response),
        "prompt_tokens": turn.prompt_tokens,
        "sampled_tokens": turn.sampled_tokens,
        "started": turn.started,
        "seconds": turn.seconds,
        "queued": turn.queued,
        "finish": turn.finish,
        "version": turn.version,
        "versions": len({span.version for span in turn.spans}) or 1,
        "upstream": turn.upstream,
        "partial": turn.partial,
        "token_ids": bool(turn.sampled),
        "drifted": turn.parent is not None and not turn.prefix and bool(turn.sampled),
        "mean_logprob": mean if mean is not None and isfinite(mean) else None,
    }


def _dump_task(task: Task | None) -> dict[str, Any] | None:
    if task is None:
        return None
    found: dict[str, Any] = msgspec.to_builtins(task, str_keys=True)
    found["files"] = {name: len(text) for name, text in task.files.items()}
    return found


def _shorten(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(message)
    text = message.text
    return {**found, "content": text[:GROUP_TEXT], "left_out": max(0, len(text) - GROUP_TEXT)}


def _first_difference(transcripts: Sequence[Sequence[Message]]) -> int | None:
    """Return the index of the first message in which the transcripts differ; None if they do not."""
    with_messages = [one for one in transcripts if one]
    if len(with_messages) < 2:
        return None
    for at in range(max(map(len, with_messages))):
        if any(len(one) <= at or one[at] != with_messages[0][at] for one in with_messages):
            return at
    return None


class _Advantages(msgspec.Struct):
    """Use, advantage and number of trained tokens of each rollout of a group, in order."""

    kind: str
    use: Sequence[str]
    advantage: Sequence[float]
    trained: Sequence[int]
    problem: Sequence[str]
    warning: str = ""
    """The reason why no batch can be made from the group; its advantages are then those of the rewards alone."""


def _compute_advantages(group: Group, config: BatchConfig) -> _Advantages:
    """Return the advantages that a trainer would use for a group."""
    try:
        batch = make_batch([group], config)
    except BatchError as error:
        rewards = [one.reward if one.valid else None for one in group.rollouts]
        advantages = compute_advantages(rewards, baseline=config.baseline, scale=config.scale)
        return _Advantages(
            kind="informative" if is_informative(rewards) else "uniform",
            use=["missing" if reward is None else "train" for reward in rewards],
            advantage=advantages.tolist(),
            trained=[0] * len(rewards),
            problem=[""] * len(rewards),
            warning=describe(error),
        )
    table = batch.rollouts
    return _Advantages(
        kind=batch.groups.kind[0],
        use=table.use,
        advantage=table.advantage.tolist(),
        trained=table.trained.tolist(),
        problem=table.problem or [""] * len(table),
    )


def _explain_advantage(
    found: _Advantages, at: int, members: Sequence[Rollout], config: BatchConfig
) -> dict[str, Any]:
    """Return the advantage of a rollout, its baseline, and the rollouts whose mean reward the baseline is."""
    counted = [row for row, use in enumerate(found.use) if use in ("train", "mask")]
    against = [row for row in counted if row != at or config.baseline == "mean"]
    has_baseline = config.baseline != "none" and at in counted and len(counted) > 1
    rewards = [members[row].reward or 0.0 for row in against]
    return {
        "advantage": found.advantage[at],
        "use": found.use[at],
        "problem": found.problem[at],
        "trained": found.trained[at],
        "against": [members[row].id for row in against] if has_baseline else None,
        "against_mean": sum(rewards) / len(rewards) if has_baseline else None,
    }


def _find_turns(segment: Segment, turns: list[Turn]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield index, start and end of the sampled tokens of each turn that trains in a segment."""
    lengths = {turn.index: len(turn.sampled) // 4 for turn in turns}
    starts = [at for at, value in enumerate(segment.mask) if value and (not at or not segment.mask[at - 1])]
    # Two turns without a token between them would be one range; split it by the known lengths.
    at = 0
    for number in segment.turns:
        start = next((one for one in starts if one >= at), at)
        at = start + lengths.get(number, 0)
        yield number, (start, at)


def _scalar_extra(segment: Segment, name: str, start: int, stop: int) -> list[float | None] | None:
    """Return a per-token array with one number per token; None if it has several or is of no numeric type."""
    extra = segment.extras[name]
    try:
        dtype = np.dtype(extra.dtype)
    except TypeError:
        return None
    if dtype.itemsize != extra.width or dtype.kind not in "fiub":
        return None
    values: list[float] = np.frombuffer(extra.data, dtype)[start:stop].astype(np.float64).tolist()
    return [value if isfinite(value) else None for value in values]


def _read_alternatives(segment: Segment, start: int, stop: int) -> list[list[tuple[int, float]] | None]:
    """Return the most likely tokens at each position that trains; empty if the run did not record them."""
    ids, logprobs = segment.extras.get(TOP_IDS), segment.extras.get(TOP_LOGPROBS)
    if ids is None or logprobs is None or ids.width != logprobs.width or ids.width % 4:
        return []
    shape = (len(segment), ids.width // 4)
    tokens = np.frombuffer(ids.data, "<i4").reshape(shape)[start:stop].tolist()
    values = np.frombuffer(logprobs.data, "<f4").reshape(shape)[start:stop].tolist()
    found: list[list[tuple[int, float]] | None] = []
    for row, logps, trains in zip(tokens, values, segment.mask[start:stop], strict=True):
        pairs = [(token, value) for token, value in zip(row, logps, strict=True) if token >= 0 and isfinite(value)]
        found.append(pairs if trains and pairs else None)
    return found


def encode(value: Any) -> bytes:
    """Encode data of a run as JSON. Values that JSON has no type for become text."""
    return _encoder.encode(value)


def _to_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else repr(value)


_encoder = msgspec.json.Encoder(enc_hook=_to_text)
