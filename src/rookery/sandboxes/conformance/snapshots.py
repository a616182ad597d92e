"""Conformance checks of snapshots, forks and diffs. A provider without snapshots must refuse to take one."""

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes.conformance.tools import Check, open_fork, open_sandbox, sh
from rookery.sandboxes.protocol import Provider, Sandbox

CREATE_FILES = "mkdir -p d/e; echo one > d/one; echo two > d/two; ln -s one d/link; chmod 750 d/e; echo x > d/e/x"


async def take_snapshot(sandbox: Sandbox) -> str | None:
    """Take a snapshot and return its name; None if the provider does not support snapshots."""
    try:
        return await sandbox.snapshot()
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
        return None


async def a_change_of_equal_length_right_after_a_fork_is_detected(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        await sh(sandbox, "mkdir d; for n in 1 2 3 4 5 6; do echo one > d/$n; done")
        name = await take_snapshot(sandbox)
        if name is None:
            return
        async with open_fork(sandbox, name) as fork:
            # The files get their old times back: only their content differs.
            await sh(
                fork, "cd d; for n in 1 2 3; do touch -r $n then; echo two > $n; touch -r then $n; done; rm then 4"
            )
            found = dict(await fork.diff(name))
            where = (await sh(fork, "pwd")).stdout.decode().strip()
            found.pop(f"{where}/d", None)
            wanted = {f"{where}/d/{n}": "removed" if n == 4 else "changed" for n in (1, 2, 3, 4)}
            assert found == wanted, found


async def a_fork_has_the_files_of_the_snapshot_and_is_independent(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        await sh(sandbox, CREATE_FILES)
        name = await take_snapshot(sandbox)
        if name is None:
            return
        await sh(sandbox, "echo later > d/one; rm d/two; echo new > new")
        async with open_fork(sandbox, name) as fork:
            assert fork.id != sandbox.id
            found = await sh(fork, "cat d/one d/two d/link d/e/x; stat -c %a d/e; ls; echo > d/one; rm -r d/e")
            assert found.stdout == b"one\ntwo\none\nx\n750\nd\n", found
            async with open_fork(sandbox, name) as other:
                assert (await sh(other, "cat d/one d/e/x")).stdout == b"one\nx\n"
            assert (await sh(sandbox, "cat d/one d/e/x; ls")).stdout == b"later\nx\nd\nnew\n"


async def a_fork_can_be_forked_and_outlives_its_origin(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        await sh(sandbox, CREATE_FILES)
        name = await take_snapshot(sandbox)
        if name is None:
            return
        fork = await sandbox.fork(name)
    try:
        await sh(fork, "rm -r d/e; mkdir d/e; echo y > d/e/y")
        async with open_fork(fork, await fork.snapshot()) as again:
            assert (await sh(again, "cat d/one; ls d/e")).stdout == b"one\ny\n"
        async with open_fork(fork, name) as first:
            assert (await sh(first, "ls d/e")).stdout == b"x\n"
    finally:
        await fork.close()


async def a_fork_can_have_another_user_and_other_variables(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        await sh(sandbox, CREATE_FILES)
        name = await take_snapshot(sandbox)
        if name is None:
            return
        spec = msgspec.structs.replace(sandbox.spec, user="root", env={"WORD": "said"}, image="another")
        async with open_fork(sandbox, name, spec) as fork:
            assert fork.spec == msgspec.structs.replace(spec, image=sandbox.spec.image)
            await fork.write("/tmp/mine", b"x")  # noqa: S108  (the sandbox's own)
            found = await sh(fork, "id -u; echo $WORD; cat d/one; stat -c %u /tmp/mine")
            assert found.stdout == b"0\nsaid\none\n0\n", found
            assert (await fork.diff(name)).get("/tmp/mine") == "added"  # noqa: S108


async def a_diff_lists_added_changed_and_removed_files(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        await sh(sandbox, CREATE_FILES)
        name = await take_snapshot(sandbox)
        if name is None:
            return
        assert await sandbox.diff(name) == {}
        # The second file keeps its size and time: only its content differs.
        done = await sh(
            sandbox,
            "touch -r d/two t; printf owt\\\\n > d/two; touch -r t d/two; rm t d/e/x;"
            "chmod 755 d/e; echo n > d/n; touch d/one",
        )
        assert done.ok, done
        found = await sandbox.diff(name)
        changes = {path.rpartition("/d/")[2]: how for path, how in found.items()}
        assert changes == {"two": "changed", "e/x": "removed", "e": "changed", "n": "added"}, found


async def an_unknown_snapshot_is_refused(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        for call in (sandbox.fork("nothing"), sandbox.diff("nothing")):
            try:
                await call
            except SandboxError:
                continue
            raise AssertionError("a snapshot name that does not exist was accepted")
        assert (await sh(sandbox, "echo still here")).stdout == b"still here\n"


CHECKS: tuple[Check, ...] = (
    a_change_of_equal_length_right_after_a_fork_is_detected,
    a_fork_has_the_files_of_the_snapshot_and_is_independent,
    a_fork_can_be_forked_and_outlives_its_origin,
    a_fork_can_have_another_user_and_other_variables,
    a_diff_lists_added_changed_and_removed_files,
    an_unknown_snapshot_is_refused,
)
