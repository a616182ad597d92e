"""The adapter for verl, with verl's own configuration, TransferQueue, replay buffer and advantages on a CPU."""

import asyncio
import os
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rookery.core import RookeryError, Sampling, UsageError, ints
from rookery.journal import RunReader, find_run
from rookery.training.advantages import compute_advantages
from rookery.upstreams import ModelRequest, UpstreamConfig
from rookery.upstreams.embedded import EmbeddedUpstream
from tests.adapters.kit import ByteTokenizer, bigram_gradient, make_task, save_model
from tests.processes import cmdline, descendants
from tests.waiting import block_until

pytestmark = [pytest.mark.needs("verl"), pytest.mark.long, pytest.mark.timeout(600)]
SECONDS = 500.0
"""The workers of Ray start slowly on a busy machine."""
K = 4
TASKS = [
    make_task("whole", [1.0, 0.0, 0.5, 0.0], conversations=2),
    make_task("broken", [1.0, 0.0, None, 0.5]),
    make_task("reduced", [1.0, 0.0, 0.5]),
    make_task("lone", [None, 0.75, None, None]),
    make_task("lost", [None, None, None, None]),
]


class EmbeddedClient:
    """A client like verl's `LLMServerClient`, which samples with the embedded inference engine."""

    def __init__(self, folder: Path, step: int = 3) -> None:
        self.config = UpstreamConfig(kind="embedded", urls=(f"embedded:{folder}",))
        self.step = step
        self.calls: list[dict[str, Any]] = []

    @cached_property
    def upstream(self) -> EmbeddedUpstream:
        return EmbeddedUpstream(self.config)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.calls.append({"session": request_id, **sampling_params})
        chosen = {name: sampling_params[name] for name in ("temperature", "top_p", "top_k", "max_tokens")}
        request = ModelRequest(
            tokens=ints(prompt_ids),
            sampling=Sampling(**chosen),
            stop_ids=tuple(sampling_params.get("stop_token_ids", ())),
        )
        reply = await self.upstream.complete(request, timeout=60)
        return TokenOutput(
            token_ids=memoryview(reply.sampled).cast("i").tolist(),
            log_probs=memoryview(reply.logprobs).cast("f").tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": self.step},
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    """Return verl's own default configuration with the changes that the guide shows."""
    import verl
    from hydra import compose, initialize_config_dir

    changes = [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={K}",
        "actor_rollout_ref.rollout.response_length=8",
        "actor_rollout_ref.rollout.prompt_length=64",
        "actor_rollout_ref.rollout.agent.default_agent_loop=rookery",
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "transfer_queue.enable=true",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+rookery.env=tests.adapters.kit:ScriptedEnvironment",
        "+rookery.rendering.name=embedded",
        "+rookery.retry.attempts=1",
        "+rookery.tasks=[]",
        f"+rookery.out={model / 'runs'}",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        made = compose("ppo_trainer", overrides=changes)
    made.rookery.tasks = TASKS
    return made


def start_ray(folder: str) -> None:
    """Start a Ray cluster of one node. Ray gives a node only 30 s to start, so it is tried more than once."""
    import ray

    for tries_left in reversed(range(4)):
        try:
            ray.init(
                address="local",  # never a cluster that somebody else started on this machine
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 * 1024 * 1024,
                _temp_dir=folder,
            )
            return
        except Exception as error:
            ray.shutdown()
            if not tries_left or "timed out" not in str(error):
                raise


@pytest.fixture(scope="module")
def transfer_queue(config: Any) -> Iterator[Any]:
    import ray
    import transfer_queue

    # A short path: Ray creates Unix sockets below it.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        start_ray(folder)
        try:
            transfer_queue.init(config.transfer_queue)
            yield transfer_queue
            transfer_queue.close()
        finally:
            ray.shutdown()


def make_prompts(names: Sequence[str]) -> Any:
    """Return prompts as verl's trainer submits them."""
    from verl.utils import tensordict_utils

    count = len(names)
    extra = [{"index": n, "task": name} for n, name in enumerate(names)]
    batch = tensordict_utils.get_tensordict(
        {
            "raw_prompt": np.array([[{"role": "user", "content": "x"}]] * count + [None], dtype=object)[:-1],
            "extra_info": np.array([*extra, None], dtype=object)[:-1],
            "index": np.arange(count),
            "uid": np.array([str(uuid.uuid4()) for _ in names], dtype=object),
        }
    )
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", 3)
    return batch


def submit(queue: Any, prompts: Any) -> None:
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 3} for _ in range(len(prompts))]
    queue.kv_batch_put(keys=list(prompts["uid"]), partition_id="train", tags=tags)


def sample(config: Any, prompts: int) -> Any:
    """Take groups out of verl's replay buffer, as its synchronous trainer does."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    buffer = ReplayBuffer("sync", config.trainer, None, "drop", None, poll_interval=0.2)
    batch, _ = buffer.sample(global_steps=3, partition_id="train", batch_size=prompts)
    return batch


def read_advantages(queue: Any, batch: Any, config: Any) -> dict[str, Any]:
    """Compute advantages with verl's code, and return tokens, mask and advantage of each row by its key."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    names = ["uid", "response_mask", "rm_scores", "rollout_log_probs"]
    stored = queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=names)
    data = DataProto(batch=stored.to_padded_tensor())
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data.non_tensor_batch["uid"] = np.array(data.batch.pop("uid").tolist(), dtype=object)
    computed = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=batch.keys,
        adv_estimator=config.algorithm.adv_estimator,
        norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
        config=config.algorithm,
    )
    tokens = queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["input_ids", "loss_mask"])
    rows = {}
    for at, key in enumerate(batch.keys):
        ids, mask = tokens["input_ids"][at].tolist(), tokens["loss_mask"][at].tolist()
        trained = computed.batch["response_mask"][at].bool()
        values = computed.batch["advantages"][at][trained].unique().tolist()
        assert len(values) == 1, values
        rows[key] = (ids, [0] * (len(ids) - len(mask)) + mask, values[0])
    return rows


def test_missing_rollouts_have_no_row_and_no_place_in_verls_baseline(
    transfer_queue: Any, config: Any, model: Path
) -> None:
    from rookery.adapters.verl import RookeryManager

    client = EmbeddedClient(model)
    manager = RookeryManager.create(config, client)
    try:
        prompts = make_prompts([task["id"] for task in TASKS])
        submit(transfer_queue, prompts)
        uids = dict(zip([task["id"] for task in TASKS], list(prompts["uid"]), strict=True))
        # Three members, as if the failed member of `broken` had never been requested.
        by_size = {name: 3 if name == "reduced" else K for name in uids}
        prompts["__rollout_n__"] = np_tensor([by_size[name] for name in uids])
        manager.generate_sequences(prompts)
        batch = sample(config, len(TASKS))
        rows = read_advantages(transfer_queue, batch, config)
    finally:
        manager.close()
    found = {
        name: {key.removeprefix(f"{uid}_") for key in rows if key.startswith(uid)} for name, uid in uids.items()
    }
    assert found == {
        "whole": {f"{member}_{segment}" for member in range(K) for segment in range(2)},
        "broken": {"0_0", "1_0", "3_0"},
        "reduced": {"0_0", "1_0", "2_0"},
        "lone": {"1_0"},
        "lost": set(),
    }
    wanted = {task["id"]: compute_advantages(task["rewards"]).tolist() for task in TASKS}
    for name, uid in uids.items():
        for key in found[name]:
            assert rows[f"{uid}_{key}"][2] == pytest.approx(wanted[name][int(key[0])], abs=1e-6), (name, key)
    # The gradient is that of the group without the failed member, whose rewards are the same.
    kept = [rows[f"{uids['broken']}_{member}_0"] for member in (0, 1, 3)]
    swapped = [(*row[:2], wanted["reduced"][at]) for row, at in zip(kept, (0, 1, 2), strict=True)]
    np.testing.assert_allclose(bigram_gradient(kept), bigram_gradient(swapped), atol=1e-9)
    assert {tag["min_global_steps"] for tag in batch.tags} == {3}
    assert {(call["temperature"], call["top_p"], call["top_k"]) for call in client.calls} == {(1.0, 1.0, -1)}


def np_tensor(values: list[int]) -> Any:
    import torch

    return torch.tensor(values)


def test_agent_loop_drops_a_failed_rollout_in_verls_own_worker(
    transfer_queue: Any, config: Any, model: Path
) -> None:
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    from rookery.adapters import trainer_engine
    from rookery.adapters.verl import agent_loop

    prompts = make_prompts(["scored", "failing"])
    submit(transfer_queue, prompts)
    scored, failing = prompts["uid"]
    own = OmegaConf.merge(
        config, {"rookery": {"tasks": [make_task("scored", [0.25]), make_task("failing", [None])]}}
    )

    async def run() -> None:
        worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class(own, EmbeddedClient(model))
        await worker.generate_sequences(prompts)
        await asyncio.gather(*worker.background_tasks)

    before = set(threading.enumerate())
    asyncio.run(run())
    # verl ends without a call. What closes the engines when the worker process exits is called here.
    assert {one for one in threading.enumerate() if one.name == "rookery-engine"} - before
    trainer_engine.close_all()
    assert not {one for one in threading.enumerate() if one.name == "rookery-engine"} - before
    agent_loop.close_rollouts()  # a second end does nothing
    assert transfer_queue.kv_list("train")["train"][failing]["status"] == "finished"
    batch = sample(config, 2)
    assert set(batch.keys) == {f"{scored}_{session}_0" for session in range(K)}
    scores = transfer_queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rm_scores"])
    assert [row.sum().item() for row in scores["rm_scores"]] == [0.25] * K


def test_agent_loop_refuses_segments_that_verl_would_count_as_rollouts(
    transfer_queue: Any, config: Any, model: Path
) -> None:
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    from rookery.adapters.verl import agent_loop

    prompts = make_prompts(["one", "two"])
    submit(transfer_queue, prompts)
    one, two = prompts["uid"]
    tasks = [make_task("one", [0.25]), make_task("two", [0.25], conversations=2)]
    own = OmegaConf.merge(config, {"rookery": {"tasks": tasks}, "algorithm": {"adv_estimator": "rloo"}})

    async def run() -> None:
        worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class(own, EmbeddedClient(model))
        await worker.generate_sequences(prompts)
        await asyncio.gather(*worker.background_tasks)

    try:
        asyncio.run(run())
    finally:
        agent_loop.close_rollouts()
    stored = transfer_queue.kv_list("train")["train"]
    assert (stored[one]["status"], stored[two]["status"]) == ("finished", "failure")
    assert [key for key in stored if key.startswith(f"{two}_")] == []
    transfer_queue.kv_clear(keys=[key for key in stored if key.startswith((one, two))], partition_id="train")


@pytest.mark.needs("mount")
def test_worker_that_ray_kills_leaves_no_processes_and_keeps_finished_rollouts(
    transfer_queue: Any, config: Any, model: Path, tmp_path: Path
) -> None:
    """At the end of a training, Ray kills verl's workers without running their exit handlers."""
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    prompts = make_prompts(["scored", "sleeping"])
    submit(transfer_queue, prompts)
    scored, sleeping = prompts["uid"]
    command = f"sleep 86400.{uuid.uuid4().int % 10**12}"
    tasks = [make_task("scored", [0.25] * K), make_task("sleeping", [0.5] * K, command=command)]
    env = "tests.adapters.kit:SleepingEnvironment"
    section = {"env": env, "tasks": tasks, "sandbox": "local", "out": str(tmp_path / "runs")}
    open_config = OmegaConf.create(OmegaConf.to_container(config))  # fields can be added to this copy
    loops = tmp_path / "loops.yaml"  # the file of the guide: the worker is a new process
    loops.write_text("- name: rookery\n  _target_: rookery.adapters.verl.agent_loop.RookeryAgentLoop\n")
    agent = {"actor_rollout_ref": {"rollout": {"agent": {"agent_loop_config_path": str(loops)}}}}
    own = OmegaConf.merge(open_config, {"rookery": section}, agent)
    worker = AgentLoopWorkerTQ.remote(own, EmbeddedClient(model))
    ray.get(worker.generate_sequences.remote(prompts))
    pid = ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))

    def list_started() -> list[int]:
        """Return the worker's keepers and the commands in its sandboxes."""
        running = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        wanted = command.replace(" ", "\0").encode()
        return [*descendants(pid), *(one for one in running if wanted in cmdline(one))]

    def get_status() -> str:
        status: str = transfer_queue.kv_list("train")["train"][scored]["status"]
        return status

    block_until(lambda: get_status() not in ("pending", "running"), SECONDS)
    assert get_status() == "finished"
    block_until(lambda: sum(b"sleep" in cmdline(one) for one in list_started()) >= K, SECONDS)
    started = list_started()
    ray.kill(worker)
    block_until(lambda: not any(map(cmdline, started)), SECONDS)
    with RunReader(find_run("latest", tmp_path / "runs")) as reader:
        kept = {(one.task, one.reward) for one in reader.iter_rollouts() if one.valid}
    assert kept == {("scored", 0.25)}
    stored = transfer_queue.kv_list("train")["train"]
    transfer_queue.kv_clear(
        keys=[key for key in stored if key.startswith((scored, sleeping))], partition_id="train"
    )


class TaskRunner:
    """Holds the manager in an actor of its own, as verl's program does."""

    def run(self, config: Any, model: Path, prompts: Any) -> int:
        from rookery.adapters.verl import RookeryManager

        self.manager = RookeryManager.create(config, EmbeddedClient(model))
        self.manager.generate_sequences(prompts)
        return os.getpid()


def test_manager_closes_its_engine_when_verls_program_ends(
    transfer_queue: Any, config: Any, model: Path, tmp_path: Path
) -> None:
    """verl's program then drops the handle of its actor, whose process runs its exit handlers."""
    import ray
    from omegaconf import OmegaConf

    prompts = make_prompts(["scored"])
    submit(transfer_queue, prompts)
    (uid,) = prompts["uid"]
    own = OmegaConf.create(OmegaConf.to_container(config))
    own.rookery.tasks = [make_task("scored", [0.25] * K)]
    own.rookery.out = str(tmp_path / "runs")
    runner = ray.remote(TaskRunner).remote()
    pid = ray.get(runner.run.remote(own, model, prompts))
    block_until(lambda: transfer_queue.kv_list("train")["train"][uid]["status"] == "finished", SECONDS)
    del runner
    block_until(lambda: not cmdline(pid), SECONDS)
    with RunReader(find_run("latest", tmp_path / "runs")) as reader:
        assert reader.status in ("finished", "stopped")
    stored = transfer_queue.kv_list("train")["train"]
    transfer_queue.kv_clear(keys=[key for key in stored if key.startswith(uid)], partition_id="train")


def test_error_that_concerns_all_rollouts_is_raised_by_the_next_call(
    transfer_queue: Any, config: Any, model: Path
) -> None:
    from rookery.adapters.verl import RookeryManager

    manager = RookeryManager.create(config, EmbeddedClient(model))
    try:
        prompts = make_prompts(["unknown"])
        submit(transfer_queue, prompts)
        manager.generate_sequences(prompts)
        (uid,) = prompts["uid"]
        block_until(lambda: transfer_queue.kv_list("train")["train"][uid]["status"] == "failure", SECONDS)
        with pytest.raises(RookeryError):
            manager.generate_sequences(prompts)
        transfer_queue.kv_clear(keys=[uid], partition_id="train")
    finally:
        manager.close()


def test_advantages_equal_those_of_verl_except_where_documented() -> None:
    """verl's GRPO over rollouts with missing members and several segments, against ours on the same rewards."""
    import torch
    from omegaconf import OmegaConf
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    rng = np.random.default_rng(0)
    for trial in range(20):
        groups: list[list[float | None]] = [
            [None if rng.random() < 0.3 else float(rng.choice([0.0, 0.25, 1.0])) for _ in range(4)]
            for _ in range(3)
        ]
        rows = [
            (f"{trial}g{g}", member, segment, reward)
            for g, rewards in enumerate(groups)
            for member, reward in enumerate(rewards)
            if reward is not None
            for segment in range(int(rng.integers(1, 4)))
        ]
        if not rows:
            continue

        def run(estimator: str, norm: bool, rows: Any = rows) -> dict[tuple[str, int], float]:
            mask = torch.ones(len(rows), 2)
            scores = torch.zeros(len(rows), 2)
            scores[:, -1] = torch.tensor([row[3] for row in rows])
            data = DataProto.from_single_dict({"response_mask": mask, "token_level_rewards": scores})
            data.non_tensor_batch["uid"] = np.array([row[0] for row in rows], dtype=object)
            computed = compute_advantage_for_multi_trajectories(
                data,
                batch_keys=[f"{uid}_{member}_{segment}" for uid, member, segment, _ in rows],
                adv_estimator=estimator,
                norm_adv_by_std_in_grpo=norm,
                config=OmegaConf.create({}),
            )
            values = computed.batch["advantages"][:, 0].tolist()
            return {(uid, member): value for (uid, member, _, _), value in zip(rows, values, strict=True)}

        for norm, scale, tolerance in ((False, "none", 1e-6), (True, "std", 1e-4)):
            theirs = run("grpo", norm)
            for g, rewards in enumerate(groups):
                ours = compute_advantages(rewards, baseline="mean", scale=scale)  # type: ignore[arg-type]
                alone = sum(reward is not None for reward in rewards) == 1
                for member, reward in enumerate(rewards):
                    if reward is None:
                        assert (f"{trial}g{g}", member) not in theirs
                    elif (
                        alone
                    ):  # verl subtracts nothing from a single reward; here a lone rollout has no advantage
                        assert theirs[f"{trial}g{g}", member] == pytest.approx(reward, abs=1e-4)
                        assert ours[member] == 0.0
                    else:
                        assert theirs[f"{trial}g{g}", member] == pytest.approx(ours[member], abs=tolerance)


def test_segments_count_as_rollouts_in_verls_other_estimators() -> None:
    """This is why the adapter refuses them: the baseline of the rollout with one segment would be wrong."""
    import torch
    from omegaconf import OmegaConf
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    scores = torch.tensor([[1.0], [1.0], [1.0], [0.0]])
    data = DataProto.from_single_dict({"response_mask": torch.ones(4, 1), "token_level_rewards": scores})
    data.non_tensor_batch["uid"] = np.array(["a"] * 4, dtype=object)
    computed = compute_advantage_for_multi_trajectories(
        data, batch_keys=["a_0_0", "a_0_1", "a_1_0", "a_2_0"], adv_estimator="rloo", config=OmegaConf.create({})
    )
    ours = compute_advantages([1.0, 1.0, 0.0])
    assert computed.batch["advantages"][:, 0].tolist() != pytest.approx([ours[0], ours[0], ours[1], ours[2]])


def test_settings_that_verl_cannot_express_are_refused(config: Any, model: Path) -> None:
    from omegaconf import OmegaConf

    from rookery.adapters.verl import RookeryManager

    def refuse(path: str, value: Any) -> None:
        changed = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
        OmegaConf.update(changed, path, value, force_add=True)
        with pytest.raises(UsageError):
            RookeryManager.create(changed, EmbeddedClient(model))

    refuse("algorithm.adv_estimator", "rloo")
    refuse("rookery.env", "")
    refuse("rookery.baseline", "none")
    refuse("rookery.sampling", {"temperature": 0.5})
    refuse("rookery.limits", {"context": 73})  # verl takes 64 tokens of a prompt and 8 of a reply
    with pytest.raises(UsageError):
        RookeryManager.create(config, EmbeddedClient(model), teacher_client={"teacher": object()})


def test_changed_sampling_parameters_and_another_tokenizer_are_noticed(config: Any, model: Path) -> None:
    from omegaconf import OmegaConf

    from rookery.adapters.verl import RookeryManager
    from rookery.adapters.verl.rollouts import VerlRollouts

    own = OmegaConf.create(OmegaConf.to_container(config))
    manager = RookeryManager.create(own, EmbeddedClient(model))
    try:
        engines, settings = manager._rollouts.engines, manager._rollouts.read_settings(False)
        engines.open(settings, purpose=False)
        own.actor_rollout_ref.rollout.temperature = 0.7
        with pytest.raises(UsageError):
            manager.generate_sequences(make_prompts(["whole"]))
    finally:
        manager.close()
    rollouts = VerlRollouts(config, EmbeddedClient(model))
    try:
        for temperature, top_p in ((1.0, 1.0), (0.0, 1.0)):  # verl's defaults for training and validation
            rollouts.check_mode(rollouts.make_settings(temperature, top_p, -1))
        for temperature, top_p in ((0.7, 1.0), (1.0, 0.9)):
            with pytest.raises(UsageError):
                rollouts.check_mode(rollouts.make_settings(temperature, top_p, -1))
        rollouts.engines.tokenizer = ByteTokenizer(shift=1)
        with pytest.raises(UsageError):
            rollouts.start({"extra_info": {"task": "whole"}}, K, settings, "training").result(60)
    finally:
        rollouts.engines.close()


def test_options_of_the_example_exist_in_verls_configuration(tmp_path: Path) -> None:
    import shlex

    import verl
    from hydra import compose, initialize_config_dir
    from pyarrow import parquet

    from rookery.adapters.verl import write_dataset

    script = (Path(__file__).parents[3] / "examples" / "train_with_verl.sh").read_text()
    command = script.partition("verl.trainer.main_ppo")[2].replace('"${MODEL:-Qwen/Qwen3-4B}"', "m")
    words = shlex.split(command.replace('"${GPUS:-8}"', "8").replace('"$@"', "").replace("\\\n", " "))
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        made = compose("ppo_trainer", overrides=words)
    assert made.actor_rollout_ref.rollout.agent.agent_loop_manager_class == "rookery.adapters.verl.RookeryManager"
    assert (made.rookery.env, made.trainer.use_v1) == ("arithmetic", True)
    assert write_dataset(tmp_path / "train.parquet", "tests.adapters.kit:ScriptedEnvironment", TASKS) == len(TASKS)
    rows = parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["extra_info"]["task"] for row in rows] == [task["id"] for task in TASKS]
