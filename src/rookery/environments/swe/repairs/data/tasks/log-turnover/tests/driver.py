# As the program's user, in a copy of the submission: feeds a collector, turns the log over, and tells what lies in
# the folder in the end. It knows no right answer.
import json
import os
import subprocess
import sys
import time


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            sys.exit("it takes too long")
        time.sleep(0.002)


def size(path):
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def logged(folder):
    """Whichever log a line went to, it was written when this grew."""
    return sum(size(os.path.join(folder, name)) for name in os.listdir(folder) if name != "pid")


answers = []
for folder, orders in json.load(sys.stdin):
    os.mkdir(folder)
    log, pid = os.path.join(folder, "the log"), os.path.join(folder, "pid")
    program = None
    for what, text in orders:
        if what == "start":
            program = subprocess.Popen(["./collector", log, pid], stdin=-1, stdout=-3, stderr=-3)
            until(lambda: size(pid) > 0 or program.poll() is not None)
        elif what == "say":
            before = logged(folder)
            program.stdin.write(text.encode())
            program.stdin.flush()
            if text.endswith("\n"):
                until(lambda: logged(folder) >= before + len(text) or program.poll() is not None)
        elif what == "turn":
            code = subprocess.run(
                ["bash", "rotate.sh", log, pid], stdin=-3, stdout=-3, stderr=-3, timeout=60
            ).returncode
            if code != 0:
                answers.append(["rotate.sh", code])
        else:
            program.stdin.close()
            code = program.wait(60)
            if code != 0 or os.path.exists(pid):
                answers.append(["collector", code])
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name)) as file:
            found[name] = file.read()
    answers.append(found)
json.dump(answers, sys.stdout)
