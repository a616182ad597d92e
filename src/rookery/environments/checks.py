"""Checks of an environment's definition that are made before a run starts."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Final

from rookery.core import UsageError
from rookery.environments.base import Environment, FunctionEnvironment

_STAGES: Final = ("setup", "run", "score", "teardown")


def check_environment(env: Environment) -> None:
    """Check the definition of an environment before a run; raise `UsageError` if it is invalid.

    It is invalid if `run` or `score` is missing, if a stage is not callable, or if the source of a stage calls
    `ctx.gateway_session` although `needs_gateway` is not set.
    """
    name = type(env).__name__
    for stage in _STAGES:
        method = getattr(env, stage, None)
        if not callable(method):
            raise UsageError(f"{env.title}: `{stage}` must be a method, not {method!r:.80}")
        if stage in ("run", "score") and getattr(method, "__func__", None) is getattr(Environment, stage):
            raise UsageError(
                f"{env.title} has no `{stage}`: define `async def {stage}(self, ctx)` in {name}"
                + ("; it returns the reward, a finite number" if stage == "score" else "")
            )
    declared: Any = env.needs_gateway
    if not isinstance(declared, bool) and not (isinstance(declared, str) and declared.strip()):
        raise UsageError(
            f"{env.title}.needs_gateway must be True, False or a text that says what for, not {declared!r:.80}"
        )
    if not declared and not _declares_gateway(env) and any(map(_opens_session, _get_stage_functions(env))):
        raise UsageError(missing_gateway_message(env.title))


def missing_gateway_message(title: str) -> str:
    """Return the error message for an environment that opens gateway sessions without setting `needs_gateway`."""
    return (
        f"{title} calls ctx.gateway_session, but this run has no gateway: declare what it is needed for, as in "
        '`needs_gateway = "the agent\'s model calls"`, on the class or in its constructor'
    )


def _declares_gateway(env: Environment) -> bool:
    """Return whether the user's class, or the instance, sets `needs_gateway` to any value, even False."""
    user_classes = [cls for cls in type(env).__mro__ if cls not in (Environment, FunctionEnvironment, object)]
    on_instance = not isinstance(env, FunctionEnvironment) and "needs_gateway" in vars(env)
    return on_instance or any("needs_gateway" in vars(cls) for cls in user_classes)


def _get_stage_functions(env: Environment) -> list[Callable[..., Any]]:
    if isinstance(env, FunctionEnvironment):
        return [function for function in (env.run_function, env.score_function) if function is not None]
    return [getattr(env, stage) for stage in _STAGES]


def _opens_session(stage: Callable[..., Any]) -> bool:
    """Return whether the source code of a stage calls `gateway_session` on the stage's first argument."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(stage)))
        parameters = list(inspect.signature(stage).parameters)
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "gateway_session"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in parameters[:1]
        for node in ast.walk(tree)
    )
