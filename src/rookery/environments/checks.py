"""What is wrong with an environment's class, found before a run starts."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Final

from rookery.core import UsageError
from rookery.environments.base import Environment
from rookery.environments.function import FunctionEnvironment

_STAGES: Final = ("setup", "run", "score", "teardown")


def check_environment(env: Environment) -> None:
    """Raise `UsageError` if a stage is missing or wrong, or if the gateway is used and not declared."""
    name = type(env).__name__
    for stage in _STAGES:
        found = getattr(env, stage, None)
        if not callable(found):
            raise UsageError(f"{env.title}: `{stage}` must be a method, and it is {found!r:.80}")
        if stage in ("run", "score") and getattr(found, "__func__", None) is getattr(Environment, stage):
            raise UsageError(
                f"{env.title} has no `{stage}`: define `async def {stage}(self, ctx)` in {name}"
                + ("; it returns the reward, a finite number" if stage == "score" else "")
            )
    declared: Any = env.needs_gateway
    if not isinstance(declared, bool) and not (isinstance(declared, str) and declared.strip()):
        raise UsageError(
            f"{env.title}.needs_gateway must be True, False or a text that says what for, not {declared!r:.80}"
        )
    if not declared and not _declares(env) and any(map(_opens_session, _functions(env))):
        raise UsageError(no_gateway(env.title))


def no_gateway(title: str) -> str:
    """The sentence for an environment that opens gateway sessions without having said so."""
    return (
        f"{title} opens gateway sessions (ctx.door), and this run has no gateway: declare it, with a text that "
        'says what for, `needs_gateway = "the agent\'s model calls"`, in the class or its constructor'
    )


def _declares(env: Environment) -> bool:
    """Whether the environment itself says something about the gateway: then its word counts."""
    own = [kind for kind in type(env).__mro__ if kind not in (Environment, FunctionEnvironment, object)]
    instance = not isinstance(env, FunctionEnvironment) and "needs_gateway" in vars(env)
    return instance or any("needs_gateway" in vars(kind) for kind in own)


def _functions(env: Environment) -> list[Callable[..., Any]]:
    if isinstance(env, FunctionEnvironment):
        return [one for one in (env.play, env.judge) if one is not None]
    return [getattr(env, stage) for stage in _STAGES]


def _opens_session(stage: Callable[..., Any]) -> bool:
    """Whether a stage calls `door` of its context, as far as its source tells."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(stage)))
        parameters = list(inspect.signature(stage).parameters)
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "door"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in parameters[:1]
        for node in ast.walk(tree)
    )
