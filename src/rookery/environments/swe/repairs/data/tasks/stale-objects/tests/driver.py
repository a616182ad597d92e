# As the program's user, in a copy of the submission: changes files, builds, and tells what was compiled and what the
# program prints. It knows no right answer.
import json
import os
import subprocess
import sys

OLD = 1_500_000_000


def objects():
    found = {}
    for top, _, names in os.walk("."):
        for name in names:
            if name.endswith(".o"):
                found[name] = os.stat(os.path.join(top, name)).st_mtime_ns
    return found


def aged():
    """Everything is equally old, so that what is written next is newer for sure, however coarse the clock."""
    for top, folders, names in os.walk("."):
        for name in (*folders, *names):
            os.utime(os.path.join(top, name), (OLD, OLD), follow_symlinks=False)


def make(*words):
    return subprocess.run(["make", *words], stdin=-3, stdout=-3, stderr=-3, timeout=120).returncode


answers = []
for change in json.load(sys.stdin):
    aged()
    before = objects()
    for path, text in change["files"].items():
        if text is None:
            os.unlink(path)
        else:
            with open(path, "w") as file:
                file.write(text)
    code = make()
    after = objects()
    again = make("-q")
    said = subprocess.run(
        ["./quote", change["pounds"]], stdin=-3, stdout=-1, stderr=-3, timeout=60
    ).stdout.decode()
    answers.append([code, sorted(name for name in after if after[name] != before.get(name)), again, said])
code = make("clean")
answers.append([code, sorted(objects()), os.path.exists("quote")])
json.dump(answers, sys.stdout)
