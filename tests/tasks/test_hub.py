"""Tasks from the hub: one download per commit, offline use, no token in messages."""

import io
import json
import os
import subprocess
import sys
import tarfile

import pytest

from rookery.core import UsageError
from rookery.tasks import hub as hub_module
from rookery.tasks.cache import TaskCache
from tests.tasks import kit
from tests.tasks.hub_server import COMMIT, Hub

pytest.importorskip("huggingface_hub")

LOAD = """
import os, sys
from rookery.core import UsageError
from rookery.tasks import load_tasks
import rookery.tasks.sources, rookery.tasks.hub, huggingface_hub
source, count = sys.argv[1], int(sys.argv[2])
def go():
    for one in source.split():
        load(one)
def load(source):
    try:
        for task in load_tasks(source):
            os.write(1, f"{task.id} {task.invalid or task.text.strip()}\\n".encode())
    except UsageError as error:
        os.write(1, f"refused: {error}\\n".encode())
if count == 1:
    go()
else:
    children = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            go()
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
"""


def load(source, url, tmp_path, *, count=1, **more):
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {
        "HF_ENDPOINT": url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, source, str(count)],
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines(), done.stderr


def packed(tmp_path):
    made = kit.open_instruct(tmp_path / "made" / "one")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        tar.add(made, "task-data/one")
    return file.getvalue()


@pytest.mark.long
def test_archive_is_downloaded_once_and_available_offline(tmp_path, own_cache):
    with Hub({"task-data.tar.gz": packed(tmp_path), "README.md": b"x"}) as hub:
        lines, _ = load("hf:team/tasks", hub.url, tmp_path, count=6)
        assert lines == ["one Fix it."] * 6
        assert hub.downloads("task-data.tar.gz") == 1
        assert hub.downloads("README.md") == 0
        url = hub.url
    # The hub is unreachable: nothing listens there any more.
    assert load("hf:team/tasks", url, tmp_path)[0] == ["one Fix it."]
    both = f"hf:team/tasks hf:team/tasks@{COMMIT}"
    assert load(both, url, tmp_path, HF_HUB_OFFLINE="1")[0] == ["one Fix it."] * 2
    # Rookery's copy is removed, too: the cache of huggingface_hub has it.
    assert load("hf:team/tasks", url, tmp_path, HF_HUB_OFFLINE="1", ROOKERY_TASK_CACHE=str(tmp_path / "b"))[0] == [
        "one Fix it."
    ]
    # No copy is left.
    (line,), _ = load(
        "hf:team/tasks",
        url,
        tmp_path,
        HF_HUB_OFFLINE="1",
        ROOKERY_TASK_CACHE=str(tmp_path / "c"),
        HF_HOME=str(tmp_path / "d"),
    )
    assert line.startswith("refused: ")
    assert "hf:team/tasks" in line


@pytest.mark.long
def test_repository_of_task_directories_and_a_path_in_it_are_loaded(tmp_path, own_cache):
    files = {
        "tasks/two/instruction.md": b"Two.",
        "tasks/two/tests/test.sh": b"exit 0",
        "rows.jsonl": b'{"env_config": {"task_id": "one"}}\n',
    }
    with Hub(files) as hub:
        three = "hf:team/tasks hf:team/tasks@main:tasks hf:team/tasks:missing.tar.gz"
        first, second, third = load(three, hub.url, tmp_path)[0]
        assert first == second == "two Two."
        assert third.startswith("refused: ")
    with Hub({**files, "task-data.tar.gz": packed(tmp_path)}, commit="d" * 40) as hub:
        assert load("hf:team/tasks:rows.jsonl", hub.url, tmp_path)[0] == ["one Fix it."]


@pytest.mark.long
def test_token_of_the_library_is_used_and_never_shown(tmp_path, own_cache):
    with Hub({"task-data.tar.gz": packed(tmp_path)}, token="hf_right") as hub:
        (line,), err = load("hf:team/tasks", hub.url, tmp_path, HF_TOKEN="hf_wrongs3cret")
        assert line.startswith("refused: the hub refused hf:team/tasks with status 401")
        assert "s3cret" not in line + err
        (good, other), _ = load("hf:team/tasks hf:team/other", hub.url, tmp_path, HF_TOKEN="hf_right")
        assert good == "one Fix it."
        assert "404" in other


@pytest.mark.long
def test_files_of_rows_are_loaded_by_format_and_missing_ones_are_refused(tmp_path, own_cache):
    """A private repository: the token is in no message and in no file of the task cache."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"q": ["How many?"], "a": ["#### 5"]}), tmp_path / "rows.parquet")
    files = {"data/test.parquet": (tmp_path / "rows.parquet").read_bytes()}
    code = """
import sys
from rookery.cli.app import run_app
options = ["--row-format", "gsm8k", "--columns", "question=q,answer=a", "--json"]
for path in ("data/test.parquet", "data/train.parquet"):
    print(run_app(["tasks", "list", f"hf:team/tasks:{path}", *options]), flush=True)
"""
    with Hub(files, token="hf_s3cret") as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_s3cret"}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_DEBUG": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100, check=False
        )
    listed, good, missing = done.stdout.splitlines()
    assert (json.loads(listed)["broken"], good, missing) == (False, "0", "2"), done.stderr
    assert "hf:team/tasks:data/train.parquet" in done.stderr
    stored = b"".join(path.read_bytes() for path in own_cache.rglob("*") if path.is_file())
    assert b"s3cret" not in stored + (done.stdout + done.stderr).encode()


def test_waiting_process_reuses_the_resolved_commit(own_cache, monkeypatch):
    class Waited(TaskCache):
        def lock_key(self, key, what):
            self.remember("team/tasks@main", COMMIT)  # as another process would, while we wait
            return super().lock_key(key, what)

    monkeypatch.setattr(hub_module, "import_hub", lambda: pytest.fail("asked again"))
    assert hub_module.resolve_commit(hub_module.parse_reference("hf:team/tasks"), Waited().open()) == COMMIT


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:x", "hf:a/b/c", "hf:a/b@", "hf:../b", "hf:a/b:../c", "hf:a/b:c//d", "hf:a/b\n", "hf:-/x@y z"],
)
def test_invalid_dataset_reference_is_refused(text):
    with pytest.raises(UsageError):
        hub_module.parse_reference(text)
