"""Grade the stored rollouts of a run again: plan the gradings, and store their results. Runs in the supervisor.

    plan = plan_rescoring(folder, scorer="exact")
    ... run an engine with `plan.config` over `plan.tasks`, one rollout each ...
    apply_rescoring(folder, graded, "exact")

- Nothing is sampled from the policy.
- Results are stored only if every grading has ended, in one transaction. Earlier records stay in the journal.
- A rollout whose grading fails has no reward afterwards. It never gets a 0 for that.
- A rollout that cannot be graded again, because nothing was stored of what its score depends on, keeps its score.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import SCORED, Cancelled, Failed, Rollout, Task, UsageError
from rookery.core.records import SUBMISSIONS
from rookery.engine.config import EngineConfig
from rookery.environments import Environment, MixtureEntry, load_environment
from rookery.environments.mixture import MIXTURE, get_entries
from rookery.environments.rescoring import SOURCE, get_rollout_id, make_rescoring_task
from rookery.journal import Journal, RunReader
from rookery.journal.schema import EndStatus
from rookery.upstreams.protocol import UpstreamConfig

FOLDER: Final = "rescores"
"""Directory in a run with the runs that graded it again."""
NO_POLICY: Final = UpstreamConfig(kind="none", urls=("none:",), model="none")
SANDBOX_GONE: Final = "scoring.sandbox_gone"
_NO_BUDGETS: Final[dict[str, Any]] = {"turns": None, "tokens": None, "context": None}
"""Limits of the policy, which is not sampled."""


class KeptScores(msgspec.Struct, frozen=True):
    """Rollouts of one environment that cannot be graded again, all for the same reason. Their scores stay."""

    environment: str
    """Name of the environment."""
    reason: str
    rollouts: int


class RescoringError(UsageError):
    """None of the stored rollouts can be graded again. `kept` has the reasons for each environment."""

    def __init__(self, run: str, kept: Sequence[KeptScores]) -> None:
        self.kept = tuple(kept)
        reasons = "; ".join(f"{one.environment}: {one.reason}" for one in kept)
        super().__init__(
            f"{run} cannot be graded again by its environment ({reasons}): name a scorer with --scorer NAME"
        )


class RescoringPlan(msgspec.Struct, frozen=True):
    """Settings and rollouts of a `rookery rescore`, with the rollouts that keep their scores."""

    config: EngineConfig
    """The configuration of the engine that grades."""
    tasks: list[Task]
    """One task for each rollout that is graded."""
    kept: tuple[KeptScores, ...] = ()


class Rescored(msgspec.Struct, frozen=True):
    """Result of grading a run again."""

    rollouts: int
    """Number of rollouts that were graded."""
    changed: int
    """Number of rollouts whose reward changed."""
    failed: int
    """Number of rollouts whose grading failed, so that they have no reward now."""
    kept: int = 0
    """Number of rollouts whose grading needed a sandbox that is gone, so that they keep their scores."""


def can_rescore(record: Rollout) -> bool:
    """Return whether a stored rollout can be graded: its run stage ended, and its conversation is stored."""
    ran = isinstance(record.outcome, SCORED) or (
        isinstance(record.outcome, Failed) and record.outcome.stage == "score"
    )
    return ran and bool(record.tokens)


def plan_rescoring(
    folder: Path, *, scorer: Any = None, roles: dict[str, UpstreamConfig] | None = None, **changes: Any
) -> RescoringPlan:
    """Plan how a run is graded again.

    `scorer` is a name, or a table with `name` and arguments; None means the environment of the run, or each
    environment of a mixture. `roles` are upstreams of model roles, which override those of the run. `changes` are
    fields of `EngineConfig` to change. Raise `UsageError` if the run has nothing to grade, and `RescoringError` if
    its environments cannot grade any of its rollouts again.
    """
    with RunReader(folder) as reader:
        try:
            stored = msgspec.convert(reader.config(), EngineConfig)
        except msgspec.ValidationError as error:
            raise UsageError(f"the configuration in {folder.name} cannot be read: {error}") from error
        entries = _load_entries(folder, stored) if scorer is None else {}
        tasks: list[Task] = []
        kept: Counter[tuple[str, str]] = Counter()
        for task, record in _iter_gradable(reader):
            if scorer is not None:
                tasks.append(make_rescoring_task(task, record.id))
            elif task.environment not in entries:
                kept[task.environment, "the environment is not part of the stored mixture"] += 1
            else:
                env: Environment = entries[task.environment].environment
                if problem := env.find_restore_problem(task, record):
                    kept[task.environment or env.title, problem] += 1
                else:
                    tasks.append(make_rescoring_task(task, record.id, task.environment))
        superseded = reader.count_superseded()
    scores = tuple(KeptScores(name, reason, count) for (name, reason), count in sorted(kept.items()))
    if not tasks and scores:
        raise RescoringError(folder.name, scores)
    if not tasks:
        raise UsageError(f"{folder.name} has no rollouts to grade: none of them ended its run stage")
    common = {"run": str(folder.resolve()), "superseded": superseded}
    if scorer is not None:
        environment, arguments = SOURCE, {**common, "scorer": scorer}
    elif stored.environment == MIXTURE:
        graded = {task.environment for task in tasks}
        environment, arguments = MIXTURE, _make_mixture(stored, entries, graded, common)
    else:
        environment = SOURCE
        arguments = {**common, "environment": stored.environment, "arguments": stored.arguments}
    upstreams = {role: upstream for role, upstream in stored.upstreams.items() if role != "policy"}
    config = EngineConfig(
        environment=environment,
        arguments=arguments,
        upstreams={"policy": NO_POLICY, **upstreams, **(roles or {})},
        sandbox=stored.sandbox,
        explicit_sandbox_fields=stored.explicit_sandbox_fields,
        limits=msgspec.structs.replace(stored.limits, **_NO_BUDGETS),
        runners=stored.runners,
        concurrency=stored.concurrency,
        retry=stored.retry,
        record="plain",
        stream={"k": 1},
    )
    return RescoringPlan(msgspec.structs.replace(config, **changes), tasks, scores)


def _iter_gradable(reader: RunReader) -> Iterator[tuple[Task, Rollout]]:
    """Yield the rollouts whose run stage ended, each with its task."""
    group, task = -1, None
    for record in reader.iter_rollouts():
        if record.group != group:
            group, task = record.group, reader.task_of(record.group)
        if task is not None and can_rescore(record):
            yield task, record


def _load_entries(folder: Path, stored: EngineConfig) -> dict[str, MixtureEntry]:
    if not stored.environment:
        raise UsageError(
            f"{folder.name} was started from Python with an environment object: name a scorer with --scorer NAME"
        )
    return get_entries(load_environment(stored.environment, **stored.arguments))


def _make_mixture(
    stored: EngineConfig, entries: dict[str, MixtureEntry], graded: Collection[str], common: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a mixture in which each environment of the run grades its own rollouts."""
    made: list[dict[str, Any]] = []
    for (name, entry), given in zip(entries.items(), stored.arguments["environments"], strict=True):
        if name not in graded:
            continue
        inner = {"environment": given["environment"], "arguments": given.get("arguments", {})}
        limits = msgspec.structs.replace(entry.limits, **_NO_BUDGETS)
        made.append(
            {
                "environment": SOURCE,
                "name": name,
                "arguments": {**common, **inner},
                "limits": msgspec.to_builtins(limits),
                **{key: given[key] for key in ("sandbox",) if key in given},
            }
        )
    return {"environments": made, "name": "rescore"}


def apply_rescoring(folder: Path, graded: Path, scorer: str) -> Rescored:
    """Store the results of the run in `graded`, which graded the run in `folder` again with `scorer`.

    Raise `UsageError` if `graded` is not finished, if records of the run were replaced meanwhile, or if another
    process writes to the run.
    """
    with RunReader(graded) as results, RunReader(folder) as reader:
        if results.unfinished().groups:
            raise UsageError(f"{graded} is not finished, so no score was changed: start `rookery rescore` again")
        status: EndStatus = "finished" if reader.status == "finished" else "stopped"
        with Journal.open(folder) as journal:
            try:
                done, records = _collect(reader, results, scorer, graded)
                journal.replace_rollouts(records, f"graded again with {scorer}")
            finally:
                journal.end(status, rescored=graded.name)
                journal.flush()
    return done


def _collect(reader: RunReader, results: RunReader, scorer: str, graded: Path) -> tuple[Rescored, list[Rollout]]:
    """Return the new records of the rollouts that were graded again, and their counts."""
    arguments = results.config()["arguments"]
    planned = arguments["environments"][0]["arguments"] if "environments" in arguments else arguments
    if reader.count_superseded() != planned["superseded"]:
        raise UsageError(
            f"rollouts of {reader.folder.name} ran or were graded again meanwhile, so no score was changed: start "
            "`rookery rescore` again"
        )
    changed = failed = kept = 0
    records: list[Rollout] = []
    for result in results.iter_rollouts():
        record = reader.rollout(get_rollout_id(result.task))
        if record is None or isinstance(result.outcome, Cancelled):
            continue
        if isinstance(result.outcome, Failed) and result.outcome.cause == SANDBOX_GONE:
            kept += 1
            continue
        new = _merge(record, result, scorer, graded.name)
        records.append(new)
        changed += new.reward != record.reward
        failed += isinstance(new.outcome, Failed)
    return Rescored(len(records), changed, failed, kept), records


def _merge(record: Rollout, result: Rollout, scorer: str, graded: str) -> Rollout:
    """Return the stored record with the score of `result`."""
    usage = msgspec.structs.replace(
        record.usage,
        others=_add(record.usage.others, result.usage.others),
        other_prompts=_add(record.usage.other_prompts, result.usage.other_prompts),
    )
    info = {**record.info, **result.info, "rescored": {"scorer": scorer, "run": graded}}
    if SUBMISSIONS in record.info:  # a grading that failed has only those of the steps before
        info[SUBMISSIONS] = record.info[SUBMISSIONS]
    outcome = result.outcome
    if isinstance(outcome, Failed):  # for the stored rollout, the whole grading is its score stage
        outcome = msgspec.structs.replace(outcome, stage="score")
    return msgspec.structs.replace(
        record,
        outcome=outcome,
        reward=result.reward,
        rewards=result.rewards,
        metrics={**record.metrics, **result.metrics},
        info=info,
        usage=usage,
    )


def _add(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
