"""Peer of the benchmark `swe`: the same rollout through the API of a Docker engine, as its users write it."""

import io
import json
import tarfile
import time
from typing import Any

import aiohttp

from benchmarks.swe_rollout import COMMANDS, SEED, TEST

EDIT = (
    'python3 -c \'import pathlib; p = pathlib.Path("add.sh"); p.write_text(p.read_text().replace("-", "+"))\'',
    "sed -i '1i # Adds.' add.sh",
)


class DockerSequence:
    """Runs the sequence in containers of an image with bash and Python."""

    def __init__(self, socket: str, image: str) -> None:
        connector = aiohttp.UnixConnector(path=socket, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, base_url="http://docker")
        self._image = image

    async def close(self) -> None:
        await self._session.close()

    async def one(self) -> float:
        """Run the sequence once, including creation and removal of both containers, and return milliseconds."""
        began = time.perf_counter()
        agent = await self._start_container()
        try:
            await self._put(agent, {"workspace/add.sh": SEED})
            commands = [*COMMANDS]
            commands.insert(5, EDIT[0])
            commands.insert(9, EDIT[1])
            for command in commands:
                await self._exec(agent, command)
            changed = await self._get(agent, "/workspace/add.sh")
            grader = await self._start_container()
            try:
                await self._put(grader, {"workspace/add.sh": changed, "tests/test.sh": TEST})
                await self._exec(grader, "bash /tests/test.sh", check=True)
            finally:
                await self._call("DELETE", f"/containers/{grader}?force=1")
        finally:
            await self._call("DELETE", f"/containers/{agent}?force=1")
        return 1e3 * (time.perf_counter() - began)

    async def _start_container(self) -> str:
        host = {"NetworkMode": "none", "Memory": 1 << 30, "PidsLimit": 256}
        config = {"Image": self._image, "Cmd": ["sleep", "infinity"], "HostConfig": host}
        created = json.loads(await self._call("POST", "/containers/create", config))
        await self._call("POST", f"/containers/{created['Id']}/start")
        return str(created["Id"])

    async def _exec(self, container: str, command: str, *, check: bool = False) -> None:
        request = {
            "Cmd": ["bash", "-c", command],
            "AttachStdout": True,
            "AttachStderr": True,
            "WorkingDir": "/workspace",
        }
        created = json.loads(await self._call("POST", f"/containers/{container}/exec", request))
        output = await self._call("POST", f"/exec/{created['Id']}/start", {"Detach": False, "Tty": False})
        ended = json.loads(await self._call("GET", f"/exec/{created['Id']}/json"))
        if check and ended["ExitCode"]:
            raise RuntimeError(f"the test in a container exited with {ended['ExitCode']}: {output!r:.300}")

    async def _put(self, container: str, files: dict[str, str]) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name, text in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(text.encode())
                tar.addfile(entry, io.BytesIO(text.encode()))
        await self._call("PUT", f"/containers/{container}/archive?path=/", data=packed.getvalue())

    async def _get(self, container: str, path: str) -> str:
        data = await self._call("GET", f"/containers/{container}/archive?path={path}")
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            member = tar.extractfile(tar.getmembers()[0])
            assert member is not None
            return member.read().decode()

    async def _call(self, method: str, path: str, body: Any = None, data: bytes | None = None) -> bytes:
        async with self._session.request(method, path, json=body, data=data) as reply:
            output = await reply.read()
            if reply.status >= 400:
                raise RuntimeError(f"the Docker engine answered {reply.status}: {output!r:.300}")
            return output
