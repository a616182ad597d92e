"""What a format has no place for, kept beside it as plain data; and the same checks for rows, which are that data.

Promises:
- exactly the fields that a format could not say are kept beside;
- what is said beside is checked as strictly as what a format says, and a field that is not known is a problem.
"""

from pathlib import PurePosixPath
from typing import Any, Final

import msgspec

from rookery.core.limits import whole
from rookery.tasks import folders
from rookery.tasks.report import Notes
from rookery.tasks.swe import SweStep, SweTask, Verifier

TASK_FIELDS: Final = (
    "workdir", "artifacts", "env", "user", "memory", "cpus", "disk", "gpus", "network", "allow", "mcp", "rewards",
    "build", "metadata",
)  # fmt: skip
_WHOLE: Final = ("memory", "disk", "gpus")
TEST_TIMEOUT_KEY: Final = "test_timeout"
"""Of a task or a step: seconds for one run of its tests, unless the step's `verifier.timeout` says it."""
STEP_FIELDS: Final = ("name", "solve", "solve_env", "timeout", "verifier", "enough", "enough_parts")


def aside_of(task: SweTask, read: SweTask | None) -> dict[str, Any]:
    """What to keep beside a task whose written form reads as `read`."""
    if read is None:
        return {}
    said = {
        name: msgspec.to_builtins(getattr(task, name))
        for name in TASK_FIELDS
        if getattr(task, name) != getattr(read, name)
    }
    steps = [
        {
            name: msgspec.to_builtins(getattr(step, name))
            for name in STEP_FIELDS
            if getattr(step, name) != getattr(other, name)
        }
        for step, other in zip(task.steps, read.steps, strict=True)
    ]
    return {**said, "steps": steps} if any(steps) else said


def names_of(said: dict[str, Any]) -> list[str]:
    """The fields that are kept beside."""
    names = [name for name in said if name != "steps"]
    for number, step in enumerate(said.get("steps", [])):
        names += [f"steps[{number}].{name}" for name in step]
    return names


def merged(task: SweTask, said: object, field: str, notes: Notes) -> SweTask:
    """The task, with what is said beside it. `field`: where that stands; empty for a row's own fields."""
    if not isinstance(said, dict):
        notes.wrong(field, "it must hold an object")
        return task
    at = f"{field}." if field else ""
    known = {name: value for name, value in said.items() if name in TASK_FIELDS}
    for name in said.keys() - {*TASK_FIELDS, "steps", TEST_TIMEOUT_KEY}:
        notes.wrong(f"{at}{str(name)[:80]}", "it is not known")
    steps = said.get("steps", [])
    if not isinstance(steps, list) or len(steps) > len(task.steps):
        notes.wrong(f"{at}steps", "it must be a list, with an object for each step of the task")
        return task
    made = []
    for number, step in enumerate(task.steps):
        more = steps[number] if number < len(steps) else {}
        where = f"{at}steps[{number}]"
        if not isinstance(more, dict):
            notes.wrong(where, "it must be an object")
            continue
        for name in more.keys() - {*STEP_FIELDS, TEST_TIMEOUT_KEY}:
            notes.wrong(f"{where}.{str(name)[:80]}", "it is not known")
        put = _put(step, {name: more[name] for name in STEP_FIELDS if name in more}, where, notes)
        own = TEST_TIMEOUT_KEY in more
        seconds = folders.number_of(
            more.get(TEST_TIMEOUT_KEY) if own else said.get(TEST_TIMEOUT_KEY),
            f"{where}.{TEST_TIMEOUT_KEY}" if own else f"{at}{TEST_TIMEOUT_KEY}",
            notes,
        )
        verifier = more.get("verifier")
        if seconds is not None and not (isinstance(verifier, dict) and "timeout" in verifier):
            put = msgspec.structs.replace(put, verifier=msgspec.structs.replace(put.verifier, timeout=seconds))
        made.append(put)
    whole: SweTask = _put(msgspec.structs.replace(task, steps=tuple(made) or task.steps), known, field, notes)
    checked(whole, at, notes)
    return whole


def _put(into: Any, values: dict[str, Any], field: str, notes: Notes) -> Any:
    types = {one.name: one.type for one in msgspec.structs.fields(into)}
    at = f"{field}." if field else ""
    fine = {}
    for name, value in values.items():
        try:
            # JSON that was made of floats has whole numbers of bytes like 2e9.
            fine[name] = msgspec.convert(whole(value) if name in _WHOLE else value, types[name])
        except msgspec.ValidationError as error:
            notes.wrong(f"{at}{name}", str(error).replace("`$`", "it").replace("`$.", "`"))
            continue
        if isinstance(value, dict) and types[name] is Verifier:
            for key in value.keys() - set(Verifier.__struct_fields__):
                notes.wrong(f"{at}{name}.{str(key)[:80]}", "it is not known")
    return msgspec.structs.replace(into, **fine) if fine else into


def checked(task: SweTask, at: str, notes: Notes) -> None:
    """What types cannot say. `at` stands before the name of each field."""
    folders.workdir_of(task.workdir, f"{at}workdir", notes)
    for path in task.artifacts:
        folders.path_of(path, f"{at}artifacts", notes)
    folders.env_of(task.env, f"{at}env", notes)
    folders.user_of(task.user, f"{at}user", notes)
    for name in ("memory", "disk", "cpus", "build"):
        folders.number_of(getattr(task, name), f"{at}{name}", notes, most=1e15)
    if task.gpus is not None and task.gpus < 0:
        notes.wrong(f"{at}gpus", "it must not be below 0")
    hosts_of(task.network, task.allow, f"{at}allow", notes)
    for number, step in enumerate(task.steps):
        _checked_step(step, f"{at}steps[{number}]", notes)


def _checked_step(step: SweStep, at: str, notes: Notes) -> None:
    if step.name:
        folders.name_of(step.name, f"{at}.name", notes)
    for name, path in (("solve", step.solve), ("verifier.script", step.verifier.script)):
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            notes.wrong(f"{at}.{name}", f"{path[:80]!r} must be a relative path without '..'")
    folders.env_of(step.solve_env, f"{at}.solve_env", notes)
    folders.number_of(step.timeout, f"{at}.timeout", notes)
    folders.env_of(step.verifier.env, f"{at}.verifier.env", notes)
    folders.user_of(step.verifier.user, f"{at}.verifier.user", notes)
    folders.number_of(step.verifier.timeout, f"{at}.verifier.timeout", notes)
    if step.verifier.network is not None or step.verifier.allow:
        hosts_of(step.verifier.network or "none", step.verifier.allow, f"{at}.verifier.allow", notes)


def hosts_of(network: str, allow: tuple[str, ...], field: str, notes: Notes) -> None:
    from rookery.sandboxes.egress_rules import rule

    if network != "allow":
        if allow:
            notes.wrong(field, "hosts are allowed one by one only where the network is 'allow'")
        return
    for host in allow:
        try:
            rule(host)
        except ValueError as error:
            notes.wrong(field, str(error))
