"""The Harbor format: schema 1.4 and older, one or several steps, unsupported requirements."""

import pytest

from rookery.tasks import check_tasks, load_tasks
from rookery.tasks.swe import get_swe_task, grading_seconds
from tests.tasks import kit

FULL = """
schema_version = "1.4"
artifacts = ["/opt/out", { source = "rel/x" }]
multi_step_reward_strategy = "final"

[task]
name = "org/full"
authors = [{ name = "A" }]

[metadata]
difficulty = "easy"
when = 2024-05-01

[agent]
timeout_sec = 120.0
user = "agent"
network_mode = "allowlist"
allowed_hosts = ["example.org"]

[verifier]
timeout_sec = 30
env = { KEY = "${KEY:-none}", MODE = "x" }
environment_mode = "separate"
user = 0

[solution]
env = { S = "1" }

[environment]
docker_image = "python:3.12"
cpus = 2
memory_mb = 512
storage_mb = 1024
gpus = 0
workdir = "/srv/app"
network_mode = "public"
build_timeout_sec = 900
env = { A = "${HOME}", B = "${PATH:-safe}", C = "plain", D = "${GIVEN}" }

[[environment.mcp_servers]]
name = "files"
transport = "http"
url = "http://127.0.0.1:1/mcp"
"""


def test_complete_task_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/secret-home")
    here = kit.harbor(tmp_path / "full", FULL, {"solution/solve.sh": "true"})
    (task,) = load_tasks(here, variables={"GIVEN": "given", "HOME": "/h"})
    assert not task.invalid, task.invalid
    found = get_swe_task(task)
    (step,) = found.steps
    assert task.limits.run == 120
    assert task.limits.score is not None
    assert task.limits.score > 3 * 30
    assert (found.image, found.workdir, found.user) == ("python:3.12", "/srv/app", "agent")
    assert (found.cpus, found.memory, found.disk, found.gpus) == (2, 512 << 20, 1024 << 20, 0)
    assert (found.network, found.allow) == ("allow", ("example.org",))
    assert found.env == {"A": "/h", "B": "safe", "C": "plain", "D": "given"}
    assert found.artifacts == ("/opt/out", "/srv/app/rel/x")
    assert found.metadata["task"]["name"] == "org/full"
    assert (found.metadata["difficulty"], found.metadata["when"]) == ("easy", "2024-05-01")
    assert found.mcp[0]["transport"] == "streamable-http"
    assert found.rewards == "final"
    assert (step.verifier.mode, step.verifier.timeout, step.verifier.user) == ("fresh", 30, "0")
    assert step.verifier.env == {"KEY": "none", "MODE": "x"}
    assert not step.verifier.reward_from_exit
    assert step.solve_env == {"S": "1"}
    assert check_tasks(here, variables={"GIVEN": "", "HOME": ""}).problems == ()


def test_host_environment_variables_never_enter_a_task(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    kit.harbor(tmp_path / "a", '[environment]\nenv = { A = "${SECRET}", B = "${SECRET:-d}" }\n')
    found = check_tasks(tmp_path)
    assert kit.problems_by_field(found) == {("a", "environment.env.A"): False, ("a", "environment"): True}
    assert "SECRET" in str(found)
    assert "s3cret" not in str(found) + repr(list(load_tasks(tmp_path)))


def test_keys_of_older_schemas_are_read(tmp_path):
    old = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    kit.harbor(tmp_path / "a", old, {"environment/Dockerfile": "FROM x\nWORKDIR /one\nWORKDIR two\n"})
    (task,) = load_tasks(tmp_path)
    found = get_swe_task(task)
    assert (found.memory, found.disk, found.network) == (2 << 30, 512 << 20, "none")
    assert found.workdir == "/one/two"
    assert found.image == f"dockerfile:{tmp_path}/a/environment"


def test_missing_keys_have_the_defaults_of_harbor(tmp_path):
    kit.harbor(tmp_path / "a", '[environment]\ndocker_image = "python:3.12"\n')
    (task,) = load_tasks(tmp_path)
    found = get_swe_task(task)
    assert (found.network, found.steps[0].verifier.mode, found.steps[0].verifier.timeout) == ("all", "shared", 600)
    assert found.workdir == "/app"
    assert kit.problems_by_field(check_tasks(tmp_path)) == {("a", "environment.workdir"): True}


def test_steps_have_their_own_files_setup_tests_and_thresholds(tmp_path):
    toml = """
[agent]
timeout_sec = 10
[verifier]
env = { A = "1" }
[environment]
docker_image = "x"
workdir = "/app"
[[steps]]
name = "one"
min_reward = 0.5
[steps.verifier]
timeout_sec = 7
[[steps]]
name = "two"
min_reward = { quality = 0.1 }
[steps.agent]
timeout_sec = 20
"""
    files = {
        "instruction.md": ...,
        "tests/common.sh": "x",
        "steps/one/instruction.md": "First.",
        "steps/one/workdir/setup.sh": "true",
        "steps/one/workdir/data/x": "x",
        "steps/one/solution/solve.sh": "true",
        "steps/two/instruction.md": "Second.",
        "steps/two/tests/test.sh": "exit 1",
        "steps/two/workdir/later": "x",
    }
    here = kit.harbor(tmp_path / "a", toml, files)
    (task,) = load_tasks(tmp_path)
    assert not task.invalid, task.invalid
    found = get_swe_task(task)
    one, two = found.steps
    assert task.text == "First."
    assert task.limits.run == 10 + 20 + grading_seconds(one)
    assert [(part.source, part.target) for part in found.files] == [
        (f"{here}/steps/one/workdir/data", "/app/data")
    ]
    assert one.setup == f"{here}/steps/one/workdir/setup.sh"
    assert [part.source for part in one.tests] == [f"{here}/tests"]
    assert [part.source for part in two.tests] == [f"{here}/tests", f"{here}/steps/two/tests"]
    assert [part.target for part in two.files] == ["/app/later"]
    assert (one.min_reward, one.timeout, one.verifier.timeout) == (0.5, 10, 7)
    assert (two.min_reward, two.min_reward_parts, two.timeout) == (None, {"quality": 0.1}, 20)
    assert two.verifier.env == {"A": "1"}


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        ("x = ", "task.toml"),
        ('schema_version = "2.0"', "schema_version"),
        ("version = true", "version"),
        ("agent = 3", "agent"),
        ('[agent]\ntimeout_sec = "x"', "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ('[agent]\nuser = "a b"', "agent.user"),
        ('[agent]\nuser = "-x"', "agent.user"),
        ('[agent]\nnetwork_mode = "some"', "agent.network_mode"),
        ('[agent]\nallowed_hosts = ["http://x"]', "agent.allowed_hosts"),
        ('[environment]\nnetwork_mode = "public"\nallowed_hosts = ["x.org"]', "environment.allowed_hosts"),
        ('[environment]\nworkdir = "rel"', "environment.workdir"),
        ('[environment]\nworkdir = "/tests/x"', "environment.workdir"),
        ('[environment]\nworkdir = "/a/../b"', "environment.workdir"),
        ('[environment]\nmemory = "lots"', "environment.memory"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 1', "environment.memory"),
        ("[environment]\nmemory_mb = true", "environment.memory_mb"),
        ('[environment]\ndocker_image = "/etc"', "environment.docker_image"),
        ('[environment]\nos = "windows"', "environment.os"),
        ('[environment]\nenv = { "a=b" = "x" }', "environment.env"),
        ('[environment]\nenv = { A = ["x"] }', "environment.env.A"),
        ('[environment.tpu]\ntype = "v4"', "environment.tpu"),
        ('[[environment.mcp_servers]]\nname = "x"', "environment.mcp_servers[0].url"),
        ('[[environment.mcp_servers]]\nname = "x"\ntransport = "y"', "environment.mcp_servers[0].transport"),
        ('[verifier.environment]\ndocker_image = "x"', "verifier.environment"),
        ('[task]\nname = ""', "task.name"),
        ('artifacts = ["/a/../b"]', "artifacts[0]"),
        ('artifacts = [{ source = "/a", service = "db" }]', "artifacts[0]"),
        ('multi_step_reward_strategy = "best"', "multi_step_reward_strategy"),
        ("steps = 3", "steps"),
        ('[[steps]]\nname = "../x"', "steps[0].name"),
        ('[[steps]]\nname = "x"', "steps/x/instruction.md"),
        ('[[steps]]\nname = "x"\n[[steps]]\nname = "x"', "steps"),
        ('[[steps]]\nname = "x"\nmin_reward = "a"', "steps[0].min_reward"),
        ('[[steps]]\nname = "x"\n[steps.agent]\nuser = "z"', "steps[0].agent.user"),
        ("[metadata.rookery]\nodd = 1", "metadata.rookery.odd"),
        ('[metadata.rookery]\njson = "x"', "metadata.rookery.json"),
    ],
)
def test_problem_names_its_key(tmp_path, toml, field):
    kit.harbor(tmp_path / "a", toml)
    assert kit.problems_by_field(check_tasks(tmp_path)).get(("a", field)) is False
    assert load_tasks(tmp_path)[0].invalid


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        ("odd = 1", "odd"),
        ("[environment]\nodd = 1", "environment.odd"),
        ("[agent]\nodd = 1", "agent.odd"),
        ("[verifier]\nodd = 1", "verifier.odd"),
        ('[environment]\nskills_dir = "/s"', "environment.skills_dir"),
        ('[environment.healthcheck]\ncommand = "true"', "environment.healthcheck"),
    ],
)
def test_unknown_key_or_key_without_effect_is_a_warning(tmp_path, toml, field):
    kit.harbor(tmp_path / "a", toml)
    assert kit.problems_by_field(check_tasks(tmp_path))[("a", field)] is True
    assert not load_tasks(tmp_path)[0].invalid


def test_additional_services_are_an_error(tmp_path):
    kit.harbor(tmp_path / "a", "", {"environment/docker-compose.yaml": "x", "environment/Dockerfile": "FROM x"})
    assert kit.problems_by_field(check_tasks(tmp_path))[("a", "environment/docker-compose.yaml")] is False


def test_fields_that_harbor_lacks_are_stored_in_metadata_rookery(tmp_path):
    kit.harbor(tmp_path / "a", "[[metadata.rookery.steps]]\nverifier = { mode = 'shared', services = true }\n")
    (task,) = load_tasks(tmp_path)
    assert get_swe_task(task).steps[0].verifier.services
