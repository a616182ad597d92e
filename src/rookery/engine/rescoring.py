"""Grade the stored rollouts of a run again: plan the gradings, and store their results. Runs in the supervisor.

    config, tasks = plan_rescoring(folder, scorer="exact")
    ... run an engine with `config` over `tasks`, one rollout each ...
    apply_rescoring(folder, graded, "exact")

- Nothing is sampled from the policy.
- Results are stored only if every grading has ended, in one transaction. Earlier records stay in the journal.
- A rollout whose grading fails has no reward afterwards. It never gets a 0 for that.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import SCORED, Cancelled, Failed, Rollout, Task, UsageError
from rookery.engine.config import EngineConfig
from rookery.environments.rescoring import SOURCE, make_rescoring_task
from rookery.journal import Journal, RunReader
from rookery.journal.schema import EndStatus
from rookery.upstreams.protocol import UpstreamConfig

FOLDER: Final = "rescores"
"""Directory in a run with the runs that graded it again."""
NO_POLICY: Final = UpstreamConfig(kind="none", urls=("none:",), model="none")


class Rescored(msgspec.Struct, frozen=True):
    """Result of grading a run again."""

    rollouts: int
    """Number of rollouts that were graded."""
    changed: int
    """Number of rollouts whose reward changed."""
    failed: int
    """Number of rollouts whose grading failed, so that they have no reward now."""


def can_rescore(record: Rollout) -> bool:
    """Return whether a stored rollout can be graded: its run stage ended, and its conversation is stored."""
    ran = isinstance(record.outcome, SCORED) or (
        isinstance(record.outcome, Failed) and record.outcome.stage == "score"
    )
    return ran and bool(record.tokens)


def plan_rescoring(
    folder: Path, *, scorer: Any = None, roles: dict[str, UpstreamConfig] | None = None, **changes: Any
) -> tuple[EngineConfig, list[Task]]:
    """Return the configuration and the tasks of the engine that grades a run again.

    `scorer` is a name, or a table with `name` and arguments; None means the environment of the run. `roles` are
    upstreams of model roles, which override those of the run. `changes` are fields of `EngineConfig` to change.
    Raise `UsageError` if the run has nothing to grade.
    """
    with RunReader(folder) as reader:
        try:
            stored = msgspec.convert(reader.config(), EngineConfig)
        except msgspec.ValidationError as error:
            raise UsageError(f"the configuration in {folder.name} cannot be read: {error}") from error
        arguments: dict[str, Any] = {"run": str(folder.resolve()), "superseded": reader.count_superseded()}
        tasks: list[Task] = []
        group, task = -1, None
        for record in reader.iter_rollouts():
            if record.group != group:
                group, task = record.group, reader.task_of(record.group)
            if task is not None and can_rescore(record):
                tasks.append(make_rescoring_task(task, record.id))
    if not tasks:
        raise UsageError(f"{folder.name} has no rollouts to grade: none of them ended its run stage")
    if scorer is not None:
        arguments["scorer"] = scorer
    elif stored.environment:
        arguments |= {"environment": stored.environment, "arguments": stored.arguments}
    else:
        raise UsageError(
            f"{folder.name} was started from Python with an environment object: name a scorer with --scorer NAME"
        )
    upstreams = {role: upstream for role, upstream in stored.upstreams.items() if role != "policy"}
    config = EngineConfig(
        environment=SOURCE,
        arguments=arguments,
        upstreams={"policy": NO_POLICY, **upstreams, **(roles or {})},
        sandbox=stored.sandbox,
        sandbox_named=stored.sandbox_named,
        limits=msgspec.structs.replace(stored.limits, turns=None, tokens=None, context=None),
        runners=stored.runners,
        concurrency=stored.concurrency,
        retry=stored.retry,
        record="plain",
        stream={"k": 1},
    )
    return msgspec.structs.replace(config, **changes), tasks


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
    if reader.count_superseded() != results.config()["arguments"]["superseded"]:
        raise UsageError(
            f"rollouts of {reader.folder.name} ran or were graded again meanwhile, so no score was changed: start "
            "`rookery rescore` again"
        )
    changed = failed = 0
    records: list[Rollout] = []
    for result in results.iter_rollouts():
        record = reader.rollout(result.task)
        if record is None or isinstance(result.outcome, Cancelled):
            continue
        new = _merge(record, result, scorer, graded.name)
        records.append(new)
        changed += new.reward != record.reward
        failed += new.reward is None
    return Rescored(len(records), changed, failed), records


def _merge(record: Rollout, result: Rollout, scorer: str, graded: str) -> Rollout:
    """Return the stored record with the score of `result`."""
    usage = msgspec.structs.replace(
        record.usage,
        others=_add(record.usage.others, result.usage.others),
        other_prompts=_add(record.usage.other_prompts, result.usage.other_prompts),
    )
    outcome = result.outcome
    if isinstance(outcome, Failed):  # for the stored rollout, the whole grading is its score stage
        outcome = msgspec.structs.replace(outcome, stage="score")
    return msgspec.structs.replace(
        record,
        outcome=outcome,
        reward=result.reward,
        rewards=result.rewards,
        metrics={**record.metrics, **result.metrics},
        info={**record.info, **result.info, "rescored": {"scorer": scorer, "run": graded}},
        usage=usage,
    )


def _add(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
