"""Prepare a training run: the engine that samples, the tasks, the device and the learning rate."""

import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from rookery.core import Group, Sampling, Task, UsageError
from rookery.core.errors import suggestion
from rookery.engine import EngineConfig, SyncEngine
from rookery.engine.config import refuse_training
from rookery.environments import Environment
from rookery.environments.mixture import MIXTURE, get_entries
from rookery.tasks import DifficultySampler, tasks_from
from rookery.tasks.samplers import SamplerFactory, find_sampler
from rookery.trainer.config import TrainConfig
from rookery.trainer.policies import TrainablePolicy, check_address
from rookery.training import (
    Batch,
    BatchConfig,
    PackedRow,
    PrefixTreeRow,
    compare_prefixes,
    make_batch,
    pack,
    pack_prefix_trees,
)
from rookery.upstreams import UpstreamConfig

if TYPE_CHECKING:
    import torch

Row: TypeAlias = PackedRow | PrefixTreeRow
LEARNING_RATES = {"embedded": 2e-4}
"""Default learning rates by kind of policy. The embedded policy is small and takes large steps."""
OTHER_LEARNING_RATE = 1e-6
_NEUTRAL: Final[dict[str, Any]] = {
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": None,
    "response_format": None,
    "structured_outputs": None,
}
"""Sampling parameters that change the distribution of the policy, with the values that do not."""
_PROBE: Final = "Ünïcode 12345, tokens:\n\tprint('{}')  <|im_start|>user\n語</s>"
"""A text whose token IDs tell whether two tokenizers are the same."""


def check_config(config: TrainConfig, policy: str) -> TrainConfig:
    """Return the settings with an absolute path in `save`. Raise `UsageError` if no training can start with them.

    Nothing is loaded or opened.
    """
    if config.steps is None and config.minutes is None:
        raise UsageError("set steps or minutes: training has no end otherwise")
    check_address(policy, config)
    packages = {"torch": "train", "transformers": "train"} | {name: name for name in config.log_to}
    if config.lora_rank:
        packages["peft"] = "lora"
    for package, extra in packages.items():
        found = find_spec(package)
        if found is None or found.origin is None:  # a directory of this name, such as W&B's, is no package
            raise UsageError(f"these settings need the package {package}: pip install 'rookery-rl[{extra}]'")
    return prepare_target(config)


def open_engine(
    env: Environment | str,
    policy: TrainablePolicy,
    out: Path,
    config: EngineConfig | None,
    options: dict[str, Any],
) -> SyncEngine:
    """Return an engine that samples from the policy. Every model call is seeded.

    The settings come from `config`, or from `options`, which are arguments of `Engine`. Raise `UsageError` for
    sampling parameters with which the sampled log probabilities are not those of the trained policy.
    """
    upstream = UpstreamConfig()
    if config is None:
        here: dict[str, Any] = {"runners": 0} if policy.in_process else {}
        if policy.tokenizer and (options.get("record") or "tokens") == "tokens":
            here["rendering"] = choose_tokenizer(policy, options.get("rendering") or {})
        policy_config = UpstreamConfig(**policy.upstream)
        engine = SyncEngine(env, policy=policy_config, out=out, **{"seed": 0} | options | here)
    else:
        upstream = config.upstreams.get("policy", upstream)
        policy_config = msgspec.structs.replace(upstream, **policy.upstream)
        renders = policy.tokenizer and config.record in (None, "tokens")
        config = msgspec.structs.replace(
            config,
            upstreams={**config.upstreams, "policy": policy_config},
            rendering=choose_tokenizer(policy, config.rendering) if renders else config.rendering,
            seed=config.seed or 0,
            runners=0 if policy.in_process else config.runners,
        )
        engine = SyncEngine(env, config=config, out=out)
    check_engine(engine.environment, engine.config, upstream.sampling)
    return engine


def check_engine(environment: Environment, config: EngineConfig, of_policy: Sampling) -> None:
    """Raise `UsageError` if rollouts cannot be trained: distorted sampling, no token IDs, or cached replies.

    `of_policy` are the sampling parameters that the user sets for the policy.
    """
    of_run = of_policy.over(config.sampling)
    for entry in get_entries(environment).values():
        check_sampling(entry.sampling.over(of_run).over(entry.environment.sampling))
    refuse_training(config)


def get_title(env: Environment | str, config: EngineConfig | None) -> str:
    """Return the name of the environment for the directory of a training run."""
    if env == MIXTURE and config is not None:
        return str(config.arguments.get("name", "mixture"))
    return env if isinstance(env, str) else env.title


def check_sampling(sampling: Sampling) -> None:
    """Raise `UsageError` if sampling parameters change the distribution of the policy."""
    if sampling.temperature not in (None, 1) or sampling.top_p not in (None, 1) or sampling.top_k not in (None, 0):
        raise UsageError(
            "training needs samples of the policy itself: set temperature and top_p to 1 and top_k to 0, or leave "
            "them out"
        )
    if distorting := [name for name, off in _NEUTRAL.items() if sampling.extra.get(name, off) != off]:
        raise UsageError(
            f"training needs samples of the policy itself: remove {distorting[0]} from the sampling parameters"
        )


def choose_tokenizer(policy: TrainablePolicy, rendering: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the chat format. Without a tokenizer, they get that of the policy's model.

    Raise `UsageError` if they name a tokenizer with other token IDs than the model's own.
    """
    from rookery.gateway.chat_renderers.tokenizer import open_tokenizer

    if named := rendering.get("tokenizer"):
        if open_tokenizer(named).encode(_PROBE) != open_tokenizer(policy.tokenizer).encode(_PROBE):
            raise UsageError(
                f"the tokenizer {named!r:.200} does not match the model: it has other token IDs than that at "
                f"{policy.tokenizer}. Leave out --tokenizer"
            )
        return rendering
    return {"tokenizer": policy.tokenizer, **rendering}


def split_tasks(
    environment: Environment, tasks: Sequence[Task] | None, held_out: Sequence[Task] | None, count: int
) -> tuple[list[Task], list[Task]]:
    """Return the tasks to train on, and `count` tasks to evaluate on. The two have no task in common.

    If neither `held_out` nor the environment has tasks for an evaluation, the last tasks are held out. Raise
    `UsageError` if there is only one.
    """
    own = environment.own_limits
    chosen = (
        list(tasks)
        if tasks is not None
        else list(tasks_from(environment.tasks(), environment.title, own_limits=own))
    )
    if held_out is None and count and tasks is None:
        found = environment.held_out_tasks(count)
        held_out = None if found is None else tasks_from(found, environment.title, own_limits=own)
    if held_out is not None:
        evaluated = list(held_out)[:count]
        ids = {task.id for task in evaluated}
        chosen = [task for task in chosen if task.id not in ids]
    else:
        if count and len(chosen) == 1:
            raise UsageError(
                f"{environment.title} has a single task, so none can be held out: use more tasks, or "
                "--eval-tasks 0 to train without an evaluation"
            )
        count = min(count, len(chosen) // 2)
        chosen, evaluated = (chosen[:-count], chosen[-count:]) if count else (chosen, [])
    if not chosen:
        raise UsageError(f"{environment.title} has no tasks to train on: all of them are held out")
    return chosen, evaluated


def batch_config(config: TrainConfig) -> BatchConfig:
    """Return the settings for making batches."""
    return BatchConfig(
        baseline=config.baseline,
        scale=config.scale,
        environment_scale=config.environment_scale,
        quotas=config.quotas,
        part_weights=config.part_weights,
        normalise=config.normalise,
        length=config.length,
        uninformative="leave_out" if config.refill else "count",
        extras=(),
    )


def check_quotas(environment: Environment, config: TrainConfig) -> None:
    """Raise `UsageError` if `quotas` are invalid, or name an environment that is not in the mixture."""
    batch_config(config)
    known = [name for name in get_entries(environment) if name]
    for name in config.quotas:
        if name not in known:
            problem = f"its environments are {', '.join(known)}" if known else "it is not a mixture"
            raise UsageError(
                f"quotas: {environment.title} has no environment {name!r:.80}: {problem}{suggestion(name, known)}"
            )


def choose_sampler(config: TrainConfig) -> SamplerFactory | None:
    """Return the factory of the task samplers, or None if the tasks are repeated in their order.

    Raise `UsageError` if `curriculum` names no sampler, or the settings of one are invalid.
    """
    if config.curriculum == "uniform":
        return None
    factory = find_sampler(config.curriculum)
    if factory is DifficultySampler:
        factory = partial(
            DifficultySampler, low=config.difficulty_low, high=config.difficulty_high, recheck=config.recheck
        )
        factory(1)  # raises if the window is invalid
    return factory


def build_batch(groups: Sequence[Group], config: TrainConfig) -> Batch:
    """Return the training batch of a step's groups."""
    batch = make_batch(sorted(groups, key=lambda group: group.index), batch_config(config))
    return compare_prefixes(batch) if config.compare == "prefix" else batch


def choose_device(config: TrainConfig) -> "tuple[torch.device, torch.dtype | None]":
    """Return the device of the trained model, and the type for autocast; None is the model's own precision.

    The number of CPU threads of torch is set as well. Runners need cores, too, and threads that wait for a core
    spin, so the default is half of the cores.
    """
    import torch

    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // 2))
    name = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {config.device!r:.80} is unknown: use auto, cpu or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, but torch finds no GPU: use auto or cpu")
    half = config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda")
    return device, torch.bfloat16 if half else None


def choose_learning_rate(config: TrainConfig, policy: str) -> float:
    """Return the learning rate of the settings, or the default for the kind of policy."""
    return config.learning_rate or LEARNING_RATES.get(policy.partition(":")[0], OTHER_LEARNING_RATE)


def choose_prefix_sharing(config: TrainConfig, model: Any) -> bool:
    """Return whether rows are prefix trees.

    The attention mask of a prefix tree knows no sliding windows, and kernels for GPUs are faster without a mask.
    """
    if config.share_prefixes is not None:
        return config.share_prefixes
    text = model.config.get_text_config()
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    on_cpu = next(model.parameters()).device.type == "cpu"
    return on_cpu and not windowed and set(kinds) == {"full_attention"}


def make_rows(batch: Batch, length: int, *, share_prefixes: bool) -> list[Row]:
    """Return the segments of a batch in rows of `length` tokens. A longer segment gets a row of its own."""
    if share_prefixes:
        return [*pack_prefix_trees(batch, length)]
    return [*pack(batch, length, oversize="alone")]


def prepare_target(config: TrainConfig) -> TrainConfig:
    """Return the settings with an absolute path in `save`. Raise `UsageError` if something is at that path."""
    if config.save is None:
        return config
    target = Path(config.save).expanduser().absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"save: {target} exists and is no empty directory: choose a new one")
    return msgspec.structs.replace(config, save=str(target))
