"""Loading environments, in this process and in another one."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rookery.core import UsageError
from rookery.environments import (
    Environment,
    EnvironmentRef,
    FunctionEnvironment,
    ToolEnvironment,
    load_environment,
    make_reference,
    tool,
)
from rookery.environments.loader import list_environments

ONE = """
from rookery.environments import Environment, ToolEnvironment, environment

class Mine(Environment):
    def __init__(self, level=1):
        if level < 0:
            raise ValueError("too low")
        self.level = level
"""
TWO = """
class Other(Environment):
    pass
"""
OBJECT = """
from rookery.environments import ToolEnvironment, tool

@tool
def add(a: int) -> int:
    return a + 1

env = ToolEnvironment(tools=[add.with_timeout(2)], max_turns=3)
"""
FUNCTION = """
from rookery.environments import environment

@environment(tasks=["a"])
async def play(ctx):
    return 1.0
"""


class Here(Environment):
    def __init__(self, level: int, *, name: str = "x") -> None:
        self.level = level
        self.name = name


class Inner:
    class Deep(Environment):
        pass


async def coroutine(ctx):
    return 0.0


async def _play(ctx):
    return 1.0


@tool
def add(a: int) -> int:
    return a + 1


hidden = FunctionEnvironment(_play, tasks=["a"])
not_one = 7


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "env.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def load_in_another_process(ref: EnvironmentRef, show: str) -> str:
    """Load a reference in another process and return the value of an expression."""
    code = (
        "import sys, msgspec\n"
        "from rookery.environments import EnvironmentRef, load_environment\n"
        "env = load_environment(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EnvironmentRef))\n"
        f"print({show})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=msgspec.msgpack.encode(ref), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_name_of_an_entry_point():
    assert "tools" in list_environments()
    env = load_environment("tools", max_turns=2)
    assert isinstance(env, ToolEnvironment)
    assert env.limits.turns == 2


def test_module_and_attribute():
    assert load_environment(f"{__name__}:Here", level=3).level == 3
    assert isinstance(load_environment(f"{__name__}:Inner.Deep"), Inner.Deep)
    assert load_environment(f"{__name__}:coroutine").title == "coroutine"
    assert load_environment(f"{__name__}:hidden") is hidden


def test_module_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "rookery_test_neighbour.py").write_text(ONE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    assert load_environment("rookery_test_neighbour:Mine").level == 1


def test_file_with_one_environment(file):
    env = load_environment(file(ONE), level=4)
    assert (type(env).__name__, env.level) == ("Mine", 4)
    assert type(load_environment(file(ONE))) is type(env)


def test_file_and_attribute(file):
    path = file(ONE + TWO)
    assert type(load_environment(f"{path}:Other")).__name__ == "Other"
    with pytest.raises(UsageError, match=r"Mine, Other.*:NAME"):
        load_environment(path)
    with pytest.raises(UsageError, match="Third"):
        load_environment(f"{path}:Third")


def test_instances_are_preferred_to_classes_and_the_name_environment_to_both(file):
    assert load_environment(file(ONE + "\nmade = Mine(5)", "a.py")).level == 5
    assert load_environment(file(ONE + TWO + "\nenvironment = Mine(6)", "b.py")).level == 6


def test_instance_of_a_built_in_class_is_found(file):
    env = load_environment(file(OBJECT))
    assert [schema.name for schema in env.tools()] == ["add"]


def test_file_may_import_its_neighbours(file):
    file("LEVEL = 9", "rookery_test_beside.py")
    assert load_environment(file(ONE + "\nimport rookery_test_beside as b\nmade = Mine(b.LEVEL)")).level == 9


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = (", "SyntaxError"),
        ("import rookery_no_such_module", "ModuleNotFoundError: .*rookery_no_such_module"),
        ("raise SystemExit(2)", "SystemExit"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", r"\.py"),
        ("from rookery.environments import ToolEnvironment", r"\.py"),
    ],
)
def test_invalid_file_is_refused(file, text, named):
    path = file(text)
    for _ in range(2):  # a module that failed to import is not cached
        with pytest.raises(UsageError, match=named):
            load_environment(path)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("no/such/file.py", "no/such/file.py"),
        ("nothing_of_that_name", "nothing_of_that_name.*tools"),
        ("", "''"),
        ("rookery_no_such_module:Env", "rookery_no_such_module"),
        (f"{__name__}:Nothing", "Nothing"),
        (f"{__name__}:not_one", "int"),
        (f"{__name__}:Here", r"Here\(level: int, \*, name"),
        ("rookery:", "rookery"),
    ],
)
def test_invalid_source_is_refused(source, named):
    with pytest.raises(UsageError, match=named):
        load_environment(source)


def test_unknown_name_suggests_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(ONE)
    with pytest.raises(UsageError, match=r"\./mine\.py"):
        load_environment("mine")


def test_invalid_constructor_arguments_are_refused(file):
    path = file(ONE)
    with pytest.raises(UsageError, match="ValueError: too low"):
        load_environment(path, level=-1)
    with pytest.raises(UsageError, match=r"'size'.*Mine\(level=1\)"):
        load_environment(path, size=1)
    for made in ("hidden", "coroutine"):
        with pytest.raises(UsageError, match="size"):
            load_environment(f"{__name__}:{made}", size=1)


# ---- references


@pytest.mark.long
def test_reference_loads_the_same_environment_in_another_process():
    assert load_in_another_process(make_reference(Here(3, name="y")), "env.level, env.name") == "3 y"
    assert load_in_another_process(make_reference(Inner.Deep()), "type(env).__qualname__") == "Inner.Deep"
    assert load_in_another_process(make_reference(ToolEnvironment(tools=[add])), "env.tools()[0].name") == "add"


@pytest.mark.long
def test_reference_to_objects_of_a_file(file):
    show = "env.level"
    assert load_in_another_process(make_reference(load_environment(file(ONE, "one.py"), level=4)), show) == "4"
    env = load_environment(file(OBJECT, "object.py"))
    assert load_in_another_process(make_reference(env), "env._tools['add'].timeout, env.limits.turns") == "2 3"
    env = load_environment(file(FUNCTION, "function.py"))
    assert load_in_another_process(make_reference(env), "env.title, env.tasks()") == "play ['a']"


def test_function_environment_is_referenced_by_its_variable():
    ref = make_reference(hidden)
    assert ref.source == f"{__name__}:hidden"
    assert load_in_another_process(ref, "env.tasks()") == "['a']"


def test_function_environment_without_a_name_is_refused():
    with pytest.raises(UsageError, match="_play"):
        make_reference(FunctionEnvironment(_play))


def test_class_defined_inside_a_function_is_refused():
    class Local(Environment):
        pass

    with pytest.raises(UsageError, match=r"Local.*runners=0"):
        make_reference(Local())


def test_arguments_that_cannot_be_pickled_are_refused():
    with pytest.raises(UsageError, match=r"Here.*runners=0"):
        make_reference(Here(lambda: 1))


SCRIPT = """
import subprocess, sys
import msgspec
from rookery.environments import Environment, ToolEnvironment, environment, make_reference, tool

class Mine(Environment):
    def __init__(self, level):
        self.level = level

@environment(tasks=["a"])
async def play(ctx):
    return 1.0

@tool
def add(a: int) -> int:
    return a + 1

if __name__ == "__main__":
    for env in (Mine(3), play, ToolEnvironment(tools=[add])):
        sys.stdout.write(msgspec.json.encode(make_reference(env)).decode() + "\\n")
"""


@pytest.mark.long
def test_objects_of_a_script_are_loaded_in_another_process(file):
    path = file(SCRIPT, "script.py")
    done = subprocess.run([sys.executable, path], capture_output=True, check=True)
    refs = [msgspec.json.decode(line, type=EnvironmentRef) for line in done.stdout.splitlines()]
    shows = ("env.level", "env.tasks()", "env.tools()[0].name")
    assert [load_in_another_process(ref, show) for ref, show in zip(refs, shows, strict=True)] == [
        "3",
        "['a']",
        "add",
    ]


def test_class_of_an_interactive_session_is_refused():
    code = (
        "from rookery.core import UsageError\n"
        "from rookery.environments import Environment, make_reference\n"
        "class Mine(Environment): pass\n"
        "try: make_reference(Mine())\n"
        "except UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert "runners=0" in done.stdout
