"""The tool `edit` on files of a real sandbox."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rookery.environments.swe.edit_tool import MAX_UNDO_EDITS, Editor, edit_tool
from rookery.environments.swe.sandbox_files import MAX_FILE, SandboxFiles
from rookery.environments.swe.text_file import EditRefused
from rookery.environments.swe.tool_config import ToolConfig, parse_tool_config
from rookery.sandboxes.protocol import Command, Sandbox
from tests.environments.swe.helpers import make_attempt, open_local_sandbox

pytestmark = pytest.mark.needs("mount")


def make_editor(sandbox: Sandbox) -> Editor:
    return Editor(SandboxFiles(sandbox, "/work", 20.0), 4096)


async def run_shell(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.exec(Command(argv=("bash", "-c", script)))
    assert result.ok, result
    return result.stdout.decode().strip()


async def get_refusal(coroutine: Any) -> str:
    with pytest.raises(EditRefused) as caught:
        await coroutine
    return str(caught.value)


async def test_every_command_edits_the_file_and_can_be_undone(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        editor = make_editor(sandbox)
        assert "3 lines" in await editor.create("a.txt", "one\ntwo\nthree\n")
        seen = await editor.view("a.txt", [2, -1])
        assert seen == "/work/a.txt, lines 2 to 3 of 3:\n     2\ttwo\n     3\tthree\n"
        assert "     2\tzwei" in await editor.replace("a.txt", "two", "zwei")
        await editor.insert("a.txt", 3, "four\n")
        assert await sandbox.read("a.txt") == b"one\nzwei\nthree\nfour\n"
        await editor.undo("a.txt")
        await editor.undo("a.txt")
        assert await sandbox.read("a.txt") == b"one\ntwo\nthree\n"
        assert "deleted" in await editor.undo("a.txt")
        assert await run_shell(sandbox, "ls -A") == ""
        assert "no edit" in await get_refusal(editor.undo("a.txt"))


async def test_file_keeps_its_mode_owner_and_links(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        editor = make_editor(sandbox)
        await run_shell(sandbox, "echo x > run.sh; chmod 751 run.sh; ln -s run.sh link; echo y > one; ln one two")
        await editor.replace("link", "x", "z")
        assert await run_shell(sandbox, "stat -c '%a' run.sh; readlink link; cat run.sh") == "751\nrun.sh\nz"
        await editor.replace("one", "y", "w")
        assert await run_shell(sandbox, "cat two; stat -c %h one") == "w\n2"
        assert await run_shell(sandbox, "ls -A | sort | tr '\\n' ' '") == "link one run.sh two"
        await editor.create("new.sh", "q")
        assert await run_shell(sandbox, "stat -c %a new.sh") == "644"


async def test_impossible_edits_are_refused_and_change_nothing(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path, disk=8 << 20) as sandbox:
        editor = make_editor(sandbox)
        await run_shell(
            sandbox,
            "mkdir d; ln -s loop loop; ln -s nowhere dangling; mkfifo pipe; printf 'a\\0b' > bin; "
            "echo secret > shut; chmod 0 shut; echo r > ro; chmod 444 ro; mkdir closed; echo c > closed/f; "
            f"chmod 555 closed; truncate -s {MAX_FILE + 1} huge",
        )
        assert "No such file" in await get_refusal(editor.create("no/such/folder.txt", "x"))
        assert "nothing" in await get_refusal(editor.view("nothing", None))
        assert "nothing" in await get_refusal(editor.replace("nothing", "a", "b"))
        assert "/d " in await get_refusal(editor.replace("d", "a", "b"))
        assert "/d " in await get_refusal(editor.create("d", "a"))
        assert "loop" in await get_refusal(editor.view("loop", None))
        assert "pipe" in await get_refusal(editor.view("pipe", None))
        assert "bin" in await get_refusal(editor.view("bin", None))
        assert "Permission denied" in await get_refusal(editor.view("shut", None))
        assert "Permission denied" in await get_refusal(editor.replace("ro", "r", "w"))
        assert "Permission denied" in await get_refusal(editor.create("closed/new", "w"))
        assert "huge" in await get_refusal(editor.view("huge", None))
        assert "Not a directory" in await get_refusal(editor.view("ro/below", None))
        assert "' '" in await get_refusal(editor.view(" ", None))
        assert repr("a\0b") in await get_refusal(editor.view("a\0b", None))
        assert await get_refusal(editor.view("x" * 5000, None))
        assert os.strerror(errno.ENAMETOOLONG) in await get_refusal(editor.create("x" * 300, "y"))
        assert "/proc/version" in await get_refusal(editor.create("/proc/version", "x"))
        # A file in a read-only directory may still be writable.
        await editor.replace("closed/f", "c", "C")
        assert await sandbox.read("closed/f") == b"C\n"
        # On a full disk the file is unchanged, and no temporary file remains.
        await run_shell(sandbox, "echo keep > kept; cat /dev/zero > fill 2>/dev/null; true")
        assert "No space left" in await get_refusal(editor.create("kept", "z" * 100_000))
        assert await sandbox.read("kept") == b"keep\n"
        assert "No space left" in await get_refusal(editor.create("fresh", "z" * 100_000))
        assert ".edit" not in await run_shell(sandbox, "ls -A")


async def test_file_names_are_never_shell_code(tmp_path: Path) -> None:
    names = ["-rf", "a b", "it's", 'q"q', "$(touch hit)", "`touch hit`", "new\nline", "*", "ünï", ";ls", "\\"]
    async with open_local_sandbox(tmp_path) as sandbox:
        editor = make_editor(sandbox)
        for name in names:
            await editor.create(name, "one\n")
            await editor.replace(name, "one", "two")
            assert await sandbox.read(name) == b"two\n"
        shown = await editor.view(".", None)
        assert "hit" not in await run_shell(sandbox, "ls -A | grep -x hit || true")
        assert "$(touch hit)" in shown
        assert "new?line" in shown
        for name in names:
            await editor.undo(name)
            await editor.undo(name)
        assert await run_shell(sandbox, "ls -A") == ""


async def test_links_are_followed_inside_the_sandbox_only(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("host\n")
    async with open_local_sandbox(tmp_path) as sandbox:
        editor = make_editor(sandbox)
        await run_shell(sandbox, f"ln -s {outside} out; ln -s /etc/hostname name")
        assert "host" not in await get_refusal(editor.view("out", None))
        with pytest.raises(EditRefused):
            await editor.create("out", "changed\n")
    assert outside.read_text() == "host\n"


async def test_file_changed_by_others_is_neither_overwritten_nor_undone(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        editor = make_editor(sandbox)
        await editor.create("f", "one\n")
        found = await editor.files.inspect("/work/f")
        await run_shell(sandbox, "echo other words > f")
        assert "/work/f" in await get_refusal(editor.files.replace("/work/f", b"mine", found))
        assert "/work/f" in await get_refusal(editor.undo("f"))
        assert await sandbox.read("f") == b"other words\n"


async def test_directories_are_listed_two_levels_deep(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        editor = make_editor(sandbox)
        await run_shell(sandbox, "mkdir -p a/b/c .git/x; touch a/f a/b/g .hidden top")
        shown = await editor.view("/work", None)
        assert sorted(shown.splitlines()[1:]) == ["a/", "a/b", "a/f", "top"]
        assert "for files" in await get_refusal(editor.view("a", [1, 2]))


async def test_undo_history_is_bounded(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        editor = make_editor(sandbox)
        await editor.create("big", "x" * (3 << 20))
        for letter in "abcd":
            await editor.create("big", letter * (3 << 20))
        assert editor._size <= 8 << 20
        await editor.undo("big")
        await editor.undo("big")
        assert "no edit" in await get_refusal(editor.undo("big"))
        assert MAX_UNDO_EDITS < 1000


@pytest.mark.long
async def test_random_edits_match_a_reference_implementation(tmp_path: Path) -> None:
    """Edits go through a real sandbox; `test_text_file.py` tests the text operations alone."""
    from random import Random

    rng = Random(7)
    async with open_local_sandbox(tmp_path) as sandbox:
        editor = make_editor(sandbox)
        for number in range(25):
            end = rng.choice([b"\n", b"\r\n"])
            last = rng.choice([b"", end])
            stem = rng.choice([b"caf\xe9", "café".encode(), b"plain"])
            lines = [b"%s %d" % (stem, index) for index in range(rng.randint(2, 6))]
            data = end.join(lines) + last
            await sandbox.write(f"f{number}", data, mode=0o640)
            pick = rng.randrange(len(lines))
            await editor.replace(f"f{number}", f" {pick}", " changed\nline")
            lines[pick] = stem + b" changed" + end + b"line"
            assert await sandbox.read(f"f{number}") == end.join(lines) + last
            await editor.insert(f"f{number}", 0, "first")
            assert await sandbox.read(f"f{number}") == end.join([b"first", *lines]) + last
            await editor.undo(f"f{number}")
            await editor.undo(f"f{number}")
            assert await sandbox.read(f"f{number}") == data
            assert await run_shell(sandbox, f"stat -c %a f{number}") == "640"


@pytest.mark.parametrize("config", [ToolConfig(), parse_tool_config(None, {"preset": "open-instruct"})])
async def test_tool_returns_refusals_as_text(tmp_path: Path, config: ToolConfig) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        attempt = make_attempt(sandbox)
        tool = edit_tool(config)
        commands = tool.parameters["properties"]["command"]["enum"]

        async def run_tool(**arguments: Any) -> str:
            return str(await tool.invoke(tool.parse(json.dumps(arguments)), attempt.ctx, 30.0))

        await run_tool(command="create", path="a", file_text="x\n")
        assert await sandbox.read("a") == b"x\n"
        replace = "replace" if "replace" in commands else "str_replace"
        await run_tool(command=replace, path="a", old_str="x", new_str="y")
        assert await sandbox.read("a") == b"y\n"
        assert "old_str" in await run_tool(command=replace, path="a")
        assert "insert" in await run_tool(command="insert", path="a")
        assert "create" in await run_tool(command="create", path="a")
        await run_tool(command="undo" if "undo" in commands else "undo_edit", path="a")
        assert "\tx" in await run_tool(command="view", path="/work/a")
        assert attempt.ctx.metrics["edits_refused"] == 3


@pytest.mark.parametrize("preset", ["open-instruct", "open-instruct-marker"])
async def test_create_makes_parent_directories_in_open_instruct_presets(tmp_path: Path, preset: str) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        attempt = make_attempt(sandbox)
        tool = edit_tool(parse_tool_config(None, {"preset": preset}))
        arguments = {"command": "create", "path": "new/deep folder/a.txt", "file_text": "x\n"}
        await tool.invoke(tool.parse(json.dumps(arguments)), attempt.ctx, 30.0)
        assert await sandbox.read("new/deep folder/a.txt") == b"x\n"
        assert await run_shell(sandbox, "stat -c '%a %U' new") == await run_shell(
            sandbox, "mkdir -m 755 o; stat -c '%a %U' o"
        )


async def test_parent_directories_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    async with open_local_sandbox(tmp_path) as sandbox:
        parents = Editor(SandboxFiles(sandbox, "/work", 20.0), 4096, create_parents=True)
        await run_shell(sandbox, "echo x > file; ln -s nowhere dangling; mkdir real; ln -s real link")
        for path in ("file/a", "dangling/a", "/proc/new/a"):
            assert path.rpartition("/")[0] in await get_refusal(parents.create(path, "x"))
        assert f"{MAX_FILE + 1:,}" in await get_refusal(parents.create("huge/a", "x" * (MAX_FILE + 1)))
        await parents.create("link/sub/a", "x")
        await parents.create("top", "x")
        assert (
            await run_shell(sandbox, "find . -type d | sort | tr '\\n' ' '; cat real/sub/a top")
            == ". ./real ./real/sub xx"
        )
        plain = make_editor(sandbox)
        assert "other/a" in await get_refusal(plain.create("other/a", "x"))
