"""The editor, on files of a real sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest

from rookery.environments.swe.edit_tool import MAX_UNDO_EDITS, Editor, edit_tool
from rookery.environments.swe.sandbox_files import MAX_FILE, SandboxFiles
from rookery.environments.swe.text_file import EditRefused
from rookery.environments.swe.tool_config import ToolConfig, parse_tool_config
from rookery.sandboxes.protocol import Command, Sandbox
from tests.environments.swe.helpers import attempt_in, box

pytestmark = pytest.mark.needs("mount")


def editor(made: Sandbox) -> Editor:
    return Editor(SandboxFiles(made, "/work", 20.0), 4096)


async def sh(made: Sandbox, script: str) -> str:
    result = await made.exec(Command(argv=("bash", "-c", script)))
    assert result.ok, result
    return result.stdout.decode().strip()


async def refused(coroutine: Any) -> str:
    with pytest.raises(EditRefused) as caught:
        await coroutine
    return str(caught.value)


async def test_every_command_and_undo(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        own = editor(made)
        assert "3 lines" in await own.create("a.txt", "one\ntwo\nthree\n")
        seen = await own.view("a.txt", [2, -1])
        assert seen == "/work/a.txt, lines 2 to 3 of 3:\n     2\ttwo\n     3\tthree\n"
        assert "     2\tzwei" in await own.replace("a.txt", "two", "zwei")
        await own.insert("a.txt", 3, "four\n")
        assert await made.read("a.txt") == b"one\nzwei\nthree\nfour\n"
        await own.undo("a.txt")
        await own.undo("a.txt")
        assert await made.read("a.txt") == b"one\ntwo\nthree\n"
        assert "deleted" in await own.undo("a.txt")
        assert await sh(made, "ls -A") == ""
        assert "no edit" in await refused(own.undo("a.txt"))


async def test_a_file_keeps_its_mode_owner_and_links(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        own = editor(made)
        await sh(made, "echo x > run.sh; chmod 751 run.sh; ln -s run.sh link; echo y > one; ln one two")
        await own.replace("link", "x", "z")
        assert await sh(made, "stat -c '%a' run.sh; readlink link; cat run.sh") == "751\nrun.sh\nz"
        await own.replace("one", "y", "w")
        assert await sh(made, "cat two; stat -c %h one") == "w\n2"
        assert await sh(made, "ls -A | sort | tr '\\n' ' '") == "link one run.sh two"
        await own.create("new.sh", "q")
        assert await sh(made, "stat -c %a new.sh") == "644"


async def test_what_cannot_be_done_is_an_answer(tmp_path: Path) -> None:
    async with box(tmp_path, disk=8 << 20) as made:
        own = editor(made)
        await sh(
            made,
            "mkdir d; ln -s loop loop; ln -s nowhere dangling; mkfifo pipe; printf 'a\\0b' > bin; "
            "echo secret > shut; chmod 0 shut; echo r > ro; chmod 444 ro; mkdir closed; echo c > closed/f; "
            f"chmod 555 closed; truncate -s {MAX_FILE + 1} huge",
        )
        assert "No such file" in await refused(own.create("no/such/folder.txt", "x"))
        assert "does not exist" in await refused(own.view("nothing", None))
        assert "does not exist" in await refused(own.replace("nothing", "a", "b"))
        assert "is a directory" in await refused(own.replace("d", "a", "b"))
        assert "is a directory" in await refused(own.create("d", "a"))
        assert "symbolic links" in await refused(own.view("loop", None))
        assert "not a regular file" in await refused(own.view("pipe", None))
        assert "binary" in await refused(own.view("bin", None))
        assert "Permission denied" in await refused(own.view("shut", None))
        assert "Permission denied" in await refused(own.replace("ro", "r", "w"))
        assert "Permission denied" in await refused(own.create("closed/new", "w"))
        assert "more than" in await refused(own.view("huge", None))
        assert "Not a directory" in await refused(own.view("ro/below", None))
        assert "not a path" in await refused(own.view(" ", None))
        assert "not a path" in await refused(own.view("a\0b", None))
        assert "too long" in await refused(own.view("x" * 5000, None))
        assert "name too long" in (await refused(own.create("x" * 300, "y"))).lower()
        assert "cannot be written" in await refused(own.create("/proc/version", "x"))
        # A folder that takes no new files: the file itself may be written.
        await own.replace("closed/f", "c", "C")
        assert await made.read("closed/f") == b"C\n"
        # A full disk: the file stays as it was, and nothing lies beside it.
        await sh(made, "echo keep > kept; cat /dev/zero > fill 2>/dev/null; true")
        assert "No space left" in await refused(own.create("kept", "z" * 100_000))
        assert await made.read("kept") == b"keep\n"
        assert "No space left" in await refused(own.create("fresh", "z" * 100_000))
        assert ".edit" not in await sh(made, "ls -A")


async def test_names_are_data(tmp_path: Path) -> None:
    names = ["-rf", "a b", "it's", 'q"q', "$(touch hit)", "`touch hit`", "new\nline", "*", "ünï", ";ls", "\\"]
    async with box(tmp_path) as made:
        own = editor(made)
        for name in names:
            await own.create(name, "one\n")
            await own.replace(name, "one", "two")
            assert await made.read(name) == b"two\n"
        shown = await own.view(".", None)
        assert "hit" not in await sh(made, "ls -A | grep -x hit || true")
        assert "$(touch hit)" in shown
        assert "new?line" in shown
        for name in names:
            await own.undo(name)
            await own.undo(name)
        assert await sh(made, "ls -A") == ""


async def test_links_are_followed_inside_of_the_sandbox_only(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("host\n")
    async with box(tmp_path) as made:
        own = editor(made)
        await sh(made, f"ln -s {outside} out; ln -s /etc/hostname name")
        assert "host" not in await refused(own.view("out", None))
        with pytest.raises(EditRefused):
            await own.create("out", "changed\n")
    assert outside.read_text() == "host\n"


async def test_a_file_that_changed_meanwhile_is_not_written_over_nor_undone(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        own = editor(made)
        await own.create("f", "one\n")
        found = await own._files.inspect("/work/f")
        await sh(made, "echo other words > f")
        assert "changed meanwhile" in await refused(own._files.replace("/work/f", b"mine", found))
        assert "changed by something else" in await refused(own.undo("f"))
        assert await made.read("f") == b"other words\n"


async def test_directories_are_listed_two_levels_deep(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        own = editor(made)
        await sh(made, "mkdir -p a/b/c .git/x; touch a/f a/b/g .hidden top")
        shown = await own.view("/work", None)
        assert sorted(shown.splitlines()[1:]) == ["a/", "a/b", "a/f", "top"]
        assert "for files" in await refused(own.view("a", [1, 2]))


async def test_what_undo_remembers_is_bounded(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        own = editor(made)
        await own.create("big", "x" * (3 << 20))
        for letter in "abcd":
            await own.create("big", letter * (3 << 20))
        assert own._size <= 8 << 20
        await own.undo("big")
        await own.undo("big")
        assert "no edit" in await refused(own.undo("big"))
        assert MAX_UNDO_EDITS < 1000


async def test_random_files_come_back_as_a_reference_edits_them(tmp_path: Path) -> None:
    """The whole way through the sandbox; what the text itself does is tested without one."""
    from random import Random

    rng = Random(7)
    async with box(tmp_path) as made:
        own = editor(made)
        for number in range(25):
            end = rng.choice([b"\n", b"\r\n"])
            last = rng.choice([b"", end])
            stem = rng.choice([b"caf\xe9", "café".encode(), b"plain"])
            lines = [b"%s %d" % (stem, index) for index in range(rng.randint(2, 6))]
            data = end.join(lines) + last
            await made.write(f"f{number}", data, mode=0o640)
            pick = rng.randrange(len(lines))
            await own.replace(f"f{number}", f" {pick}", " changed\nline")
            lines[pick] = stem + b" changed" + end + b"line"
            assert await made.read(f"f{number}") == end.join(lines) + last
            await own.insert(f"f{number}", 0, "first")
            assert await made.read(f"f{number}") == end.join([b"first", *lines]) + last
            await own.undo(f"f{number}")
            await own.undo(f"f{number}")
            assert await made.read(f"f{number}") == data
            assert await sh(made, f"stat -c %a f{number}") == "640"


@pytest.mark.parametrize("tooling", [ToolConfig(), parse_tool_config(None, {"preset": "open-instruct"})])
async def test_the_tool_answers_and_never_raises(tmp_path: Path, tooling: ToolConfig) -> None:
    async with box(tmp_path) as made:
        attempt = attempt_in(made)
        tool = edit_tool(tooling)
        words = tool.parameters["properties"]["command"]["enum"]

        async def said(**arguments: Any) -> str:
            return str(await tool.invoke(tool.parse(json.dumps(arguments)), attempt.ctx, 30.0))

        assert "was written" in await said(command="create", path="a", file_text="x\n")
        replace = "replace" if "replace" in words else "str_replace"
        assert "was edited" in await said(command=replace, path="a", old_str="x", new_str="y")
        assert "old_str is required" in await said(command=replace, path="a")
        assert "insert needs" in await said(command="insert", path="a")
        assert "create needs" in await said(command="create", path="a")
        assert "was undone" in await said(command="undo" if "undo" in words else "undo_edit", path="a")
        assert "\tx" in await said(command="view", path="/work/a")
        assert attempt.ctx.metrics["edits_refused"] == 3


@pytest.mark.parametrize("preset", ["open-instruct", "open-instruct-marker"])
async def test_create_makes_parent_directories_in_the_presets_of_open_instruct(
    tmp_path: Path, preset: str
) -> None:
    async with box(tmp_path) as made:
        attempt = attempt_in(made)
        tool = edit_tool(parse_tool_config(None, {"preset": preset}))
        arguments = {"command": "create", "path": "new/deep folder/a.txt", "file_text": "x\n"}
        assert "was written" in str(await tool.invoke(tool.parse(json.dumps(arguments)), attempt.ctx, 30.0))
        assert await made.read("new/deep folder/a.txt") == b"x\n"
        assert await sh(made, "stat -c '%a %U' new") == await sh(made, "mkdir -m 755 o; stat -c '%a %U' o")


async def test_parent_directories_that_cannot_be_made_are_an_answer(tmp_path: Path) -> None:
    async with box(tmp_path) as made:
        parents = Editor(SandboxFiles(made, "/work", 20.0), 4096, create_parents=True)
        await sh(made, "echo x > file; ln -s nowhere dangling; mkdir real; ln -s real link")
        for path in ("file/a", "dangling/a", "/proc/new/a"):
            assert "cannot be created" in await refused(parents.create(path, "x"))
        assert "bytes" in await refused(parents.create("huge/a", "x" * (MAX_FILE + 1)))
        await parents.create("link/sub/a", "x")
        await parents.create("top", "x")
        assert (
            await sh(made, "find . -type d | sort | tr '\\n' ' '; cat real/sub/a top") == ". ./real ./real/sub xx"
        )
        plain = editor(made)
        assert "cannot be read" in await refused(plain.create("other/a", "x"))
