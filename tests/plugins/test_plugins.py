"""A package that adds one plug-in of every kind works without a change to Rookery."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.helpers import COMMAND, environ

PACKAGE = Path(__file__).parent / "sample_plugin"
NAMES = {
    "dialects": "sample-dialect",
    "environments": "sample-environment",
    "launchers": "sample-launcher",
    "sandboxes": "sample-sandbox",
    "task_formats": "sample-format",
    "upstreams": "sample-upstream",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the sample package into an empty directory, as `pip install --target` would, without network."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
            for group, points in project["entry-points"].items()
        )
    )
    (site / "sample_plugin.py").write_text((PACKAGE / "sample_plugin.py").read_text())
    return site


def rookery(site: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    env = environ(PYTHONPATH=path)
    command = [*COMMAND, *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_the_sample_package_adds_one_plugin_of_every_kind() -> None:
    points = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {group.removeprefix("rookery."): next(iter(names)) for group, names in points.items()} == NAMES


def test_plugins_lists_every_plugin_with_its_package_and_docstring(installed: Path, tmp_path: Path) -> None:
    done = rookery(installed, "plugins", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [
        plugin for line in done.stdout.splitlines() if (plugin := json.loads(line))["name"].startswith("sample")
    ]
    assert {plugin["group"]: plugin["name"] for plugin in found} == NAMES
    assert {plugin["package"] for plugin in found} == {"rookery-sample-plugin 1.2.3"}
    assert not [plugin for plugin in found if plugin["error"]]
    by_name = {plugin["name"]: plugin["description"] for plugin in found}
    assert by_name["sample-upstream"] == "Upstream that gives the same reply to every call."


def test_help_names_the_plugins(installed: Path, tmp_path: Path) -> None:
    text = rookery(installed, "run", "--help", cwd=tmp_path).stdout
    assert [name for name in NAMES.values() if name not in text] == []
    assert "sample-upstream" in rookery(installed, "gateway", "--help", cwd=tmp_path).stdout
    assert "sample-format" in rookery(installed, "tasks", "convert", "--help", cwd=tmp_path).stdout


def test_doctor_shows_the_provider_and_its_checks(installed: Path, tmp_path: Path) -> None:
    report = json.loads(rookery(installed, "doctor", "--json", cwd=tmp_path).stdout)
    assert {"name": "sample-sandbox", "isolated": False, "works": True, "reason": ""} in report["providers"]
    assert "sample-check" in [check["name"] for check in report["checks"]]


@pytest.mark.long
def test_a_run_uses_environment_upstream_and_sandbox_of_the_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "one", "prompt": "Say something."}\n')
    done = rookery(
        installed,
        *("run", "sample-environment", "--tasks", "tasks.jsonl", "--policy", "sample-upstream:"),
        *("--sandbox", "sample-sandbox", "--record", "plain", "--runners", "1", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["rollouts"], summary["reward"]["mean"], summary["model"]) == (1, 1.0, "sample-model")
    assert not list(tmp_path.glob("runs/*/sandboxes/*/"))
    assert rookery(installed, "reap", cwd=tmp_path).returncode == 0


def test_tasks_are_read_and_written_in_the_format_of_the_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks" / "one").mkdir(parents=True)
    (tmp_path / "tasks" / "one" / "sample-prompt.txt").write_text("Repair it.")
    listed = rookery(installed, "tasks", "list", "tasks", "--json", cwd=tmp_path)
    assert [json.loads(line)["format"] for line in listed.stdout.splitlines()] == ["sample-format"], listed.stderr
    done = rookery(installed, "tasks", "convert", "tasks", "copy", "--to", "sample-format", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "copy" / "one" / "sample-prompt.txt").read_text() == "Repair it."


def test_dialect_and_launcher_of_the_package_are_found(installed: Path) -> None:
    code = (
        "from rookery.gateway.dialects import load_dialects\n"
        "from rookery.environments.agent.launchers import find_launcher\n"
        "print(load_dialects()['sample-dialect'].paths[0], find_launcher('sample-launcher').dialect)\n"
    )
    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    out = subprocess.check_output([sys.executable, "-c", code], env=environ(PYTHONPATH=path), text=True)
    assert out == "/sample/completions sample-dialect\n"


def test_address_with_the_path_prefix_of_the_package_selects_its_upstream(installed: Path, tmp_path: Path) -> None:
    code = (
        "from rookery.upstreams import UpstreamConfig, absolute_address, kind_of\n"
        "address = absolute_address('sample-file:model')\n"
        "print(address, kind_of(UpstreamConfig(urls=(address,))))\n"
    )
    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", code]
    out = subprocess.check_output(command, cwd=tmp_path, env=environ(PYTHONPATH=path), text=True)
    assert out == f"sample-file:{tmp_path}/model sample-upstream\n"


def test_openapi_document_contains_the_operations_of_the_package(installed: Path) -> None:
    code = "import json\nfrom rookery.gateway.openapi import build_openapi\nprint(json.dumps(build_openapi()))\n"
    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    out = subprocess.check_output([sys.executable, "-c", code], env=environ(PYTHONPATH=path), text=True)
    document = json.loads(out)
    call = document["paths"]["/v1/rollouts/{id}/sample/completions"]["post"]
    assert call["summary"] == "Create a sample."
    assert call["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/SampleRequest"
    }
    assert document["components"]["schemas"]["SampleRequest"] == {"type": "object", "required": ["messages"]}
