"""The keys of Harbor's `task.toml`, one by one.

Promise: every key is taken, or is said to be of no use here, or is a warning; each problem names its key in full.
"""

import datetime as dt
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from rookery.tasks import folders
from rookery.tasks.report import Notes
from rookery.tasks.sidecars import hosts_of
from rookery.tasks.swe import BoxNetwork, Verifier

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(?:I?B)?\s*", re.ASCII | re.IGNORECASE)
_NETWORKS: Final[dict[str, BoxNetwork]] = {"public": "all", "no-network": "none", "allowlist": "allow"}
_TRANSPORTS: Final = ("stdio", "sse", "streamable-http")


class Keys:
    """A table whose keys are taken one by one; those left over are not known."""

    def __init__(self, table: object, at: str, notes: Notes) -> None:
        self.at = at
        self.notes = notes
        self._left: dict[str, Any] = {}
        if isinstance(table, dict):
            self._left = dict(table)
        elif table is not None:
            notes.wrong(at or "task.toml", "it must be a table")

    def where(self, key: str) -> str:
        return f"{self.at}.{key}" if self.at else key

    def take(self, key: str) -> Any:
        return self._left.pop(key, None)

    def has(self, key: str) -> bool:
        return key in self._left

    def table(self, key: str) -> "Keys":
        return Keys(self.take(key), self.where(key), self.notes)

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        self.notes.wrong(self.where(key), "it must be a text")
        return None

    def number(self, key: str, *, most: float = 1e9, zero: bool = False) -> float | None:
        return folders.number_of(self.take(key), self.where(key), self.notes, most=most, zero=zero)

    def ignore(self, *keys: str) -> None:
        for key in keys:
            self.take(key)

    def useless(self, key: str, why: str) -> None:
        """A key that is known, and has no effect here."""
        if self.take(key) not in (None, [], {}, "", 0, False):
            self.notes.warn(self.where(key), why)

    def impossible(self, key: str, why: str) -> None:
        if self.take(key) not in (None, [], {}, "", 0, False):
            self.notes.wrong(self.where(key), why)

    def rest(self) -> None:
        for key in self._left:
            self.notes.warn(self.where(str(key)[:80]), "it is not known, and has no effect")


class OfStep(msgspec.Struct, frozen=True):
    timeout: float | None
    verifier: Verifier
    enough: float | None = None
    enough_parts: dict[str, float] = {}


class Settings:
    """What a `task.toml` says."""

    def __init__(self, document: dict[str, Any], notes: Notes, variables: Mapping[str, str]) -> None:
        self.notes = notes
        self.variables = variables
        top = Keys(document, "", notes)
        self._version(top)
        metadata = top.take("metadata") or {}
        if not isinstance(metadata, dict):
            notes.wrong("metadata", "it must be a table")
            metadata = {}
        self.aside = self._aside(metadata.pop("rookery", None))
        self.metadata: dict[str, Any] = _plain(metadata)
        if (about := top.take("task")) is not None:
            self._about(about)
        top.ignore("source", "multi_step_reward_mode")
        agent = top.table("agent")
        self.timeout = agent.number("timeout_sec")
        self.user = folders.user_of(agent.take("user"), "agent.user", notes)
        self.network: BoxNetwork = "all"
        self.allow: tuple[str, ...] = ()
        self._environment(top.table("environment"))
        mode, hosts = self._network(agent)
        if mode is not None:
            self.network, self.allow = mode, hosts
        agent.rest()
        solution = top.table("solution")
        self.solve_env = self._env(solution)
        solution.rest()
        self.verifier = self._verifier(top.table("verifier"), None)
        steps = top.take("steps")
        if steps is not None and (not isinstance(steps, list) or len(steps) > 1_000):
            notes.wrong("steps", "it must be a list of at most 1,000 tables")
            steps = None
        self.steps = [Keys(table, f"steps[{n}]", notes) for n, table in enumerate(steps or [])]
        self._names(steps or [])
        self.rewards: Literal["mean", "final"] = "mean"
        strategy = top.take("multi_step_reward_strategy")
        if strategy == "final":
            self.rewards = "final"
        elif strategy not in (None, "mean"):
            notes.wrong("multi_step_reward_strategy", "it must be 'mean' or 'final'")
        self._artifacts = top.take("artifacts")
        top.rest()

    def _names(self, steps: list[Any]) -> None:
        names = [str(step.get("name")) for step in steps if isinstance(step, dict)]
        for name in {name for name in names if names.count(name) > 1}:
            self.notes.wrong("steps", f"{name[:80]!r} is the name of several steps")

    def _version(self, top: Keys) -> None:
        key = "schema_version" if top.has("schema_version") else "version"
        version = top.take(key)
        top.ignore("version")
        if version is None:
            return
        major = str(version).partition(".")[0]
        if isinstance(version, bool) or not isinstance(version, str | int | float) or not major.isdecimal():
            self.notes.wrong(key, f"{str(version)[:40]!r} is no version")
        elif int(major) != 1:
            self.notes.wrong(key, f"version {str(version)[:40]} is not known: this reads 1.4 and older")

    def _about(self, about: object) -> None:
        keys = Keys(about, "task", self.notes)
        name = keys.take("name")
        if not isinstance(name, str) or not name.strip():
            self.notes.wrong("task.name", "it must be a text, like org/name")
        if "task" in self.metadata:
            self.notes.warn("task", "metadata has a 'task' of its own, which is kept instead")
        elif isinstance(about, dict):
            self.metadata["task"] = _plain(about)

    def _aside(self, said: object) -> dict[str, Any]:
        if said is None:
            return {}
        if not isinstance(said, dict):
            self.notes.wrong("metadata.rookery", "it must be a table")
            return {}
        said = dict(said)
        packed = said.pop("json", None)
        if packed is None:
            return said
        try:
            more = msgspec.json.decode(packed) if isinstance(packed, str) else None
        except msgspec.DecodeError:
            more = None
        if not isinstance(more, dict):
            self.notes.wrong("metadata.rookery.json", "it must be an object, as JSON")
            return said
        return {**said, **more}

    def _environment(self, keys: Keys) -> None:
        notes = self.notes
        self.image = keys.text("docker_image")
        self.build = keys.number("build_timeout_sec")
        self.cpus = keys.number("cpus", most=10_000)
        self.memory = self._size(keys, "memory_mb", "memory")
        self.disk = self._size(keys, "storage_mb", "storage")
        gpus = keys.number("gpus", most=1_000, zero=True)
        self.gpus = int(gpus) if gpus is not None else None
        self.env = self._env(keys)
        workdir = keys.take("workdir")
        self.workdir = folders.workdir_of(workdir, "environment.workdir", notes) if workdir is not None else None
        internet = keys.take("allow_internet")
        if internet is not None and not isinstance(internet, bool):
            notes.wrong("environment.allow_internet", "it must be true or false")
        mode, hosts = self._network(keys)
        if mode is None:
            mode = "none" if internet is False else "all"
        self.network = mode
        self.allow = hosts
        self.mcp = self._servers(keys.take("mcp_servers"))
        system = keys.take("os")
        if system is not None and str(system).lower() != "linux":
            notes.wrong("environment.os", "boxes here run Linux")
        keys.impossible("tpu", "there are no TPUs in boxes here")
        keys.ignore("gpu_types")
        keys.useless("skills_dir", "skills are not copied for an agent")
        keys.useless("healthcheck", "it is not run; use setup.sh to wait")
        keys.rest()

    def _size(self, keys: Keys, key: str, old: str) -> int | None:
        """Bytes, of megabytes or of an older text."""
        now = keys.number(key, most=1e9)
        text = keys.take(old)
        size = int(now * (1 << 20)) if now is not None else None
        if text is None:
            return size
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            self.notes.wrong(keys.where(old), f"{str(text)[:40]!r} is no size like '2G' or '512M'")
            return size
        shift = {"K": 10, "M": 20, "G": 30, "T": 40}[match[2].upper()]
        said = int(float(match[1]) * (1 << shift))
        if size is not None and size != said:
            self.notes.wrong(keys.where(old), f"it says {said:,} bytes, and {key} says {size:,}")
        if said <= 0:
            self.notes.wrong(keys.where(old), "it must be above 0")
            return size
        return said

    def _network(self, keys: Keys) -> tuple[BoxNetwork | None, tuple[str, ...]]:
        mode, hosts = keys.take("network_mode"), keys.take("allowed_hosts")
        found = None
        if mode is not None:
            found = _NETWORKS.get(mode) if isinstance(mode, str) else None
            if found is None:
                self.notes.wrong(keys.where("network_mode"), f"it must be one of {', '.join(_NETWORKS)}")
                return None, ()
        if hosts is None or hosts == []:
            return found, ()
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            self.notes.wrong(keys.where("allowed_hosts"), "it must be a list of hosts")
            return found, ()
        found = found or "allow"
        hosts_of(found, tuple(hosts), keys.where("allowed_hosts"), self.notes)
        return found, tuple(hosts) if found == "allow" else ()

    def _env(self, keys: Keys) -> dict[str, str]:
        field = keys.where("env")
        env = folders.env_of(keys.take("env"), field, self.notes)
        for name, value in env.items():
            if (match := _TEMPLATE.fullmatch(value)) is None:
                continue
            wanted, default = match[1], match[2]
            if wanted in self.variables:
                env[name] = self.variables[wanted]
            elif default is not None:
                env[name] = default
            else:
                self.notes.wrong(
                    f"{field}.{name}",
                    f"it needs the variable {wanted[:80]!r}, which has no default: "
                    "pass it with --variable, in Python in `variables`",
                )
        return env

    def _servers(self, value: object) -> tuple[dict[str, Any], ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self.notes.wrong("environment.mcp_servers", "it must be a list of tables")
            return ()
        made: list[dict[str, Any]] = []
        for number, one in enumerate(value):
            field = f"environment.mcp_servers[{number}]"
            if not isinstance(one, dict) or not isinstance(one.get("name"), str) or not one["name"].strip():
                self.notes.wrong(f"{field}.name", "it must be a text")
                continue
            server = _plain(one)
            transport = server.get("transport", "sse")
            server["transport"] = transport = "streamable-http" if transport == "http" else transport
            args = server.get("args", [])
            if transport not in _TRANSPORTS:
                self.notes.wrong(f"{field}.transport", f"it must be one of {', '.join(_TRANSPORTS)}")
                continue
            needed = "command" if transport == "stdio" else "url"
            if not isinstance(server.get(needed), str) or not server[needed].strip():
                self.notes.wrong(f"{field}.{needed}", f"a server by {transport} needs it")
            elif not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
                self.notes.wrong(f"{field}.args", "it must be a list of texts")
            else:
                made.append(server)
        return tuple(made)

    def _verifier(self, keys: Keys, above: Verifier | None) -> Verifier:
        notes = self.notes
        timeout = keys.number("timeout_sec")
        user = folders.user_of(keys.take("user"), keys.where("user"), notes)
        said_env = keys.has("env")
        env = self._env(keys)
        mode = keys.take("environment_mode")
        if mode not in (None, "shared", "separate"):
            notes.wrong(keys.where("environment_mode"), "it must be 'shared' or 'separate'")
        network, allow = self._network(keys)
        keys.impossible(
            "environment", "the tests of a task run in the image of the task; one of their own is not made"
        )
        keys.useless("collect", "commands that collect are not run; name artifacts instead")
        keys.useless("continuous", "tests run when the agent has submitted, not before")
        keys.rest()
        below = above or Verifier(mode="shared", reward_from_exit=False)
        return msgspec.structs.replace(
            below,
            timeout=timeout or below.timeout,
            user=user if user is not None else below.user,
            env=env if said_env else below.env,
            mode=below.mode if mode is None else "shared" if mode == "shared" else "fresh",
            network=network or below.network,
            allow=allow if network else below.allow,
        )

    def of_step(self, keys: Keys) -> OfStep:
        notes = self.notes
        agent = keys.table("agent")
        timeout = agent.number("timeout_sec") or self.timeout
        user = folders.user_of(agent.take("user"), agent.where("user"), notes)
        if user is not None and user != self.user:
            notes.wrong(agent.where("user"), "all steps of a task run as the same user: say it in [agent]")
        mode, hosts = self._network(agent)
        if mode is not None and (mode, hosts) != (self.network, self.allow):
            notes.wrong(
                agent.where("network_mode"), "all steps of a task have the same network: say it in [agent]"
            )
        agent.rest()
        verifier = self._verifier(keys.table("verifier"), self.verifier)
        enough = keys.take("min_reward")
        parts: dict[str, float] = {}
        field = keys.where("min_reward")
        if isinstance(enough, dict):
            parts = {str(name): float(value) for name, value in enough.items() if _is_number(value)}
            if len(parts) < len(enough):
                notes.wrong(field, "its values must be finite numbers")
            enough = None
        elif enough is not None and not _is_number(enough):
            notes.wrong(field, "it must be a finite number, or a table of them")
            enough = None
        keys.useless("healthcheck", "it is not run; use workdir/setup.sh to wait")
        keys.useless("artifacts", "artifacts of a step are those of the task")
        keys.rest()
        return OfStep(timeout, verifier, float(enough) if enough is not None else None, parts)

    def artifacts(self, workdir: str) -> tuple[str, ...]:
        value = self._artifacts
        if value is None:
            return ()
        if not isinstance(value, list):
            self.notes.wrong("artifacts", "it must be a list")
            return ()
        found = []
        for number, one in enumerate(value):
            field = f"artifacts[{number}]"
            source = one.get("source") if isinstance(one, dict) else one
            if isinstance(one, dict) and one.get("service") not in (None, "main"):
                self.notes.wrong(field, "there are no services beside the agent's box")
            elif (path := folders.path_of(source, field, self.notes, base=workdir)) is not None:
                found.append(path)
        return tuple(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """TOML as data that JSON has too: times as texts."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    return value
