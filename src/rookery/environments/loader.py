"""Load environments by name, `module:attribute`, `file.py` or `PREFIX:NAME`.

Runs in the supervisor process and in every runner.
"""

import importlib
import importlib.util
import inspect
import io
import pickle
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import msgspec

from rookery.core import UsageError
from rookery.core.errors import describe, suggestion
from rookery.environments.base import Environment, FunctionEnvironment
from rookery.environments.import_watchdog import ImportHangError, import_watchdog

GROUP = "rookery.environments"
"""Entry-point group in which installed packages register environments."""
PREFIX_GROUP = "rookery.environment_prefixes"
"""Entry-point group of environment classes that are referred to as `PREFIX:NAME`, such as `verifiers:gsm8k`. NAME
is the first argument of the class."""


class EnvironmentRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Serialisable reference to an environment, from which a runner process creates an equal instance."""

    source: str
    """Name of an entry point, `module:attribute`, `path.py[:attribute]`, or `PREFIX:NAME`."""
    arguments: bytes = b""
    """Pickled constructor arguments, written and read by Rookery's own processes only."""
    config: dict[str, Any] = {}
    """Keyword arguments for the constructor if the source is a class. Ignored if `arguments` is set."""
    path: tuple[str, ...] = ()
    """`sys.path` of the process that made the reference. The loading process appends entries that it lacks."""
    files: tuple[str, ...] = ()
    """Environment files (`file.py`) that define classes or functions used in `arguments`."""
    main: str = ""
    """The `__main__` script, if it defines classes or functions used in `arguments`; otherwise empty."""


def load_environment(ref: EnvironmentRef | str, /, **config: Any) -> Environment:
    """Import an environment and return an instance of it.

        env = load_environment("arithmetic", split="held-out")

    If `ref` is a string, it is the name of an entry point, `module:attribute`, `path.py[:attribute]`,
    `PREFIX:NAME` or the path of a mixture file, `path.toml`, and `config` contains the constructor arguments.
    Raise `UsageError` if the environment cannot be imported or constructed.
    """
    if isinstance(ref, str):
        ref = EnvironmentRef(source=ref, config=config)
    for entry in ref.path:
        if entry not in sys.path:
            sys.path.append(entry)
    prefix, _, name = ref.source.partition(":")
    with import_watchdog(ref.source):
        point = next(iter(entry_points(group=PREFIX_GROUP, name=prefix)), None) if name else None
        if point is not None:
            return _construct(_load_point(point), ref, name)
        target = _resolve(ref.source)
    if isinstance(target, type) and issubclass(target, Environment):
        return _construct(target, ref)
    if isinstance(target, Environment) or inspect.iscoroutinefunction(target):
        if ref.config:
            raise UsageError(
                f"{ref.source} is an instance and takes no arguments, but got: {', '.join(sorted(ref.config))}"
            )
        return target if isinstance(target, Environment) else FunctionEnvironment(target)
    raise UsageError(
        f"{ref.source} is of type {type(target).__name__}, not an environment: it must be a subclass or an "
        "instance of rookery.Environment, or an async function decorated with @rookery.environment"
    )


def _construct(cls: type[Environment], ref: EnvironmentRef, *first: str) -> Environment:
    try:
        args, kwargs = _load_arguments(ref) if ref.arguments else (first, ref.config)
        return cls(*args, **kwargs)
    except UsageError:
        raise
    except Exception as error:
        # inspect.signature(cls) would show `Environment.__new__`, which takes anything.
        signature = str(inspect.signature(cls.__init__)).replace("(self, ", "(").replace("(self)", "()")
        raise UsageError(
            f"{ref.source} cannot be constructed: {describe(error)}; its signature is {cls.__name__}{signature}"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Reads pickled constructor arguments. Names in `__main__` are looked up in `main`, the parent's script."""

    main: ModuleType | None = None

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self.main is not None:
            return _get_environment(self.main, name, "the script")
        return super().find_class(module, name)


def _load_arguments(ref: EnvironmentRef) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for file in ref.files:
        _load_file(Path(file))
    reader = _Unpickler(io.BytesIO(ref.arguments))
    reader.main = _load_file(Path(ref.main)) if ref.main else None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = reader.load()
    return arguments


def make_reference(env: Environment) -> EnvironmentRef:
    """Return a reference from which another process can load `env`.

    Raise `UsageError` if another process could not import the definition of `env` or unpickle its arguments.
    """
    is_function = isinstance(env, FunctionEnvironment)
    definition: Any = env if is_function else type(env)
    module, name = definition.__module__, definition.__qualname__
    if "<locals>" in name:
        raise UsageError(
            f"{name} is defined inside a function, so runner processes cannot import it: "
            "move it to the top level of a module, or use runners=0"
        )
    if is_function:
        name = _find_name(env, module, name)
    main = getattr(sys.modules["__main__"], "__file__", None)
    if module == "__main__":
        if main is None:
            raise UsageError(f"{name} is defined in an interactive session: use runners=0, or move it into a file")
        source = f"{Path(main).resolve()}:{name}"
    elif (file := getattr(sys.modules.get(module), "__rookery_file__", None)) is not None:
        source = f"{file}:{name}"
    else:
        source = f"{module}:{name}"
    path = tuple(sys.path)
    if is_function or env._constructor_arguments == ((), {}):
        return EnvironmentRef(source=source, path=path)
    try:
        arguments = pickle.dumps(env._constructor_arguments)
    except Exception as error:
        raise UsageError(
            f"the constructor arguments of {name} cannot be sent to runner processes ({describe(error)}): "
            "use plain data and objects defined at the top level of a module, or runners=0"
        ) from error
    files = [
        vars(loaded)["__rookery_file__"]
        for module, loaded in tuple(sys.modules.items())
        if hasattr(loaded, "__rookery_file__") and module.encode() in arguments
    ]
    return EnvironmentRef(
        source=source,
        arguments=arguments,
        path=path,
        files=tuple(files),
        main=str(Path(main).resolve()) if main is not None and b"__main__" in arguments else "",
    )


def _find_name(env: Environment, module: str, name: str) -> str:
    """Return the global name in `module` that refers to `env`; `name` is the name of the decorated function."""
    namespace = vars(sys.modules[module])
    if namespace.get(name) is env:
        return name
    for other, value in namespace.items():
        if value is env:
            return other
    raise UsageError(
        f"the environment made from {name} is not assigned to a name in its module {module}, so runner processes "
        "cannot find it: assign it at the top level of the module, or use runners=0"
    )


def list_environments() -> list[str]:
    """Return the names of the installed environments and `PREFIX:NAME` for the prefixes, sorted."""
    prefixes = {f"{point.name}:NAME" for point in entry_points(group=PREFIX_GROUP)}
    return sorted({point.name for point in entry_points(group=GROUP)} | prefixes)


def _resolve(source: str) -> Any:
    location, _, attribute = source.rpartition(":")
    if source.endswith(".toml"):
        from rookery.environments.mixture import Mixture, read_mixture  # imports this module

        return Mixture(**read_mixture(source))
    if source.endswith(".py") or location.endswith(".py"):
        path, name = (source, "") if source.endswith(".py") else (location, attribute)
        return _get_environment(_load_file(Path(path)), name, path)
    if location:
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # console scripts start without the working directory in sys.path
        try:
            module = importlib.import_module(location)
        except ModuleNotFoundError as error:
            if error.name is not None and (location == error.name or location.startswith(f"{error.name}.")):
                raise UsageError(f"the environment {source!r} cannot be loaded: no module {location!r}") from error
            raise UsageError(f"{location} cannot be imported: {describe(error)}") from error
        except ImportHangError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"{location} cannot be imported: {describe(error)}") from error
        return _get_environment(module, attribute, location)
    for point in entry_points(group=GROUP):
        if point.name == source:
            return _load_point(point)
    names = list_environments()
    hint = f"; did you mean ./{source}.py?" if Path(f"{source}.py").exists() else suggestion(source, names)
    raise UsageError(
        f"unknown environment {source!r}: known are {', '.join(names) or 'none'}; "
        f"or name a file.py or module:attribute{hint}"
    )


def _load_point(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ImportHangError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the environment {point.name!r} ({point.value}) cannot be imported: {describe(error)}"
        ) from error


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"the environment file {path} does not exist")
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
        sys.path.insert(0, str(path.parent))  # so that it can import its neighbours, as a script can
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ImportHangError):
            raise
        if isinstance(error, Exception | SystemExit):
            raise UsageError(f"{path} cannot be imported: {describe(error)}{_main_guard_hint(error)}") from error
        raise
    return module


def _main_guard_hint(error: BaseException) -> str:
    """Return a hint if `error` shows that the imported script starts a run at import; else an empty string."""
    starts_engine = isinstance(error, RuntimeError) and "running event loop" in str(error)
    return '. Start the engine under `if __name__ == "__main__":`' if starts_engine else ""


def _get_environment(module: ModuleType, attribute: str, source: str) -> Any:
    """Return the named attribute of a module, or the environment that the module defines if `attribute` is empty.

    That is the object named `environment`, or else the only one. Raise `UsageError` if there is no or no unique
    one.
    """
    if attribute:
        target: Any = module
        for part in attribute.split("."):
            if not hasattr(target, part):
                raise UsageError(f"{source} has no attribute {attribute!r}")
            target = getattr(target, part)
        return target
    defined = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_defined_in(value, module)
    }
    if "environment" in defined:
        return defined["environment"]
    instances = {name: value for name, value in defined.items() if isinstance(value, Environment)}
    candidates = instances or defined
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if not candidates:
        raise UsageError(
            f"{source} defines no environment: subclass rookery.Environment or use @rookery.environment"
        )
    raise UsageError(
        f"{source} defines several environments ({', '.join(candidates)}): choose one with {source}:NAME"
    )


def _is_defined_in(value: Any, module: ModuleType) -> bool:
    """Return whether `value`, an attribute of `module`, is an environment that the module defines itself.

    Instances always count as defined in the module.
    """
    if (isinstance(value, type) and issubclass(value, Environment)) or isinstance(value, FunctionEnvironment):
        return bool(value.__module__ == module.__name__)
    # The module of an instance is that of its class, which may be elsewhere: `env = ToolEnvironment(…)`.
    return isinstance(value, Environment)
