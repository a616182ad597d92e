"""Program that owns containers until it is killed. Arguments: FOLDER SOCKET COUNT."""

import asyncio
import sys
from pathlib import Path

from rookery.core import SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.docker.provider import DockerProvider
from tests.sandboxes.docker.engine import IMAGE


async def main(folder: str, socket: str, count: str) -> None:
    provider = DockerProvider(ProviderHome(folder=Path(folder), run="killed"), image=IMAGE, engine=socket)
    sandboxes = await asyncio.gather(*(provider.create(SandboxSpec(), attempt="a") for _ in range(int(count))))
    for sandbox in sandboxes:
        await sandbox.start(Command(argv=("sh", "-c", "trap '' TERM HUP; while :; do sleep 1; done")))
    print("ready", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
