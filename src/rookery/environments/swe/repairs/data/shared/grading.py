"""Shared code of the tests of all tasks. It runs as the grader, together with the task's `check.py`.

The submission is never imported here: its programs run as another user, on inputs that are new for each grading, and
expected values never leave this process. Whatever a program does, this process writes the verdict last. Anything that is
not exactly right scores zero.

`ROOKERY_RUN` runs a command as the other user. Without it, root runs the programs as nobody; any other user runs them as
itself, which is a weaker protection.
"""

import contextlib
import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import traceback

WORKSPACE = os.environ.get("REPAIRS_WORKSPACE", "/workspace")
VERIFIER = os.environ.get("REPAIRS_VERIFIER", "/logs/verifier")
HERE = os.path.dirname(os.path.realpath(__file__))
RUN = os.environ.get("ROOKERY_RUN", "")
NOBODY = 65534
SECONDS = 240.0
"""Time limit of one call. A correct program takes a few seconds, but the machine may be busy."""
MOST = 4 << 20
"""Maximum bytes of output of one call."""

LIMITS = 'ulimit -v 2097152 -f 262144 -c 0 -t 60 2>/dev/null; exec "$@"'
"""Limits of a program: 2 GB of address space, files of 128 MB, one minute of CPU time."""

MANY = """
import json, os, signal, subprocess, sys
cwd, cases = json.load(sys.stdin)
answers = []
for words, text in cases:
    try:
        with subprocess.Popen(words, cwd=cwd, stdin=-1, stdout=-1, stderr=-3, start_new_session=True) as program:
            try:
                out = program.communicate(text.encode("utf-8", "surrogateescape"), timeout=60)[0]
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)
                break
        answers.append([program.returncode, out.decode("utf-8", "surrogateescape")])
    except OSError as error:
        answers.append([127, str(error)])
json.dump(answers, sys.stdout)
"""
"""Runs several programs one after another, as the other user. It contains no expected values."""

ASKED = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, os.getcwd())
{source}
json.dump([handle(order) for order in json.load(sys.stdin)], answers)
answers.flush()
"""


class Wrong(Exception):
    """The submission is wrong. The message says why."""


class Result:
    def __init__(self, code, out):
        self.code = code
        self.out = out

    @property
    def text(self):
        return self.out.decode("utf-8", "surrogateescape")


class Grading:
    """The argument of a task's `check` function."""

    def __init__(self, parts):
        self.random = random.Random(os.urandom(16))
        self.parts = dict.fromkeys(parts, 0)
        self.workspace = WORKSPACE
        self._cases = []

    # ------------------------------------------------------------------------------------------ running programs

    def run(self, words, text="", *, cwd=WORKSPACE, seconds=SECONDS):
        """Run one program as the other user. Raise `Wrong` if it does not end or prints too much."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        words = ["sh", "-c", LIMITS, "sh", *words]
        options = {}
        if RUN:
            words = [RUN, "-t", str(int(seconds)), *words]
        elif os.geteuid() == 0:
            options = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(data)
            given.seek(0)
            program = _started(words, cwd, given, said, options)
            try:
                code = program.wait(seconds + 10)
            except subprocess.TimeoutExpired:
                raise Wrong(f"{words[-1]!r:.60} did not end in {seconds:g} s") from None
            finally:
                with contextlib.suppress(OSError):  # it may have ended, or belong to another user
                    os.killpg(program.pid, signal.SIGKILL)
            said.seek(0)
            out = said.read(MOST + 1)
        if len(out) > MOST:
            raise Wrong("it printed without end")
        return Result(code, out)

    def case(self, what, words, text="", *, out=None, code=0, read=None):
        """Add a case: a program that must exit with `code` and print `out`, after conversion by `read`."""
        self._cases.append((what, words, text, out, code, read))

    def settle(self, cwd=WORKSPACE):
        """Run all cases in one call and compare the results."""
        cases, self._cases = self._cases, []
        given = json.dumps([cwd, [[words, text] for _, words, text, *_ in cases]])
        result = self.run(["python3", "-I", "-c", MANY], given)
        answers = _plain(result)
        for (what, words, _, out, code, read), answer in zip(cases, answers):
            got, text = answer
            self.expect(f"{what}: the exit code of {' '.join(words)!r:.80}", got, code)
            if out is not None:
                self.expect(what, text if read is None else read(text), out)
        if len(answers) != len(cases):
            raise Wrong(f"{cases[len(answers)][0]}: it did not end")

    def driver(self, source, orders, *, cwd=WORKSPACE):
        """Return the results of `handle(order)`, defined by `source`, for each order. Runs as the other user."""
        answers = _plain(
            self.run(["python3", "-B", "-c", ASKED.format(source=source)], json.dumps(orders), cwd=cwd)
        )
        if len(answers) != len(orders):
            raise Wrong(f"{len(answers)} answers to {len(orders)} questions")
        return answers

    def built(self, folder, *words):
        """Run `make` in a directory and raise `Wrong` if it fails."""
        result = self.run(["make", "-C", folder, *words], cwd=folder)
        if result.code != 0:
            raise Wrong(f"make ended with {result.code}: {result.text[-500:]}")
        return result

    def compiled(self, folder, source, others, target):
        """Compile a program of the grader together with files of the submission."""
        place = self.folder()
        with open(os.path.join(HERE, source), encoding="utf-8") as file, open(f"{place}/{source}", "w") as seen:
            seen.write(file.read())
        words = ["gcc", "-std=c99", "-O1", "-Wall", "-I", ".", "-o", target, f"{place}/{source}", *others]
        result = self.run(words, cwd=folder)
        if result.code != 0:
            raise Wrong(f"{source} with {' '.join(others)} does not compile")

    # -------------------------------------------------------------------------------------------------- folders

    def folder(self):
        """Create an empty directory that both users can write to."""
        made = os.path.realpath(tempfile.mkdtemp(prefix="graded-", dir="/tmp"))
        os.chmod(made, 0o777)
        return made

    def copy(self):
        """Copy the submission into a directory that the other user owns."""
        target = self.folder() + "/work"
        result = self.run(["cp", "-R", ".", target])
        if result.code != 0:
            raise Wrong("the submission cannot be copied")
        return target

    # -------------------------------------------------------------------------------------------------- verdicts

    def expect(self, what, got, wanted):
        """Compare JSON values by their encoding, so that 1 does not equal true."""
        if json.dumps(got, sort_keys=True) != json.dumps(wanted, sort_keys=True):
            raise Wrong(f"{what}: {got!r:.300} instead of {wanted!r:.300}")

    @contextlib.contextmanager
    def part(self, name):
        """Grade one part of the reward. A failure inside the block costs only this part."""
        try:
            yield
        except Exception:
            self._cases = []
            _tell()
        else:
            self.parts[name] = 1


def _started(words, cwd, given, said, options):
    how = {"cwd": cwd, "stdin": given, "stdout": said, "stderr": subprocess.DEVNULL, "start_new_session": True}
    try:
        return subprocess.Popen(words, **how, **options)
    except PermissionError:  # root without the capability to change users
        return subprocess.Popen(words, **how)


def _plain(result):
    if result.code != 0:
        raise Wrong(f"it ended with {result.code}")
    found = json.loads(result.out.decode("utf-8", "surrogateescape"))
    if type(found) is not list:
        raise Wrong("its answers cannot be read")
    return found


def _tell():
    error = sys.exc_info()[1]
    print(f"wrong: {error}" if isinstance(error, Wrong) else traceback.format_exc(), file=sys.stderr)


def main():
    if not RUN and os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.chmod(HERE, 0o700)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spec = importlib.util.spec_from_file_location("check", os.path.join(HERE, "check.py"))
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    names = getattr(task, "PARTS", ())
    grading = Grading(names)
    right = 0
    try:
        task.check(grading)
        grading.settle() if grading._cases else None
        right = 1
    except Exception:
        _tell()
    if names:
        parts = grading.parts if right else dict.fromkeys(names, 0)
        name, verdict = "reward.json", json.dumps(parts)
    else:
        name, verdict = "reward.txt", f"{right}\n"
    os.makedirs(VERIFIER, exist_ok=True)
    with open(os.path.join(VERIFIER, name), "w", encoding="ascii") as file:
        file.write(verdict)


if __name__ == "__main__":
    main()
