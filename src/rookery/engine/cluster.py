"""The interface between the supervisor and a cluster on whose nodes the runners of a run are started.

A cluster is a plug-in: an entry point of the group `rookery.clusters` whose object is called with the address
after the colon of `--cluster NAME[:ADDRESS]` and returns a `Cluster`.
"""

from typing import TYPE_CHECKING, Any, Protocol

from rookery.core.plugins import load_plugin
from rookery.engine.runner_handle import RunnerHandle
from rookery.engine.scheduler import Requirements
from rookery.upstreams.protocol import PauseMode

if TYPE_CHECKING:
    from rookery.engine.runner_pool import RunnerPool

GROUP = "rookery.clusters"


class Cluster(Protocol):
    """Starts runners on the nodes of a cluster and chooses which of them gets the next attempt."""

    async def open(self, pool: "RunnerPool", *, concurrency: int, needs_gateway: bool) -> None:
        """Start the nodes. Call `pool.add_runner` for each runner that a node should have.

        `concurrency` is the number of concurrent attempts of the whole run. With `needs_gateway`, each node gets a
        gateway.
        """
        ...

    def create_runner(self, name: str, node: str, required: Requirements) -> RunnerHandle | None:
        """Return a handle of a new runner on `node`, or None if there is no such node.

        If `node` is empty, it is the least loaded node that meets the requirements.
        """
        ...

    def find_free_runner(
        self, required: Requirements, preferred: RunnerHandle | None = None
    ) -> RunnerHandle | None:
        """Return the runner that should get the next attempt with these requirements.

        Return `preferred`, which may have a sandbox ready, if its node can take the attempt. Return None if no
        node that meets the requirements has free capacity.
        """
        ...

    def find_runner_to_prewarm(self, required: Requirements) -> RunnerHandle | None:
        """Return the runner that should prepare a sandbox for an attempt with these requirements.

        It is the runner that would get the attempt if the rollouts that are planned for runners were already
        running. Return None if no node that meets the requirements has capacity for it.
        """
        ...

    def accepts(self, runner: RunnerHandle, required: Requirements) -> bool:
        """Return whether the node of a runner meets these requirements now."""
        ...

    def can_meet(self, required: Requirements) -> bool:
        """Return whether a node would meet these requirements if it ran no attempts."""
        ...

    def pause_targets(self) -> list[str]:
        """Return the names of the nodes' gateways, which have to confirm a pause."""
        ...

    def send_pause(self, number: int, mode: PauseMode, timeout: float) -> None:
        """Pause the nodes' gateways. A node that does not confirm the pause in time is fenced."""
        ...

    def send_resume(self, version: int | None) -> None:
        """Resume the nodes' gateways."""
        ...

    async def drain(self, node: str) -> None:
        """Send no more attempts to a node, let its attempts finish, and remove it from the run.

        Raises `UsageError` if there is no such node.
        """
        ...

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of each node as plain data, for `Engine.status`."""
        ...

    async def close(self) -> None:
        """Remove everything that was started on the nodes. All runners have ended."""
        ...


def open_cluster(address: str) -> Cluster:
    """Return the cluster that `NAME[:ADDRESS]` names. Raise `UsageError` if it is unknown or not installed."""
    name, _, rest = address.partition(":")
    cluster: Cluster = load_plugin(GROUP, name, "cluster")(rest)
    return cluster
