"""`rollout_func`: what `GRPOTrainer` calls instead of generating itself.

Promises:
- it answers with one row for each prompt, in order; prompts that stand together and are the same task are a group;
- the weights of the trainer's present step are the policy's before the first rollout begins;
- a rollout that failed is a row that does not train and has no reward; a group may fail whole;
- an error or Ctrl-C cancels the rollouts under way and leaves the engine usable; `close` ends everything;
- what cannot be right is refused in words before anything is sampled.
"""

import atexit
import logging
import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Any, Literal

from rookery.core import Rollout, RookeryError, Sampling, Task, UsageError, derive_seed
from rookery.core.closing import Closing
from rookery.engine import SyncEngine
from rookery.environments import Environment, load_environment
from rookery.training.trl.prompts import dataset, task_of, tasks_of
from rookery.training.trl.rows import (
    Baseline,
    Row,
    about,
    missing_row,
    most,
    segment_row,
    shaped,
    trained,
    usable_group,
)
from rookery.training.trl.weights import Push, settled_push
from rookery.upstreams.protocol import UpstreamConfig

STREAM = "trl"
BY_ROWS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""Losses of TRL that divide by the number of rows, those that do not train included."""

log = logging.getLogger("rookery.training.trl")


def rollout_func(
    env: Environment | str,
    *,
    policy: str | Sequence[str] | UpstreamConfig,
    tasks: Iterable[Task | dict[str, Any] | str] | None = None,
    push: Push | bool | None = None,
    baseline: Baseline = "leave_one_out",
    segments: Literal["most", "error"] = "most",
    sampling: Sampling | None = None,
    **options: Any,
) -> "RolloutFunc":
    """A rollout function for `GRPOTrainer`, over an engine of its own. `options` are those of `Engine`.

    `push` brings weights to the policy; an embedded policy with a path needs none; with `use_vllm` TRL does it.
    `segments` says what becomes of a rollout of several: the one that trains most is its row, or it is an error.
    Without `sampling`, temperature, cuts and the tokens of an answer are the trainer's.
    """
    return RolloutFunc(
        env,
        policy=policy,
        tasks=tasks,
        push=push,
        baseline=baseline,
        segments=segments,
        sampling=sampling,
        **options,
    )


class _Held:
    """The open engine; apart from its owner, so that it can be closed when the owner is gone."""

    def __init__(self) -> None:
        self.engine: SyncEngine | None = None

    def open(self, engine: SyncEngine) -> SyncEngine:
        engine.__enter__()
        self.engine = engine
        _open.add(self)
        _at_exit()
        return engine

    def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.__exit__(None, None, None)

    def let_go(self) -> None:
        """Closes in a thread: garbage may be collected in the engine's own, which would wait for itself."""
        if self.engine is not None:
            threading.Thread(target=self.close, name="rookery-trl-close").start()


_open: "weakref.WeakSet[_Held]" = weakref.WeakSet()


@cache
def _at_exit() -> None:
    """Closes what is open when the program ends: an engine in a thread does not end by itself."""
    # `atexit` comes too late: by then no thread pool works any more, and closing an engine needs one.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    for held in list(_open):
        held.close()


class RolloutFunc(Closing):
    """Use it as a context manager, so that its engine ends with the block; it opens at the first call."""

    def __init__(
        self,
        env: Environment | str,
        *,
        policy: str | Sequence[str] | UpstreamConfig,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        push: Push | bool | None = None,
        baseline: Baseline = "leave_one_out",
        segments: Literal["most", "error"] = "most",
        sampling: Sampling | None = None,
        **options: Any,
    ) -> None:
        if baseline not in ("leave_one_out", "mean"):
            raise UsageError(f"there is no baseline {baseline!r}; there is leave_one_out and mean")
        if segments not in ("most", "error"):
            raise UsageError(f"segments is 'most' or 'error', not {segments!r}")
        self.environment = (
            env if isinstance(env, Environment) else load_environment(env, **options.get("arguments", {}))
        )
        self.tasks = tasks_of(self.environment, tasks)
        self._known = {task.id: task for task in self.tasks}
        self._push = settled_push(policy, push)
        self._stays = push is False
        self._baseline: Baseline = baseline
        self._segments = segments
        self._sampling = sampling
        self._options = {"env": env, "policy": policy, **options}
        self._said: set[str] = set()
        self._held = _Held()
        self._version: int | None = None
        weakref.finalize(self, _Held.let_go, self._held).atexit = False

    def dataset(self) -> Any:
        """A `datasets.Dataset` of the tasks, for the trainer's `train_dataset`."""
        return dataset(self.tasks)

    # ---- life

    def close(self) -> None:
        """Ends the engine and everything under way. Closing twice is fine; a later call opens another one."""
        self._version = None
        self._held.close()

    @property
    def engine(self) -> SyncEngine | None:
        """The engine, once a call has opened it."""
        return self._held.engine

    def _opened(self, trainer: Any) -> SyncEngine:
        if self._held.engine is None:
            options = {"seed": trainer.args.seed, **self._options}
            # Processes that train together, and a training that is resumed, would else draw the same again.
            place = trainer.accelerator.process_index, int(trainer.state.global_step)
            options["seed"] = derive_seed(options["seed"], *place)
            return self._held.open(SyncEngine(sampling=self._sampled(trainer), **options))
        return self._held.engine

    def _sampled(self, trainer: Any) -> Sampling:
        """How the policy draws: as the trainer believes that it does."""
        if self._sampling is not None:
            said = self._sampling.temperature
            if said is not None and not math.isclose(said, trainer.temperature):
                raise UsageError(
                    f"the policy would sample at temperature {said:g}, and the trainer computes at "
                    f"{trainer.temperature:g}: give both the same"
                )
            return self._sampling.over(Sampling(temperature=trainer.temperature))
        extra = {"min_p": trainer.min_p, "repetition_penalty": trainer.repetition_penalty}
        return Sampling(
            temperature=trainer.temperature,
            top_p=trainer.top_p if trainer.top_p < 1.0 else None,
            top_k=trainer.top_k if trainer.top_k and trainer.top_k > 0 else None,
            max_tokens=trainer.max_completion_length,
            extra={name: value for name, value in extra.items() if value not in (None, 1.0)},
        )

    # ---- a call

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's contract: ids and logprobs by row, `env_mask`, and what reward functions get as columns."""
        self._check(trainer)
        asked = [task_of(prompt, self._known) for prompt in prompts]
        k = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        engine = self._opened(trainer)
        self._sync(engine, trainer)
        began = time.monotonic()
        rollouts = _collected(engine, asked, k)
        _report(rollouts, time.monotonic() - began)
        return self._answer(rollouts, trainer, k)

    def _check(self, trainer: Any) -> None:
        if trainer.tools or trainer.environment_factories is not None:
            raise UsageError(
                "the trainer has tools or an environment_factory of its own: with rollout_func, tools belong to "
                "the Rookery environment"
            )
        if self._push is None and not self._stays and not trainer.use_vllm:
            raise UsageError(
                "nothing brings the trainer's weights to the policy: name it as embedded:PATH, give rollout_func "
                "push=… (a function of the tensors and their version), or push=False for a policy that is to stay "
                "as it is"
            )

    def _sync(self, engine: SyncEngine, trainer: Any) -> None:
        """Brings the weights of the present step to the policy, once for each."""
        version = int(trainer.state.global_step)
        if self._stays or version == self._version:
            return
        push = self._push
        if push is None:  # TRL has pushed them to its vLLM before it called us; nothing is under way meanwhile
            engine.resume(version)
        else:
            # Every process takes part in gathering a sharded model; one of them pushes.
            tensors = trainer.accelerator.get_state_dict(trainer.model)
            first = trainer.accelerator.is_main_process
            with engine.sync(version, load=lambda: push(tensors, version) if first else None):
                trainer.accelerator.wait_for_everyone()
        self._version = version

    def _answer(self, rollouts: Sequence[Rollout], trainer: Any, k: int) -> dict[str, list[Any]]:
        filler = trainer.eos_token_ids[0]
        made = [self._row(rollout, filler) for rollout in rollouts]
        rewards = [rollout.reward if rollout.valid else None for rollout in rollouts]
        everyone, first = _gathered(rewards, trainer)
        weight = self._weight(everyone, trainer)
        given = shaped(everyone, k, baseline=self._baseline, weight=weight)[first : first + len(rewards)]
        return {
            **{name: [getattr(row, name) for row in made] for name in Row._fields},
            "rookery_reward": given,
            "rollout": [about(rollout) for rollout in rollouts],
        }

    def _row(self, rollout: Rollout, filler: int) -> Row:
        segments = trained(rollout)
        if not segments:
            return missing_row(filler)
        if len(segments) > 1:
            if self._segments == "error":
                raise UsageError(
                    f"rollout {rollout.id} of task {rollout.task} has {len(segments)} segments, and GRPOTrainer "
                    "takes one row for each rollout: use RolloutWorker with AsyncGRPOTrainer, or segments='most'"
                )
            self._say(
                "segments",
                "rollout %s has %d segments: the one that trains most is its row, the others are left out "
                "(rookery/tokens_left_out says how much)",
                rollout.id,
                len(segments),
            )
        return segment_row(most(segments))

    def _weight(self, rewards: Sequence[float | None], trainer: Any) -> float:
        """Makes up for rows that do not train, where TRL divides by rows."""
        valid = sum(reward is not None for reward in rewards)
        if trainer.loss_type not in BY_ROWS or valid in (0, len(rewards)):
            return 1.0
        if trainer.scale_rewards != "none":
            self._say(
                "rows",
                "rollouts are missing and loss_type=%s divides by rows: with scale_rewards=%s the others weigh "
                "less than they should; use scale_rewards='none', or a loss by tokens as 'dapo' is",
                trainer.loss_type,
                trainer.scale_rewards,
            )
            return 1.0
        return len(rewards) / valid

    def _say(self, once: str, message: str, *values: object) -> None:
        if once not in self._said:
            self._said.add(once)
            log.warning(message, *values)


def _gathered(rewards: Sequence[float | None], trainer: Any) -> tuple[list[float | None], int]:
    """The rewards of all processes in order, and where ours begin: a group may lie in two of them."""
    processes = trainer.accelerator.num_processes
    if processes == 1:
        return list(rewards), 0
    import torch

    own = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    found = trainer.accelerator.gather(own.to(trainer.accelerator.device)).tolist()
    everyone = [None if math.isnan(reward) else reward for reward in found]
    return everyone, trainer.accelerator.process_index * len(rewards)


def _collected(engine: SyncEngine, asked: Sequence[Task], k: int) -> list[Rollout]:
    """One rollout for each task asked for; equal neighbours, at most k, are one group."""
    runs: list[tuple[Task, list[int]]] = []
    for place, task in enumerate(asked):
        if runs and runs[-1][0].id == task.id and len(runs[-1][1]) < k:
            runs[-1][1].append(place)
        else:
            runs.append((task, [place]))
    found: dict[int, Rollout] = {}
    for size in sorted({len(places) for _, places in runs}, reverse=True):
        some = [(task, places) for task, places in runs if len(places) == size]
        waiting: dict[str, deque[list[int]]] = {}
        for task, places in some:
            waiting.setdefault(task.id, deque()).append(places)
        # An iterator, not a list: a task may stand in it twice.
        groups = engine.groups(
            iter([task for task, _ in some]),
            k=size,
            name=STREAM,
            restart=True,
            buffer=max(1, len(some)),
            need_tokens=True,
        )
        with closing(groups):  # type: ignore[type-var]
            for group in groups:
                places = waiting[group.task.id].popleft()
                found.update(zip(places, usable_group(group).rollouts, strict=True))
    if len(found) != len(asked):
        raise RookeryError(f"{len(asked)} rollouts were asked for and {len(found)} came back")
    return [found[place] for place in range(len(asked))]


def _report(rollouts: Sequence[Rollout], seconds: float) -> None:
    missing = Counter(about(rollout)["outcome"] for rollout in rollouts if not rollout.valid)
    valid = [rollout.reward for rollout in rollouts if rollout.valid and rollout.reward is not None]
    log.log(
        logging.WARNING if missing else logging.INFO,
        "%d rollouts in %.1f s, mean reward %s, missing: %s",
        len(rollouts),
        seconds,
        f"{math.fsum(valid) / len(valid):.3f}" if valid else "-",
        ", ".join(f"{count} {cause}" for cause, count in missing.most_common()) or "none",
    )


def reward(
    *,
    rookery_reward: Sequence[float | None],
    rollout: Sequence[Mapping[str, Any]],
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """The reward function to give the trainer: what Rookery's rollouts were scored, None for those that failed."""
    if log_metric is not None:
        for name, value in figures(rollout).items():
            log_metric(name, value)
    return list(rookery_reward)


def figures(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What is worth a line in the trainer's log: shares over all rollouts, means over the valid ones."""
    valid = [rollout for rollout in rollouts if rollout["reward"] is not None]
    found = {"rookery/missing": 1.0 - len(valid) / len(rollouts)}
    for cause, count in Counter(one["outcome"] for one in rollouts if one["reward"] is None).items():
        found[f"rookery/missing/{cause}"] = count / len(rollouts)
    if valid:
        for name in ("reward", "turns", "tool_calls", "tokens_left_out"):
            found[f"rookery/{name}"] = math.fsum(one[name] for one in valid) / len(valid)
        for name in sorted({name for one in valid for name in one["metrics"]}):
            values = [one["metrics"][name] for one in valid if name in one["metrics"]]
            found[f"rookery/metrics/{name}"] = math.fsum(values) / len(values)
    return found
