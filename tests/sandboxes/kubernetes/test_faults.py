"""Faults of a cluster: at creation, in the middle and at deletion."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes import Command
from rookery.sandboxes.kubernetes.provider import KubernetesProvider, open_kubernetes
from rookery.sandboxes.protocol import ProviderHome
from tests.sandboxes.docker.engine import BARE
from tests.sandboxes.kubernetes.api_server import StandInCluster
from tests.sandboxes.kubernetes.manifest_validation import Refused
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.needs("docker")]
SPEC = SandboxSpec(wall=60.0)
ROOT = Path(__file__).resolve().parents[3]
OWNER = """
import asyncio, sys
from pathlib import Path
from rookery.core import SandboxSpec
from rookery.sandboxes import ProviderHome
from rookery.sandboxes.kubernetes.provider import open_kubernetes

async def main():
    provider = open_kubernetes(ProviderHome(folder=Path(sys.argv[1]), run="killed"))
    await provider.create(SandboxSpec(), attempt="a")
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def fail_first(times: int, method: str, suffix: str, refused: Refused) -> Callable[[str, str], Refused | None]:
    left = [times]

    def answer(found: str, path: str) -> Refused | None:
        if found == method and path.split("/rookery-", maxsplit=1)[0].endswith(suffix) and left[0]:
            left[0] -= 1
            return refused
        return None

    return answer


async def create_in_vain(provider: KubernetesProvider, spec: SandboxSpec = SPEC, timeout: float = 60.0) -> Any:
    with pytest.raises(SandboxError) as caught:
        await provider.create(spec, attempt="a", timeout=timeout)
    return caught.value.code, caught.value.fault


async def test_overloaded_server_is_asked_again(cluster: StandInCluster, provider: KubernetesProvider) -> None:
    busy = Refused(429, "TooManyRequests", "too many requests", **{"Retry-After": "0"})
    cluster.answer = fail_first(3, "POST", "/pods", busy)
    await (await provider.create(SPEC, attempt="a")).close()
    conflict = Refused(409, "Conflict", "Operation cannot be fulfilled on resourcequotas")
    cluster.answer = fail_first(2, "POST", "/pods", conflict)
    sandbox = await provider.create(SPEC, attempt="a")
    cluster.answer = fail_first(2, "DELETE", "/pods", Refused(500, "InternalError", "etcd: no leader"))
    await sandbox.close()


async def test_server_that_is_down_at_creation_and_deletion_is_asked_again(
    cluster: StandInCluster, provider: KubernetesProvider
) -> None:
    await cluster.stop_server()
    assert await create_in_vain(provider, timeout=0.5) == ("sandbox.create", "infra")
    creating = asyncio.ensure_future(provider.create(SPEC, attempt="a"))
    await asyncio.sleep(0)
    await cluster.start()
    sandbox = await creating
    # In the middle, commands go on when the server is back.
    running = asyncio.ensure_future(
        sandbox.exec(Command(argv=("sh", "-c", "cat; sleep 1; echo done"), stdin=b"x"))
    )
    await cluster.stop_server()
    await cluster.start()
    assert (await running).stdout == b"xdone\n"
    await cluster.break_connections()
    assert (await sandbox.exec(Command(argv=("cat",), stdin=b"again"))).stdout == b"again"
    await cluster.stop_server()
    closing = asyncio.ensure_future(sandbox.close())
    await asyncio.sleep(0)
    await cluster.start()
    await closing


async def test_lost_answer_and_lost_history_do_not_create_a_second_pod(
    cluster: StandInCluster, provider: KubernetesProvider
) -> None:
    cluster.schedulable, cluster.loses_answers = False, 2  # of the network policy and of the pod
    creating = asyncio.ensure_future(provider.create(SPEC, attempt="a"))
    await wait_until(lambda: any("conditions" in pod["status"] for pod in cluster.pods()))
    await cluster.expire_history()  # the watch ends with 410
    lists = len(cluster.requests)
    await wait_until(lambda: len(cluster.requests) >= lists + 2)  # listed, and watched again
    (pod,) = cluster.pods()
    await cluster.schedule_again(pod["metadata"]["name"])
    await (await creating).close()


async def test_exhausted_quota_and_missing_room_are_quota_errors(
    cluster: StandInCluster, provider: KubernetesProvider
) -> None:
    cluster.quota = 1
    sandbox = await provider.create(SPEC, attempt="a")
    assert await create_in_vain(provider, timeout=5.0) == ("sandbox.quota", "infra")
    waiting = asyncio.ensure_future(provider.create(SPEC, attempt="b"))
    await sandbox.close()
    await (await waiting).close()
    cluster.quota, cluster.schedulable = None, False
    assert await create_in_vain(provider, timeout=5.0) == ("sandbox.quota", "infra")


async def test_unusable_images_and_settings_are_named(
    cluster: StandInCluster, provider: KubernetesProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = SandboxSpec(image="nowhere.invalid/missing:1")
    assert await create_in_vain(provider, missing) == ("task.image", "task")
    assert await create_in_vain(provider, SandboxSpec(image=BARE)) == ("task.image", "task")
    (tmp_path / "wrong.json").write_text('{"spec": {"noSuchField": 1}}')
    monkeypatch.setenv("ROOKERY_KUBERNETES_POD", str(tmp_path / "wrong.json"))
    wrong = open_kubernetes(ProviderHome(folder=tmp_path, run="wrong"))
    assert await create_in_vain(wrong, SandboxSpec(image=BARE)) == ("sandbox.refused", "infra")
    await wrong.close()


async def run_until_lost(provider: KubernetesProvider, end: Callable[[str], Any], cluster: StandInCluster) -> str:
    sandbox = await provider.create(SPEC, attempt="a")
    running = asyncio.ensure_future(sandbox.exec(Command(argv=("sleep", "600"), wall=600.0)))
    (pod,) = cluster.pods()
    await end(pod["metadata"]["name"])
    with pytest.raises(SandboxError) as caught:
        await running
    await sandbox.close()
    await wait_until(lambda: not cluster.pods())
    assert caught.value.fault == "infra"
    return caught.value.code


async def test_cause_of_a_lost_pod_says_who_ended_it(
    cluster: StandInCluster, provider: KubernetesProvider
) -> None:
    async def evict(name: str) -> None:
        await cluster.set_status(name, phase="Failed", reason="Evicted", message="The node was low on memory.")
        await cluster.kill_container(name)

    async def exceed_memory(name: str) -> None:
        await cluster.kill_container(name, reason="OOMKilled")

    assert await run_until_lost(provider, cluster.delete_pod, cluster) == "sandbox.host"
    assert await run_until_lost(provider, evict, cluster) == "sandbox.host"
    assert await run_until_lost(provider, exceed_memory, cluster) == "sandbox.exhausted"


async def test_pods_of_a_killed_owner_are_removed(
    cluster: StandInCluster, provider: KubernetesProvider, tmp_path: Path
) -> None:
    mine = await provider.create(SPEC, attempt="a")
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(tmp_path / "other")), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    again = open_kubernetes(ProviderHome(folder=tmp_path, run="again"))
    assert len(await again.list_machines()) == 2
    assert await asyncio.to_thread(again.reap_machine) == []
    owner.kill()
    await owner.wait()
    assert [check.status for check in await asyncio.to_thread(again.diagnose)] == ["ok"]
    assert len(await asyncio.to_thread(again.reap_machine)) == 1
    await wait_until(lambda: len(cluster.pods()) == 1)
    # A pod whose lease has ended is removed, wherever its owner is.
    (pod,) = cluster.pods()
    pod["metadata"]["annotations"]["rookery-expires"] = "2020-01-01T00:00:00Z"
    assert await asyncio.to_thread(again.reap_machine) == [pod["metadata"]["name"]]
    await mine.close()
