"""The documentation agrees with the code: generated tables, links, paths, options, exit codes and examples."""

import re
import shlex
from pathlib import Path

import pytest

from rookery.core import CAUSES
from tests.servers import ModelServer

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rookery"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def causes_page() -> str:
    rows = "\n".join(
        f"| `{cause.code}` | {cause.fault} | {cause.meaning} | {cause.advice} |" for cause in CAUSES.values()
    )
    return f"""# Causes of failure

Every `Failed` outcome has one of these codes. A released code keeps its meaning. What the policy does is a result
and not a failure, so it is not listed here ([outcomes](../concepts/overview.md#outcomes)).

| cause | fault | what it means | what to do |
|---|---|---|---|
{rows}

A rollout that fails with the fault **infra** is tried again, up to the number of attempts. **task** quarantines
the task. **bug** is not tried again. None of them has a reward or counts in a denominator. `rookery show RUN
ROLLOUT` prints the detail and the original traceback.
"""


def test_the_table_of_causes_lists_all_causes() -> None:
    page = ROOT / "docs" / "reference" / "causes.md"
    assert page.read_text() == causes_page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    environment, trainer = (
        [line for line in block.splitlines() if line] for block in blocks(ROOT / "README.md", "python")
    )
    assert len(environment) <= 15
    assert len(trainer) <= 10
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.long
async def test_examples_that_define_environments_run(tmp_path: Path) -> None:
    from rookery import Engine
    from rookery.environments import load_environment

    (tmp_path / "sums.py").write_text(blocks(ROOT / "README.md", "python")[0])
    guide = blocks(ROOT / "docs" / "guides" / "environments.md", "python")
    environments = [
        block for block in guide if "@environment" in block or "(Environment)" in block or "@tool" in block
    ]
    for name, block in zip(("guess", "brief", "capitals", "shop"), environments, strict=True):
        (tmp_path / f"{name}.py").write_text(block)
    async with ModelServer("7") as model:
        for name, tasks in (
            ("sums", None),
            ("guess", None),
            ("brief", None),
            ("capitals", None),
            ("shop", [{"prompt": "?", "answer": 7}]),
        ):
            env = str(tmp_path / f"{name}.py")
            assert load_environment(env) is not None
            async with Engine(env, policy=model.url, runners=1, out=tmp_path / "runs") as engine:
                groups = [group async for group in engine.groups(tasks)]
            assert groups
            assert all(rollout.valid for group in groups for rollout in group.rollouts)


def test_every_option_and_variable_of_the_command_line_is_documented() -> None:
    import click

    from rookery.cli.app import app

    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    context = click.Context(app)
    for name in app.list_commands(context):
        command = app.get_command(context, name)
        assert command is not None
        assert f"## rookery {name}" in page
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert any(f"`{option}" in page for option in parameter.opts), (name, parameter.opts)
                variable = parameter.envvar
                assert not variable or f"`{variable}`" in page or name != "run", (name, variable)


def test_the_variable_of_an_option_has_no_other_meaning() -> None:
    from rookery.cli.run import run

    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    others = set(re.findall(r"`(ROOKERY_\w+)`", page.partition("\n## Environment variables\n")[2]))
    assert "ROOKERY_CACHE" in others
    assert others.isdisjoint({parameter.envvar for parameter in run.params})


def test_the_table_of_exit_codes_lists_all_exit_codes() -> None:
    """The exit code of internal errors means nothing else, except in `exec`, which returns its program's code."""
    from rookery.cli.errors import Exit

    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    table = page.partition("\n## Exit codes\n")[2].partition("\n\n`")[0]
    documented = {int(code) for code in re.findall(r"^\| ([0-9]+) \|", table, re.MULTILINE)}
    assert documented == {int(code) for code in Exit} - {Exit.TERMINATED, Exit.CLOSED_PIPE}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        assert not re.search(r"exit code 1\b", path.read_text(), re.IGNORECASE), path.name
    for path in sorted((ROOT / "src" / "rookery" / "cli").glob("*.py")):
        if path.name != "exec.py":
            assert not re.search(r"exit code 1\b|return 1$", path.read_text(), re.IGNORECASE | re.MULTILINE), path


def test_every_test_that_the_security_page_names_exists() -> None:
    page = (ROOT / "docs" / "concepts" / "security.md").read_text()
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 30
    for path, name in named:
        text = (ROOT / (path if "/" in path else f"tests/sandboxes/hostile/{path}")).read_text()
        assert not name or re.search(rf"def {name}\(|\"{name}\",", text), f"{path}::{name}"


def list_mentioned_paths(page: Path) -> set[str]:
    """Return the paths in code of a page that begin with a directory of the checkout or a package of Rookery."""
    code = re.findall(r"`([^`\n]+)`", page.read_text())
    code += re.findall(r"^```(?:\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    words = {
        word.rstrip("/.") for text in code for word in re.findall(r"(?<![\w./:-])[\w.][\w./-]*/[\w./*-]*", text)
    }
    in_checkout = re.compile(r"(src|tools|benchmarks|docs|\.ci)/|tests/\w+/.")
    in_package = re.compile(rf"({'|'.join(package.name for package in PACKAGE.iterdir() if package.is_dir())})/")
    return {word for word in words if in_checkout.match(word) or in_package.match(word)}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_every_path_of_the_repository_that_a_page_mentions_exists(page: Path) -> None:
    paths = list_mentioned_paths(page)
    assert {path for path in paths if not (ROOT / path).exists() and not (PACKAGE / path).exists()} == set()


def test_the_architecture_page_mentions_the_files_of_a_rollout() -> None:
    paths = list_mentioned_paths(ROOT / "docs" / "architecture.md")
    assert len([path for path in paths if path.endswith(".py")]) > 25
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    diagram = blocks(ROOT / "docs" / "architecture.md", "")[0]
    assert {name for name in packages if not re.search(rf"\b{name}\b", diagram)} == set()


def list_rookery_commands(page: Path) -> list[list[str]]:
    """Return the `rookery` commands of a page's console blocks, without comments and environment variables."""
    commands = []
    for block in blocks(page, "console"):
        for line in re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.MULTILINE):
            words = shlex.split(line.replace("\\\n", " "), comments=True)
            while words and "=" in words[0]:
                words = words[1:]
            if words and words[0].rpartition("/")[2] == "rookery":
                commands.append(words[1:])
    return commands


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_option_in_a_printed_command_exists(page: Path) -> None:
    import click

    from rookery.cli.app import app

    for printed in list_rookery_commands(page):
        words = printed[: printed.index("--")] if "--" in printed else printed
        command: click.Command | None = app
        for word in words:
            if isinstance(command, click.Group):
                command = command.get_command(click.Context(command), word)
        assert command is not None, printed
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used - known == set(), printed
