"""Finding an environment by name, `module:attr` or `file.py`, here and again in a runner process."""

import importlib
import importlib.util
import inspect
import io
import pickle
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import msgspec

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.core.suggestions import suggestion
from rookery.environments.base import Environment
from rookery.environments.function import FunctionEnvironment
from rookery.environments.import_watch import ImportHangsError, import_watch

GROUP = "rookery.environments"


class EnvironmentRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a runner process finds the same environment. `made_with` is pickled by us, for our own process."""

    source: str
    """An entry point's name, `module:attr`, or `path.py[:attr]`."""
    made_with: bytes = b""
    config: dict[str, Any] = {}
    """Keyword arguments for an environment given as a class."""
    path: tuple[str, ...] = ()
    """Where modules were looked for."""
    files: tuple[str, ...] = ()
    """Files loaded as environments that it was made with something of."""
    main: str = ""
    """The script it was made in, where what it was made with comes from there."""


def load_environment(ref: EnvironmentRef | str, /, **config: Any) -> Environment:
    """The environment behind a reference; every problem with it is a `UsageError` in words."""
    if isinstance(ref, str):
        ref = EnvironmentRef(source=ref, config=config)
    for entry in ref.path:
        if entry not in sys.path:
            sys.path.append(entry)
    with import_watch(ref.source):
        found = _find(ref.source)
    if isinstance(found, type) and issubclass(found, Environment):
        return _made(found, ref)
    if isinstance(found, Environment) or inspect.iscoroutinefunction(found):
        if ref.config:
            raise UsageError(
                f"{ref.source} is already made and takes no configuration: {', '.join(sorted(ref.config))}"
            )
        return found if isinstance(found, Environment) else FunctionEnvironment(found)
    raise UsageError(
        f"{ref.source} is {type(found).__name__}, not an environment: it must be a subclass or an object of "
        "rookery.Environment, or an async function decorated with @rookery.environment"
    )


def _made(kind: type[Environment], ref: EnvironmentRef) -> Environment:
    try:
        args, kwargs = _arguments(ref) if ref.made_with else ((), ref.config)
        return kind(*args, **kwargs)
    except UsageError:
        raise
    except Exception as error:
        # `Environment.__new__` takes anything, so the class's own signature says nothing.
        own = str(inspect.signature(kind.__init__)).replace("(self, ", "(").replace("(self)", "()")
        raise UsageError(
            f"{ref.source} cannot be made: {describe(error)}; its signature is {kind.__name__}{own}"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Reads what our own parent process wrote; its `__main__` is a module here."""

    main: ModuleType | None = None

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self.main is not None:
            return _pick(self.main, name, "the script")
        return super().find_class(module, name)


def _arguments(ref: EnvironmentRef) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for file in ref.files:
        _load_file(Path(file))
    reader = _Unpickler(io.BytesIO(ref.made_with))
    reader.main = _load_file(Path(ref.main)) if ref.main else None
    made: tuple[tuple[Any, ...], dict[str, Any]] = reader.load()
    return made


def reference(env: Environment) -> EnvironmentRef:
    """The reference by which another process finds `env` again."""
    function = isinstance(env, FunctionEnvironment)
    target: Any = env if function else type(env)
    module, name = target.__module__, target.__qualname__
    if "<locals>" in name:
        raise UsageError(
            f"{name} is defined inside a function, so runner processes cannot import it: "
            "move it to the top of a module, or use runners=0"
        )
    if function:
        name = _name_of(env, module, name)
    main = getattr(sys.modules["__main__"], "__file__", None)
    if module == "__main__":
        if main is None:
            raise UsageError(f"{name} is defined in an interactive session: use runners=0, or put it into a file")
        source = f"{Path(main).resolve()}:{name}"
    elif (file := getattr(sys.modules.get(module), "__rookery_file__", None)) is not None:
        source = f"{file}:{name}"
    else:
        source = f"{module}:{name}"
    path = tuple(sys.path)
    if function or env._made_with == ((), {}):
        return EnvironmentRef(source=source, path=path)
    try:
        made_with = pickle.dumps(env._made_with)
    except Exception as error:
        raise UsageError(
            f"{name} was made with arguments that cannot travel to runner processes ({describe(error)}): "
            "use plain data and what is at the top of a module, or runners=0"
        ) from error
    files = [
        vars(loaded)["__rookery_file__"]
        for module, loaded in tuple(sys.modules.items())
        if hasattr(loaded, "__rookery_file__") and module.encode() in made_with
    ]
    return EnvironmentRef(
        source=source,
        made_with=made_with,
        path=path,
        files=tuple(files),
        main=str(Path(main).resolve()) if main is not None and b"__main__" in made_with else "",
    )


def _name_of(env: Environment, module: str, name: str) -> str:
    """The name under which a module holds an environment that was made of a function."""
    space = vars(sys.modules[module])
    if space.get(name) is env:
        return name
    for other, value in space.items():
        if value is env:
            return other
    raise UsageError(
        f"the environment made of {name} has no name in its module {module}, so runner processes cannot find "
        "it: assign it at the top of the module, or use runners=0"
    )


def known_environments() -> list[str]:
    return sorted({point.name for point in entry_points(group=GROUP)})


def _find(source: str) -> Any:
    head, _, attr = source.rpartition(":")
    if source.endswith(".py") or head.endswith(".py"):
        path, name = (source, "") if source.endswith(".py") else (head, attr)
        return _pick(_load_file(Path(path)), name, path)
    if head:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # a console script starts without the folder it is called in
        try:
            module = importlib.import_module(head)
        except ModuleNotFoundError as error:
            if error.name is not None and (head == error.name or head.startswith(f"{error.name}.")):
                raise UsageError(f"no module {head!r} to find the environment {source!r} in") from error
            raise UsageError(f"{head} cannot be imported: {describe(error)}") from error
        except ImportHangsError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"{head} cannot be imported: {describe(error)}") from error
        return _pick(module, attr, head)
    for point in entry_points(group=GROUP):
        if point.name == source:
            try:
                return point.load()
            except ImportHangsError:
                raise
            except (Exception, SystemExit) as error:
                raise UsageError(
                    f"the environment {source!r} ({point.value}) cannot be imported: {describe(error)}"
                ) from error
    known = known_environments()
    hint = f"; did you mean ./{source}.py?" if Path(f"{source}.py").exists() else suggestion(source, known)
    raise UsageError(
        f"unknown environment {source!r}: known are {', '.join(known) or 'none'}; "
        f"or name a file.py or module:attr{hint}"
    )


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"no environment file {path}")
    name = f"rookery_env_{path.stem}_{crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)["__rookery_file__"] = str(path)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # its neighbours, as for a script
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportHangsError):
            raise
        if isinstance(error, Exception | SystemExit):
            raise UsageError(f"{path} cannot be imported: {describe(error)}{_guard_hint(error)}") from error
        raise
    return module


def _guard_hint(error: BaseException) -> str:
    """Runner processes import the script an environment is defined in, and must not start it all over again."""
    starts = isinstance(error, RuntimeError) and "running event loop" in str(error)
    return '. Put what starts the engine under `if __name__ == "__main__":`' if starts else ""


def _pick(module: ModuleType, attr: str, source: str) -> Any:
    if attr:
        found: Any = module
        for part in attr.split("."):
            if not hasattr(found, part):
                raise UsageError(f"{source} has no {attr!r}")
            found = getattr(found, part)
        return found
    own = [
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_own(value, module)
    ]
    objects = [pair for pair in own if isinstance(pair[1], Environment)]
    named = dict(own)
    if "environment" in named:
        return named["environment"]
    pick = objects or own
    if len(pick) == 1:
        return pick[0][1]
    if not pick:
        raise UsageError(
            f"{source} defines no environment: subclass rookery.Environment or use @rookery.environment"
        )
    names = ", ".join(name for name, _ in pick)
    raise UsageError(f"{source} defines several environments ({names}): choose one with {source}:NAME")


def _is_own(value: Any, module: ModuleType) -> bool:
    """Whether a module's attribute is an environment it offers, not one it only imported."""
    if (isinstance(value, type) and issubclass(value, Environment)) or isinstance(value, FunctionEnvironment):
        return bool(value.__module__ == module.__name__)
    # An object's module is its class's, which may be ours: `env = ToolEnvironment(…)`.
    return isinstance(value, Environment)
