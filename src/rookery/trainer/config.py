"""Settings of a training run. Every field is an option of `rookery train` and a key of the `[train]` table.

Nothing heavier than msgspec is imported, so that `rookery train --help` does not import torch.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec
from msgspec import Meta

from rookery.core import UsageError
from rookery.core.errors import suggestion

Correction: TypeAlias = Literal["tis", "icepop", "dppo", "none"]
_Count: TypeAlias = Annotated[int, Meta(ge=1)]
_Natural: TypeAlias = Annotated[int, Meta(ge=0)]
_Positive: TypeAlias = Annotated[float, Meta(gt=0)]
_NotNegative: TypeAlias = Annotated[float, Meta(ge=0)]


def _help(text: str) -> Meta:
    return Meta(description=text)


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a training run. They are validated on construction."""

    steps: Annotated[_Count | None, _help("Number of training steps.")] = None
    minutes: Annotated[_Positive | None, _help("Time limit in minutes, evaluations included.")] = None

    push: Annotated[
        Literal["vllm", "sglang"] | None,
        _help("Sample with a server of this kind, and push new weights to it; needs --server."),
    ] = None
    server: Annotated[
        tuple[str, ...],
        _help("With --push: URL of the server; once for each replica. It reads the run's directory."),
    ] = ()

    group_size: Annotated[_Count, _help("Rollouts per task (the group whose rewards are compared).")] = 8
    groups: Annotated[_Count, _help("Groups per training step.")] = 16
    lag: Annotated[
        _Natural, _help("How many policy versions a token may be behind; 0 samples only between updates.")
    ] = 1
    refill: Annotated[bool, _help("Replace groups whose rewards are all equal (DAPO's dynamic sampling).")] = True
    max_refill: Annotated[
        _Count, _help("Groups to sample for a step, as a multiple of --groups, before it takes equal rewards.")
    ] = 8

    curriculum: Annotated[
        str,
        _help(
            "Task sampler: repeat all tasks (uniform), skip those whose last rewards were equal for a few epochs "
            "(skip-settled) or whose mean reward is outside of a window (difficulty), or your own (module:Class)."
        ),
    ] = "uniform"
    difficulty_low: Annotated[float, _help("difficulty: lowest mean reward of a task that is not skipped.")] = 0.1
    difficulty_high: Annotated[float, _help("difficulty: highest mean reward of a task that is not skipped.")] = (
        0.9
    )
    recheck: Annotated[_Natural, _help("difficulty: epochs after which a skipped task is tried again.")] = 4

    baseline: Annotated[Literal["leave_one_out", "mean", "none"], _help("What is subtracted from a reward.")] = (
        "leave_one_out"
    )
    compare: Annotated[
        Literal["group", "prefix"],
        _help(
            "Compare a token's reward with those of the group, or of the rollouts with the same tokens before it."
        ),
    ] = "group"
    scale: Annotated[
        Literal["none", "std"], _help("Divide advantages by the standard deviation of the group.")
    ] = "none"
    environment_scale: Annotated[
        Literal["none", "std"],
        _help("Divide advantages by their root mean square in each environment of a mixture."),
    ] = "none"
    quotas: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1)]],
        _help("Share of the loss that an environment of a mixture gets, for example words=0.25. Repeatable."),
    ] = {}
    part_weights: Annotated[
        dict[str, float],
        _help(
            "Weight of a part of the reward, for example correct=1; parts without a weight do not count. "
            "Repeatable.  [default: the environment's]"
        ),
    ] = {}
    normalise: Annotated[
        Literal[
            "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
        ],
        _help("How token losses are averaged; seq-mean-token-sum-norm is Dr. GRPO."),
    ] = "token-mean"
    length: Annotated[_Count | None, _help("The constant that seq-mean-token-sum-norm divides by.")] = None

    correction: Annotated[
        Correction, _help("Correction for tokens of older versions: truncated or masked importance ratios.")
    ] = "tis"
    tis_cap: Annotated[_Positive, _help("tis: largest importance ratio.")] = 2.0
    icepop_low: Annotated[_Positive, _help("icepop: tokens with a smaller ratio do not train.")] = 0.5
    icepop_high: Annotated[_Positive, _help("icepop: tokens with a larger ratio do not train.")] = 5.0
    dppo_threshold: Annotated[
        _Positive, _help("dppo: tokens whose probability already moved further than this do not train.")
    ] = 0.2
    clip_low: Annotated[float, Meta(gt=0, le=1), _help("The ratio is clipped below 1 - clip_low.")] = 0.2
    clip_high: Annotated[_Positive, _help("The ratio is clipped above 1 + clip_high.")] = 0.28
    kl: Annotated[_NotNegative, _help("Coefficient of the KL divergence from the initial policy.")] = 0.0

    epochs: Annotated[_Count, _help("Passes over the rollouts of a step.")] = 1
    minibatches: Annotated[_Count, _help("Optimiser updates per pass.")] = 2
    learning_rate: Annotated[
        _Positive | None, _help("Learning rate of AdamW.  [default: 2e-4 for embedded, 1e-6 for others]")
    ] = None
    warmup: Annotated[_Natural, _help("Steps of linear warm-up of the learning rate.")] = 5
    decay: Annotated[
        float,
        Meta(ge=0, le=1),
        _help("Share by which the learning rate falls, linearly over the run; 0 is constant."),
    ] = 0.9
    weight_decay: Annotated[_NotNegative, _help("Weight decay of AdamW.")] = 0.0
    grad_clip: Annotated[_Positive, _help("Largest norm of the gradient.")] = 1.0
    row_tokens: Annotated[
        _Count | None,
        _help(
            "Tokens per packed row; gradients of all rows are accumulated.  [default: 512 on CPUs, 8192 on GPUs]"
        ),
    ] = None
    share_prefixes: Annotated[
        bool | None,
        _help(
            "Compute the common prefixes of sequences once.  [default: on CPUs, if no layer of the model has a "
            "sliding window]"
        ),
    ] = None
    lora_rank: Annotated[_Natural, _help("Rank of LoRA adapters; 0 trains all weights.")] = 0
    lora_alpha: Annotated[_Count, _help("Scale of LoRA adapters.")] = 32
    device: Annotated[str, _help("Device of the trained model, such as cuda:0; auto prefers a GPU.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], _help("Precision of the forward pass; auto is bfloat16 on a GPU.")
    ] = "auto"

    threads: Annotated[_Count | None, _help("CPU threads of the trained model.  [default: half of the cores]")] = (
        None
    )

    eval_every: Annotated[_Natural, _help("Steps between evaluations; 0 evaluates at the start and the end.")] = 20
    eval_tasks: Annotated[_Natural, _help("Number of held-out tasks; 0 does not evaluate.")] = 200
    eval_per_task: Annotated[_Count, _help("Rollouts per held-out task.")] = 2
    checkpoint_every: Annotated[_Count, _help("Steps between checkpoints.")] = 10
    keep_checkpoints: Annotated[_Count, _help("Number of checkpoints to keep.")] = 2
    save: Annotated[
        str | None,
        _help("Directory to which the trained model is written at the end, in the format of transformers."),
    ] = None
    ratios: Annotated[bool, _help("Write the importance ratio of each trained token, for `rookery view`.")] = True
    log_to: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...], _help("Also log metrics to TensorBoard, or W&B (offline).")
    ] = ()

    def __post_init__(self) -> None:
        for name, kind in field_types().items():
            try:
                msgspec.convert(getattr(self, name), kind)
            except msgspec.ValidationError as error:
                raise UsageError(f"{name}: {str(error).partition(' - at ')[0]}") from None
        if (self.normalise == "seq-mean-token-sum-norm") != (self.length is not None):
            raise UsageError("set length if and only if normalise is 'seq-mean-token-sum-norm'")
        if self.group_size < 2 and self.baseline != "none":
            raise UsageError("group_size must be at least 2: the baseline of a rollout is the rest of its group")
        if self.compare == "prefix" and (self.baseline, self.scale) != ("leave_one_out", "none"):
            raise UsageError("compare='prefix' needs baseline='leave_one_out' and scale='none'")
        if (self.push is None) != (not self.server):
            raise UsageError("set push and server together: --push vllm --server http://localhost:8000")
        if self.icepop_low >= self.icepop_high:
            raise UsageError("icepop_low must be less than icepop_high")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Return the settings in a mapping. Raise `UsageError` for an unknown or invalid key."""
        for key in values:
            if key not in cls.__struct_fields__:
                hint = (
                    suggestion(key, cls.__struct_fields__) or f"; its keys are {', '.join(cls.__struct_fields__)}"
                )
                raise UsageError(f"the training settings have no key {key!r}{hint}")
        return cls(**values)


@cache
def field_types() -> dict[str, Any]:
    """Return the annotated type of each field of `TrainConfig`."""
    return get_type_hints(TrainConfig, include_extras=True)
