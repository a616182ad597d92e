"""Mixtures: one run over the tasks of several environments, each with its own settings and weight.

`Mixture` is itself an environment, so whatever runs an environment also runs a mixture. The engine looks up the
environment of each task by the name in `Task.environment`.

- The order of the tasks depends only on the environments, their tasks, their weights and the seed.
- The ID of a task begins with the name of its environment, so tasks of two environments never have the same ID.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from msgspec.structs import replace

from rookery.core import Limits, Sampling, SandboxSpec, Task, ToolSchema, UsageError
from rookery.core.errors import describe, suggestion
from rookery.core.options import struct_option
from rookery.environments.base import Environment, reward_bounds
from rookery.environments.loader import EnvironmentRef, load_environment, make_reference
from rookery.tasks import load_tasks, tasks_from
from rookery.tasks.task_order import interleave_tasks

MIXTURE: Final = "rookery.environments.mixture:Mixture"
"""Location of `Mixture`, which a run of a mixture file stores as its environment."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_STRUCTS: Final = {"limits": Limits, "sandbox": SandboxSpec, "sampling": Sampling}


class MixtureEntry(msgspec.Struct, frozen=True, eq=False):
    """One environment of a mixture, with its settings.

    A setting of the entry overrides the same setting of the run, for this environment only.
    """

    environment: Any
    """An environment object or the location of one, as `Engine` accepts it."""
    name: str = ""
    """Name in tables, task IDs and `Group.environment`. Empty means the environment's own name."""
    weight: float = 1.0
    """Share of the groups, relative to the weights of the other entries."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for the environment's class, if `environment` is a location."""
    tasks: Any = None
    """A source of tasks, as `load_tasks` accepts it, or a list of tasks. None means the environment's own."""
    num_tasks: int | None = None
    """Maximum number of tasks; None means all."""
    row_format: str = ""
    """Format of the rows if `tasks` is a file of a well-known dataset, such as `gsm8k`."""
    columns: dict[str, str] = {}
    """Names of the columns of the rows in `tasks`, by field, such as `{"prompt": "question"}`."""
    limits: Limits = Limits()
    sandbox: SandboxSpec = SandboxSpec()
    explicit_sandbox_fields: tuple[str, ...] = ()
    """Names of fields of `sandbox` that apply even if they have the default value."""
    sampling: Sampling = Sampling()

    def __reduce__(self) -> tuple[Callable[..., "MixtureEntry"], tuple[Any, ...]]:
        """Pickle a reference to the environment, as runner processes load it, and not its attributes."""
        # Runners get their tasks one by one.
        values = msgspec.structs.asdict(self) | {"tasks": None, "row_format": "", "columns": {}}
        if isinstance(self.environment, Environment):
            values |= {"environment": make_reference(self.environment), "arguments": {}}
        return _restore_entry, (values,)

    def load(self) -> "MixtureEntry":
        """Return the entry with its environment loaded and its settings checked. Raise `UsageError` if invalid."""
        env = self.environment
        if isinstance(env, str):
            env = load_environment(env, **self.arguments)
        elif not isinstance(env, Environment):
            raise UsageError(f"an entry of a mixture needs an environment or the location of one, not {env!r:.80}")
        if isinstance(env, Mixture):
            raise UsageError("a mixture cannot contain another mixture: list its environments instead")
        name = self.name or env.title
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r:.80} cannot name an environment of a mixture: use up to 64 letters, digits, `_`, `-` "
                "and `.`, set as `name`"
            )
        if isinstance(self.weight, bool) or not (isfinite(self.weight) and self.weight > 0):
            raise UsageError(f"{name}: weight must be a number above 0, got {self.weight!r}")
        if (self.row_format or self.columns) and not isinstance(self.tasks, str | Path):
            raise UsageError(f"{name}: row_format and columns need `tasks`, a file of rows")
        reward_bounds(env)
        return replace(self, environment=env, name=name)


def _restore_entry(values: dict[str, Any]) -> MixtureEntry:
    env = values["environment"]
    return MixtureEntry(
        **values | {"environment": load_environment(env) if isinstance(env, EnvironmentRef) else env}
    )


def make_entry(value: "MixtureEntry | Environment | Mapping[str, Any] | str") -> MixtureEntry:
    """Return an entry of a mixture, which may be given as a dictionary of its fields or as an environment alone.

    Raise `UsageError` for an unknown field or a value of the wrong type.
    """
    if isinstance(value, MixtureEntry):
        return value
    if not isinstance(value, Mapping):
        return MixtureEntry(value)
    fields = [name for name in MixtureEntry.__struct_fields__ if name != "explicit_sandbox_fields"]
    title = f"environment {value.get('name') or value.get('environment')!r:.80} of the mixture"
    for key in value:
        if key not in fields:
            raise UsageError(
                f"{title} has no key {key!r:.80} (its keys are {', '.join(fields)}){suggestion(str(key), fields)}"
            )
    if "environment" not in value:
        raise UsageError(f"{title} needs the key environment: a name, module:attribute or file.py")
    values: dict[str, Any] = dict(value)
    for key, kind in _STRUCTS.items():
        if key in values:
            values[key] = struct_option(f"{title}: {key}", values[key], cast("type[msgspec.Struct]", kind))
    values["explicit_sandbox_fields"] = (
        tuple(value["sandbox"]) if isinstance(value.get("sandbox"), Mapping) else ()
    )
    checked = {key: item for key, item in values.items() if key not in ("environment", "tasks")}
    try:
        entry = msgspec.convert({**checked, "environment": None}, MixtureEntry)
    except msgspec.ValidationError as error:
        raise UsageError(f"{title}: {error}") from None
    return replace(entry, environment=values["environment"], tasks=values.get("tasks"))


class Mixture(Environment):
    """Several environments in one run.

        mixture = Mixture([MixtureEntry("arithmetic", weight=2), MixtureEntry(MyEnvironment(), name="mine")])

    An entry can also be a dictionary of the fields of `MixtureEntry`, as in a mixture file, or an environment.
    """

    def __init__(
        self,
        environments: Sequence[MixtureEntry | Environment | Mapping[str, Any] | str],
        *,
        seed: int = 0,
        name: str = "mixture",
    ) -> None:
        """Load the environments. `seed` determines the order of their tasks."""
        if isinstance(environments, str) or not environments:
            raise UsageError("a mixture needs a list of at least one environment")
        entries = [make_entry(one) for one in environments]
        self._constructor_arguments = ((), {"environments": entries, "seed": seed, "name": name})
        self.name = name
        self.seed = seed
        self.entries: dict[str, MixtureEntry] = {}
        """The entries by name, with loaded environments."""
        for given in entries:
            entry = given.load()
            if entry.name in self.entries:
                raise UsageError(
                    f"two environments of the mixture are named {entry.name!r}: set `name` of one of them"
                )
            self.entries[entry.name] = entry
        members = [entry.environment for entry in self.entries.values()]
        bounds = [reward_bounds(env) for env in members]
        self.reward_range = min(low for low, _ in bounds), max(high for _, high in bounds)
        self.roles = tuple(dict.fromkeys(role for env in members for role in env.roles))
        self.needs_gateway = next((env.needs_gateway for env in members if env.needs_gateway), False)
        self.can_run_unrecorded = all(env.can_run_unrecorded for env in members)

    @property
    def weights(self) -> dict[str, float]:
        return {name: entry.weight for name, entry in self.entries.items()}

    @property
    def needs_sandbox(self) -> bool:
        return any(entry.environment.needs_sandbox for entry in self.entries.values())

    def tools(self) -> Sequence[ToolSchema]:
        """Return the tools of all environments; of tools with the same name, the first."""
        found: dict[str, ToolSchema] = {}
        for entry in self.entries.values():
            for tool in entry.environment.tools():
                found.setdefault(tool.name, tool)
        return list(found.values())

    def tasks(self) -> list[Task]:
        """Return the tasks of all environments, each once, in the order in which they take turns."""
        return interleave_tasks(
            (task for entry in self.entries.values() for task in _load_entry_tasks(entry)), self.weights, self.seed
        )

    def held_out_tasks(self, count: int) -> list[Task] | None:
        """Return tasks for an evaluation, in proportion to the weights. None if an environment has none."""
        found: list[Task] = []
        total = sum(self.weights.values())
        for entry in self.entries.values():
            env: Environment = entry.environment
            own = env.held_out_tasks(max(1, round(count * entry.weight / total)))
            if own is None:
                return None
            found += tag_tasks(tasks_from(own, env.title, own_limits=env.own_limits), entry.name)
        return interleave_tasks(found, self.weights, self.seed)


def get_entries(environment: Environment) -> dict[str, MixtureEntry]:
    """Return the environments of a mixture by name. Any other environment has one entry, with an empty name."""
    return environment.entries if isinstance(environment, Mixture) else {"": MixtureEntry(environment)}


def tag_tasks(tasks: Iterable[Task], name: str) -> list[Task]:
    """Return the tasks as those of the environment `name` of a mixture, with this name before their IDs."""
    return [replace(task, id=f"{name}/{task.id}", environment=name) for task in tasks]


def _load_entry_tasks(entry: MixtureEntry) -> list[Task]:
    env: Environment = entry.environment
    limit, own = entry.num_tasks, env.own_limits
    if isinstance(entry.tasks, str | Path):
        tasks = load_tasks(
            entry.tasks, limit=limit, own_limits=own, row_format=entry.row_format, columns=entry.columns
        )
        return tag_tasks(tasks, entry.name)
    try:
        chosen = env.tasks() if entry.tasks is None else entry.tasks
        return tag_tasks(tasks_from(chosen, env.title, limit=limit, own_limits=own), entry.name)
    except UsageError as error:
        raise UsageError(f"{entry.name}: {error}") from error
    except Exception as error:  # user code can raise anything
        raise UsageError(f"the tasks of {entry.name} could not be created: {describe(error)}") from error


def is_mixture_file(location: str) -> bool:
    """Return whether the location of an environment is the path of a mixture file."""
    return location.endswith(".toml")


def read_mixture(path: str | Path) -> dict[str, Any]:
    """Read a mixture file; return the arguments of `Mixture` as plain data, with absolute paths.

        [[environments]]
        environment = "arithmetic"
        weight = 2

    Relative paths are relative to the file. Raise `UsageError` if the file cannot be read or a key is unknown.
    """
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            found = tomllib.load(opened)
    except OSError as error:
        raise UsageError(f"the mixture file {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the mixture file {file} is not TOML: {error}") from None
    entries = found.get("environments")
    strange = sorted(set(found) - {"environments"})
    if strange or not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        problem = f"it has the unknown key {strange[0]!r}" if strange else "it has no list [[environments]]"
        raise UsageError(
            f"{file} is not a mixture file: {problem}; write one [[environments]] for each environment"
        )
    folder = file.resolve().parent
    for entry in entries:
        for key in ("environment", "tasks"):
            if isinstance(entry.get(key), str) and (key == "tasks" or ".py" in entry[key]):
                entry[key] = _make_absolute(entry[key], folder)
        make_entry(entry)  # raises if a key is unknown or has the wrong type
    return {"environments": entries, "name": file.stem}


def _make_absolute(location: str, folder: Path) -> str:
    """Return the location with an absolute path if it names a file or directory next to the mixture file."""
    path, colon, attribute = location.rpartition(":") if ".py:" in location else (location, "", "")
    absolute = folder / Path(path).expanduser()
    return f"{absolute}{colon}{attribute}" if absolute.exists() else location
