"""Read `task.toml`, the configuration file of a task in Harbor's format.

A key that Rookery does not support, or does not know, is reported, except for a few keys that are ignored on
purpose. Each problem names the full key.
"""

import datetime as dt
import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from rookery.tasks import task_folder
from rookery.tasks.report import ProblemCollector
from rookery.tasks.sidecar import check_hosts
from rookery.tasks.swe import TaskNetwork, Verifier

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(?:I?B)?\s*", re.ASCII | re.IGNORECASE)
_NETWORKS: Final[dict[str, TaskNetwork]] = {"public": "all", "no-network": "none", "allowlist": "allow"}
_TRANSPORTS: Final = ("stdio", "sse", "streamable-http")


class ConfigTable:
    """A TOML table whose keys are taken one by one. Keys that are never taken are unknown."""

    def __init__(self, table: object, at: str, problems: ProblemCollector) -> None:
        self.at = at
        self.problems = problems
        self._left: dict[str, Any] = {}
        if isinstance(table, dict):
            self._left = dict(table)
        elif table is not None:
            problems.error(at or "task.toml", "must be a table")

    def where(self, key: str) -> str:
        """Return the full name of a key of this table, such as `agent.user`, for messages."""
        return f"{self.at}.{key}" if self.at else key

    def take(self, key: str) -> Any:
        """Remove a key and return its value, or None if it is missing."""
        return self._left.pop(key, None)

    def has(self, key: str) -> bool:
        """Return whether the table has a key that was not taken yet."""
        return key in self._left

    def table(self, key: str) -> "ConfigTable":
        """Take a key whose value is a table. A missing one is an empty table; another type is reported."""
        return ConfigTable(self.take(key), self.where(key), self.problems)

    def text(self, key: str) -> str | None:
        """Take a key whose value is a string that is not empty. Return None if it is missing or invalid.

        An invalid value is reported.
        """
        value = self.take(key)
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        self.problems.error(self.where(key), "must be a string")
        return None

    def number(self, key: str, *, most: float = 1e9, zero: bool = False) -> float | None:
        """Take a key whose value is a number above 0 (with `zero`, also 0) and at most `most`.

        Return None if it is missing or invalid. An invalid value is reported.
        """
        return task_folder.parse_number(self.take(key), self.where(key), self.problems, most=most, zero=zero)

    def ignore(self, *keys: str) -> None:
        """Take keys that have no effect in Rookery, without a warning."""
        for key in keys:
            self.take(key)

    def warn_if_set(self, key: str, why: str) -> None:
        """Take a key that has no effect in Rookery, and report a warning if its value is not empty."""
        if self.take(key) not in (None, [], {}, "", 0, False):
            self.problems.warn(self.where(key), why)

    def refuse_if_set(self, key: str, why: str) -> None:
        """Take a key that requests something unsupported, and report an error if its value is not empty."""
        if self.take(key) not in (None, [], {}, "", 0, False):
            self.problems.error(self.where(key), why)

    def warn_unknown(self) -> None:
        """Warn about all keys that were not taken."""
        for key in self._left:
            self.problems.warn(self.where(str(key)[:80]), "is unknown and has no effect")


class StepSettings(msgspec.Struct, frozen=True):
    """The settings of one step of a task. See the fields of the same names in `SweStep`."""

    timeout: float | None
    verifier: Verifier
    min_reward: float | None = None
    min_reward_parts: dict[str, float] = {}


class HarborConfig:
    """The settings in a `task.toml`.

    Problems are reported to `problems`; `variables` are the values for `${NAME}`.
    """

    def __init__(self, document: dict[str, Any], problems: ProblemCollector, variables: Mapping[str, str]) -> None:
        self.problems = problems
        self.variables = variables
        top = ConfigTable(document, "", problems)
        self._check_version(top)
        metadata = top.take("metadata") or {}
        if not isinstance(metadata, dict):
            problems.error("metadata", "must be a table")
            metadata = {}
        self.sidecar = self._sidecar_fields(metadata.pop("rookery", None))
        self.metadata: dict[str, Any] = _to_json_data(metadata)
        if (about := top.take("task")) is not None:
            self._task_table(about)
        top.ignore("source", "multi_step_reward_mode")
        agent = top.table("agent")
        self.timeout = agent.number("timeout_sec")
        self.user = task_folder.parse_user(agent.take("user"), "agent.user", problems)
        self.network: TaskNetwork = "all"
        self.allow: tuple[str, ...] = ()
        self._environment(top.table("environment"))
        mode, hosts = self._network(agent)
        if mode is not None:
            self.network, self.allow = mode, hosts
        agent.warn_unknown()
        solution = top.table("solution")
        self.solve_env = self._env(solution)
        solution.warn_unknown()
        self.verifier = self._verifier(top.table("verifier"), None)
        steps = top.take("steps")
        if steps is not None and (not isinstance(steps, list) or len(steps) > 1_000):
            problems.error("steps", "must be a list of at most 1,000 tables")
            steps = None
        self.steps = [ConfigTable(table, f"steps[{n}]", problems) for n, table in enumerate(steps or [])]
        self._check_step_names(steps or [])
        self.rewards: Literal["mean", "final"] = "mean"
        strategy = top.take("multi_step_reward_strategy")
        if strategy == "final":
            self.rewards = "final"
        elif strategy not in (None, "mean"):
            problems.error("multi_step_reward_strategy", "must be 'mean' or 'final'")
        self._artifacts = top.take("artifacts")
        top.warn_unknown()

    def _check_step_names(self, steps: list[Any]) -> None:
        names = [str(step.get("name")) for step in steps if isinstance(step, dict)]
        for name in {name for name in names if names.count(name) > 1}:
            self.problems.error("steps", f"{name[:80]!r} is the name of several steps")

    def _check_version(self, top: ConfigTable) -> None:
        key = "schema_version" if top.has("schema_version") else "version"
        version = top.take(key)
        top.ignore("version")
        if version is None:
            return
        major = str(version).partition(".")[0]
        if isinstance(version, bool) or not isinstance(version, str | int | float) or not major.isdecimal():
            self.problems.error(key, f"{str(version)[:40]!r} is not a version")
        elif int(major) != 1:
            self.problems.error(key, f"version {str(version)[:40]} is not supported: supported are 1.4 and older")

    def _task_table(self, about: object) -> None:
        keys = ConfigTable(about, "task", self.problems)
        name = keys.take("name")
        if not isinstance(name, str) or not name.strip():
            self.problems.error("task.name", "must be a string, like org/name")
        if "task" in self.metadata:
            self.problems.warn("task", "is ignored, because metadata has its own key 'task'")
        elif isinstance(about, dict):
            self.metadata["task"] = _to_json_data(about)

    def _sidecar_fields(self, table: object) -> dict[str, Any]:
        if table is None:
            return {}
        if not isinstance(table, dict):
            self.problems.error("metadata.rookery", "must be a table")
            return {}
        table = dict(table)
        packed = table.pop("json", None)
        if packed is None:
            return table
        try:
            more = msgspec.json.decode(packed) if isinstance(packed, str) else None
        except msgspec.DecodeError:
            more = None
        if not isinstance(more, dict):
            self.problems.error("metadata.rookery.json", "must be an object, as JSON")
            return table
        return {**table, **more}

    def _environment(self, keys: ConfigTable) -> None:
        problems = self.problems
        self.image = keys.text("docker_image")
        self.build = keys.number("build_timeout_sec")
        self.cpus = keys.number("cpus", most=10_000)
        self.memory = self._size(keys, "memory_mb", "memory")
        self.disk = self._size(keys, "storage_mb", "storage")
        gpus = keys.number("gpus", most=1_000, zero=True)
        self.gpus = int(gpus) if gpus is not None else None
        self.env = self._env(keys)
        workdir = keys.take("workdir")
        self.workdir = (
            task_folder.parse_workdir(workdir, "environment.workdir", problems) if workdir is not None else None
        )
        internet = keys.take("allow_internet")
        if internet is not None and not isinstance(internet, bool):
            problems.error("environment.allow_internet", "must be true or false")
        mode, hosts = self._network(keys)
        if mode is None:
            mode = "none" if internet is False else "all"
        self.network = mode
        self.allow = hosts
        self.mcp = self._servers(keys.take("mcp_servers"))
        system = keys.take("os")
        if system is not None and str(system).lower() != "linux":
            problems.error("environment.os", "only Linux is supported")
        keys.refuse_if_set("tpu", "TPUs are not supported")
        keys.ignore("gpu_types")
        keys.warn_if_set("skills_dir", "skills are not copied for an agent")
        keys.warn_if_set("healthcheck", "is not run: wait in setup.sh instead")
        keys.warn_unknown()

    def _size(self, keys: ConfigTable, key: str, old: str) -> int | None:
        """Return a size in bytes, from the key `key` (megabytes) or the older key `old` (a string like "2G")."""
        now = keys.number(key, most=1e9)
        text = keys.take(old)
        size = int(now * (1 << 20)) if now is not None else None
        if text is None:
            return size
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            self.problems.error(keys.where(old), f"{str(text)[:40]!r} is not a size like '2G' or '512M'")
            return size
        shift = {"K": 10, "M": 20, "G": 30, "T": 40}[match[2].upper()]
        parsed = int(float(match[1]) * (1 << shift))
        if size is not None and size != parsed:
            self.problems.error(keys.where(old), f"is {parsed:,} bytes, but {key} is {size:,}")
        if parsed <= 0:
            self.problems.error(keys.where(old), "must be above 0")
            return size
        return parsed

    def _network(self, keys: ConfigTable) -> tuple[TaskNetwork | None, tuple[str, ...]]:
        mode, hosts = keys.take("network_mode"), keys.take("allowed_hosts")
        found = None
        if mode is not None:
            found = _NETWORKS.get(mode) if isinstance(mode, str) else None
            if found is None:
                self.problems.error(keys.where("network_mode"), f"must be one of {', '.join(_NETWORKS)}")
                return None, ()
        if hosts is None or hosts == []:
            return found, ()
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            self.problems.error(keys.where("allowed_hosts"), "must be a list of hosts")
            return found, ()
        found = found or "allow"
        check_hosts(found, tuple(hosts), keys.where("allowed_hosts"), self.problems)
        return found, tuple(hosts) if found == "allow" else ()

    def _env(self, keys: ConfigTable) -> dict[str, str]:
        field = keys.where("env")
        env = task_folder.parse_env(keys.take("env"), field, self.problems)
        for name, value in env.items():
            if (match := _VARIABLE.fullmatch(value)) is None:
                continue
            wanted, default = match[1], match[2]
            if wanted in self.variables:
                env[name] = self.variables[wanted]
            elif default is not None:
                env[name] = default
            else:
                self.problems.error(
                    f"{field}.{name}",
                    (
                        f"needs the variable {wanted[:80]!r}, which has no default: pass it with "
                        "--variable, or `variables` in Python"
                    ),
                )
        return env

    def _servers(self, value: object) -> tuple[dict[str, Any], ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self.problems.error("environment.mcp_servers", "must be a list of tables")
            return ()
        made: list[dict[str, Any]] = []
        for number, one in enumerate(value):
            field = f"environment.mcp_servers[{number}]"
            if not isinstance(one, dict) or not isinstance(one.get("name"), str) or not one["name"].strip():
                self.problems.error(f"{field}.name", "must be a string")
                continue
            server = _to_json_data(one)
            transport = server.get("transport", "sse")
            server["transport"] = transport = "streamable-http" if transport == "http" else transport
            args = server.get("args", [])
            if transport not in _TRANSPORTS:
                self.problems.error(f"{field}.transport", f"must be one of {', '.join(_TRANSPORTS)}")
                continue
            needed = "command" if transport == "stdio" else "url"
            if not isinstance(server.get(needed), str) or not server[needed].strip():
                self.problems.error(f"{field}.{needed}", f"is required for the transport {transport}")
            elif not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
                self.problems.error(f"{field}.args", "must be a list of strings")
            else:
                made.append(server)
        return tuple(made)

    def _verifier(self, keys: ConfigTable, above: Verifier | None) -> Verifier:
        problems = self.problems
        timeout = keys.number("timeout_sec")
        user = task_folder.parse_user(keys.take("user"), keys.where("user"), problems)
        has_env = keys.has("env")
        env = self._env(keys)
        mode = keys.take("environment_mode")
        if mode not in (None, "shared", "separate"):
            problems.error(keys.where("environment_mode"), "must be 'shared' or 'separate'")
        network, allow = self._network(keys)
        keys.refuse_if_set("environment", "tests run in the image of the task; a separate image is not supported")
        keys.warn_if_set("collect", "collect commands are not run: list artifacts instead")
        keys.warn_if_set("continuous", "tests run only after the agent has submitted")
        keys.warn_unknown()
        below = above or Verifier(mode="shared", reward_from_exit=False)
        return msgspec.structs.replace(
            below,
            timeout=timeout or below.timeout,
            user=user if user is not None else below.user,
            env=env if has_env else below.env,
            mode=below.mode if mode is None else "shared" if mode == "shared" else "fresh",
            network=network or below.network,
            allow=allow if network else below.allow,
        )

    def of_step(self, keys: ConfigTable) -> StepSettings:
        """Return the settings of one step. Those that the step does not specify are the task's."""
        problems = self.problems
        agent = keys.table("agent")
        timeout = agent.number("timeout_sec") or self.timeout
        user = task_folder.parse_user(agent.take("user"), agent.where("user"), problems)
        if user is not None and user != self.user:
            problems.error(agent.where("user"), "all steps of a task run as the same user: set it in [agent]")
        mode, hosts = self._network(agent)
        if mode is not None and (mode, hosts) != (self.network, self.allow):
            problems.error(
                agent.where("network_mode"), "all steps of a task have the same network: set it in [agent]"
            )
        agent.warn_unknown()
        verifier = self._verifier(keys.table("verifier"), self.verifier)
        min_reward = keys.take("min_reward")
        parts: dict[str, float] = {}
        field = keys.where("min_reward")
        if isinstance(min_reward, dict):
            parts = {str(name): float(value) for name, value in min_reward.items() if _is_number(value)}
            if len(parts) < len(min_reward):
                problems.error(field, "values must be finite numbers")
            min_reward = None
        elif min_reward is not None and not _is_number(min_reward):
            problems.error(field, "must be a finite number or a table of them")
            min_reward = None
        keys.warn_if_set("healthcheck", "is not run: wait in workdir/setup.sh instead")
        keys.warn_if_set("artifacts", "artifacts of a step are ignored: list them for the task")
        keys.warn_unknown()
        return StepSettings(timeout, verifier, float(min_reward) if min_reward is not None else None, parts)

    def artifacts(self, workdir: str) -> tuple[str, ...]:
        """Return the task's artifacts, files whose changes are graded, as absolute paths in the sandbox.

        Relative paths are relative to `workdir`. Invalid ones are reported and left out.
        """
        value = self._artifacts
        if value is None:
            return ()
        if not isinstance(value, list):
            self.problems.error("artifacts", "must be a list")
            return ()
        found = []
        for number, one in enumerate(value):
            field = f"artifacts[{number}]"
            source = one.get("source") if isinstance(one, dict) else one
            if isinstance(one, dict) and one.get("service") not in (None, "main"):
                self.problems.error(field, "additional services beside the agent's sandbox are not supported")
            elif (path := task_folder.parse_path(source, field, self.problems, base=workdir)) is not None:
                found.append(path)
        return tuple(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _to_json_data(value: Any) -> Any:
    """Convert TOML values to JSON data. Dates, times, and numbers that JSON cannot represent become strings."""
    if isinstance(value, dict):
        return {str(name): _to_json_data(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_to_json_data(one) for one in value]
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    return value
