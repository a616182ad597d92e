"""Sidecar of a task: a JSON object with those fields of a `SweTask` that the task's file format cannot express.

It is stored in the task directory. Rows that describe SWE tasks have the same fields, with the same checks.

Guarantees:
- Exactly the fields that the format cannot express are stored.
- An unknown field, or a value of the wrong type, is an error.
"""

from pathlib import PurePosixPath
from typing import Any, Final

import msgspec

from rookery.core.limits import whole
from rookery.tasks import task_folder
from rookery.tasks.report import ProblemCollector
from rookery.tasks.swe import SweStep, SweTask, Verifier

TASK_FIELDS: Final = (
    "workdir", "artifacts", "env", "user", "memory", "cpus", "disk", "gpus", "network", "allow", "mcp", "rewards",
    "build", "metadata",
)  # fmt: skip
_INTEGER_FIELDS: Final = ("memory", "disk", "gpus")
TEST_TIMEOUT_KEY: Final = "test_timeout"
"""Field of a task or step: seconds for one execution of its tests, unless the step's `verifier.timeout` is set."""
STEP_FIELDS: Final = ("name", "solve", "solve_env", "timeout", "verifier", "min_reward", "min_reward_parts")


def make_sidecar(task: SweTask, read: SweTask | None) -> dict[str, Any]:
    """Return the sidecar of a task: the fields in which `task` differs from `read`.

    `read` is the result of writing the task in a file format and reading it again; None gives an empty sidecar.
    """
    if read is None:
        return {}
    fields = {
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
    return {**fields, "steps": steps} if any(steps) else fields


def list_fields(fields: dict[str, Any]) -> list[str]:
    """Return the names of the fields in a sidecar, such as `memory` or `steps[0].timeout`."""
    names = [name for name in fields if name != "steps"]
    for number, step in enumerate(fields.get("steps", [])):
        names += [f"steps[{number}].{name}" for name in step]
    return names


def merge_sidecar(task: SweTask, fields: object, field: str, problems: ProblemCollector) -> SweTask:
    """Return the task with the fields of a sidecar, which override its own. Problems are reported.

    `field` is the location of the sidecar in messages; it is empty if `fields` come from a row.
    """
    if not isinstance(fields, dict):
        problems.error(field, "must be an object")
        return task
    at = f"{field}." if field else ""
    known = {name: value for name, value in fields.items() if name in TASK_FIELDS}
    for name in fields.keys() - {*TASK_FIELDS, "steps", TEST_TIMEOUT_KEY}:
        problems.error(f"{at}{str(name)[:80]}", "is not a known field")
    steps = fields.get("steps", [])
    if not isinstance(steps, list) or len(steps) > len(task.steps):
        problems.error(f"{at}steps", "must be a list with at most one object per step of the task")
        return task
    merged_steps = []
    for number, step in enumerate(task.steps):
        more = steps[number] if number < len(steps) else {}
        where = f"{at}steps[{number}]"
        if not isinstance(more, dict):
            problems.error(where, "must be an object")
            continue
        for name in more.keys() - {*STEP_FIELDS, TEST_TIMEOUT_KEY}:
            problems.error(f"{where}.{str(name)[:80]}", "is not a known field")
        put = _set_fields(step, {name: more[name] for name in STEP_FIELDS if name in more}, where, problems)
        has_own = TEST_TIMEOUT_KEY in more
        seconds = task_folder.parse_number(
            more.get(TEST_TIMEOUT_KEY) if has_own else fields.get(TEST_TIMEOUT_KEY),
            f"{where}.{TEST_TIMEOUT_KEY}" if has_own else f"{at}{TEST_TIMEOUT_KEY}",
            problems,
        )
        verifier = more.get("verifier")
        if seconds is not None and not (isinstance(verifier, dict) and "timeout" in verifier):
            put = msgspec.structs.replace(put, verifier=msgspec.structs.replace(put.verifier, timeout=seconds))
        merged_steps.append(put)
    whole: SweTask = _set_fields(
        msgspec.structs.replace(task, steps=tuple(merged_steps) or task.steps), known, field, problems
    )
    check_task(whole, at, problems)
    return whole


def _set_fields(into: Any, values: dict[str, Any], field: str, problems: ProblemCollector) -> Any:
    types = {one.name: one.type for one in msgspec.structs.fields(into)}
    at = f"{field}." if field else ""
    fine = {}
    for name, value in values.items():
        try:
            # JSON written from floats has integers like 2e9.
            fine[name] = msgspec.convert(whole(value) if name in _INTEGER_FIELDS else value, types[name])
        except msgspec.ValidationError as error:
            problems.error(f"{at}{name}", str(error).replace("`$`", "it").replace("`$.", "`"))
            continue
        if isinstance(value, dict) and types[name] is Verifier:
            for key in value.keys() - set(Verifier.__struct_fields__):
                problems.error(f"{at}{name}.{str(key)[:80]}", "is not a known field")
    return msgspec.structs.replace(into, **fine) if fine else into


def check_task(task: SweTask, at: str, problems: ProblemCollector) -> None:
    """Report field values that have the right type but are invalid.

    `at` is the prefix of field names in messages.
    """
    task_folder.parse_workdir(task.workdir, f"{at}workdir", problems)
    for path in task.artifacts:
        task_folder.parse_path(path, f"{at}artifacts", problems)
    task_folder.parse_env(task.env, f"{at}env", problems)
    task_folder.parse_user(task.user, f"{at}user", problems)
    for name in ("memory", "disk", "cpus", "build"):
        task_folder.parse_number(getattr(task, name), f"{at}{name}", problems, most=1e15)
    if task.gpus is not None and task.gpus < 0:
        problems.error(f"{at}gpus", "must not be negative")
    check_hosts(task.network, task.allow, f"{at}allow", problems)
    for number, step in enumerate(task.steps):
        _check_step(step, f"{at}steps[{number}]", problems)


def _check_step(step: SweStep, at: str, problems: ProblemCollector) -> None:
    if step.name:
        task_folder.parse_name(step.name, f"{at}.name", problems)
    for name, path in (("solve", step.solve), ("verifier.script", step.verifier.script)):
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            problems.error(f"{at}.{name}", f"{path[:80]!r} must be a relative path without '..'")
    task_folder.parse_env(step.solve_env, f"{at}.solve_env", problems)
    task_folder.parse_number(step.timeout, f"{at}.timeout", problems)
    task_folder.parse_env(step.verifier.env, f"{at}.verifier.env", problems)
    task_folder.parse_user(step.verifier.user, f"{at}.verifier.user", problems)
    task_folder.parse_number(step.verifier.timeout, f"{at}.verifier.timeout", problems)
    if step.verifier.network is not None or step.verifier.allow:
        check_hosts(step.verifier.network or "none", step.verifier.allow, f"{at}.verifier.allow", problems)


def check_hosts(network: str, allow: tuple[str, ...], field: str, problems: ProblemCollector) -> None:
    """Report allowed hosts that are invalid, or that have no effect because `network` is not `allow`."""
    from rookery.sandboxes.egress.rules import parse_rule  # slow to import

    if network != "allow":
        if allow:
            problems.error(field, "single hosts can be allowed only with network 'allow'")
        return
    for host in allow:
        try:
            parse_rule(host)
        except ValueError as error:
            problems.error(field, str(error))
