"""Summary of a run, read from its journal, as plain data. The command line and the viewer show it.

- The numbers come from the journal and not from the memory of a process, so all commands and the viewer agree.
- Rates count only valid rollouts, which have a reward. Intervals are clustered by task.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rookery.core.prices import Price
from rookery.journal.export import get_price_table
from rookery.view.stats import Stats

if TYPE_CHECKING:
    from rookery.journal import RunReader


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of rollouts and sampled tokens in a time, by one process or by all processes of a run."""

    seconds: float
    rollouts: int
    sampled_tokens: int


class Summary(msgspec.Struct, kw_only=True):
    """Summary of a run, read from its journal."""

    path: Path
    status: str
    environment: str
    model: str
    created: float
    tasks: int
    quarantined: int
    planned: int
    """Number of rollouts that the run will have, according to its journal."""
    stats: Stats
    groups: int = 0
    solved: int = 0
    """Number of groups with at least one reward of 1."""
    settings: dict[str, Any] = {}
    """The configuration that the run was started with."""

    @property
    def left(self) -> int:
        return max(0, self.planned - self.stats.rollouts)

    @property
    def total_throughput(self) -> Throughput:
        """Throughput over all processes that worked on the run."""
        stats = self.stats
        return Throughput(seconds=stats.busy.seconds, rollouts=stats.rollouts, sampled_tokens=stats.sampled_tokens)

    def plain(self, session: Throughput | None = None) -> dict[str, Any]:
        """Return the summary as plain data, for `--json`. Rates are those of `session`, else of the whole run."""
        stats = self.stats
        found: dict[str, Any] = {
            "run": str(self.path.resolve()),
            "status": self.status,
            "environment": self.environment,
            "model": self.model,
            "created": self.created,
            "settings": self.settings,
            "tasks": self.tasks,
            "quarantined": self.quarantined,
            "planned": self.planned,
            "unfinished": self.left,
            "biased_sample": self.left > 0,
            "rollouts": stats.rollouts,
            "valid": stats.valid,
            "failed": stats.failed,
            "cancelled": stats.cancelled,
            "ungraded": stats.ungraded,
            "truncated": dict(stats.truncated),
            "causes": {cause: failure.count for cause, failure in stats.causes()},
            "completed": stats.completed,
            "outcomes": dict(stats.labels),
            "solved": self.solved,
            "reward": stats.reward(),
            "turns": stats.turns,
            "drifted": stats.drifted,
            "without_tokens": stats.without_tokens,
            "prompt_tokens": stats.prompt_tokens,
            "sampled_tokens": stats.sampled_tokens,
            "metrics": stats.metric_means(),
            "cost": stats.cost,
        }
        if stats.environments:
            found["environments"] = {
                name: {
                    "tasks": len(one.tasks),
                    "rollouts": one.rollouts,
                    "valid": one.valid,
                    "failed": one.failed,
                    "causes": {cause: failure.count for cause, failure in one.causes()},
                    "reward": one.reward(),
                    "ungraded": one.ungraded,
                    "sampled_tokens": one.sampled_tokens,
                    "cost": one.cost,
                }
                for name, one in sorted(stats.environments.items())
            }
        if stats.levels:
            found["levels"] = [
                {"level": level, "valid": one.valid, "mean": one.mean} for level, one in stats.levels
            ]
        spent = session or self.total_throughput
        if spent.seconds > 0:
            found |= {
                "seconds": spent.seconds,
                "rollouts_per_second": spent.rollouts / spent.seconds,
                "tokens_per_second": spent.sampled_tokens / spent.seconds,
            }
        return found


def read_summary(
    reader: "RunReader", *, k: int | None = None, prices: Mapping[str, Price] | None = None
) -> Summary:
    """Read the summary of a run from its journal.

    `k` is the number of rollouts per task, if it is known. `prices` by model name override those of the run.
    """
    stats = Stats(get_price_table(reader.config(), prices))
    groups: dict[int, bool] = {}
    for record in reader.iter_rollouts():
        stats.add(record)
        groups[record.group] = groups.get(record.group, False) or (record.valid and record.reward == 1.0)
    return build_summary(reader, stats, groups, k=k)


def build_summary(
    reader: "RunReader", stats: Stats, groups: Mapping[int, bool], *, k: int | None = None
) -> Summary:
    """Return the summary of a run whose rollout records were already read.

    `stats` are the statistics over the records. `groups` says for each group whether one of its rewards is 1.
    """
    meta = reader.meta()
    tasks = quarantined = 0
    for row in reader.task_rows():
        tasks += 1
        quarantined += row.status == "quarantined"
    settings = reader.config()
    if k is None:
        k = int(settings.get("stream", {}).get("k", 0) or 0)
    planned = tasks * k if k else sum(row.k for row in reader.groups())
    return Summary(
        path=reader.folder,
        status=reader.status,
        environment=meta.get("env", ""),
        model=meta.get("model", ""),
        created=float(meta.get("created", 0.0)),
        tasks=tasks,
        quarantined=quarantined,
        planned=planned,
        stats=stats,
        groups=len(groups),
        solved=sum(groups.values()),
        settings=settings,
    )


_HIDDEN_SETTINGS: Final = frozenset({"environment", "stream.path", "explicit_sandbox_fields"})
"""Settings that are not listed, because they are shown elsewhere or only matter for `resume`."""
_DROPPED_PREFIXES: Final = ("stream.", "upstreams.", "sampling.", "arguments.")
"""Prefixes that are removed from the names of settings."""


def flatten_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the configuration of a run as names and texts. A stored configuration contains no default values."""
    return {
        _shorten(name): value for name, value in _flatten(config, "") if name not in _HIDDEN_SETTINGS and value
    }


def find_differing_settings(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of settings that differ between the runs, those with short values first.

    For a single run, return the names of all its settings.
    """
    names = dict.fromkeys(name for run in runs for name in run)
    found = [name for name in names if len(runs) == 1 or len({run.get(name) for run in runs}) > 1]
    return sorted(found, key=lambda name: max(len(run.get(name, "")) for run in runs))


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str):
        yield name, value
    elif isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        yield name, ",".join(value)
    else:
        yield name, msgspec.json.encode(value).decode()


def _shorten(name: str) -> str:
    for prefix in _DROPPED_PREFIXES:
        name = name.removeprefix(prefix)
    return name
