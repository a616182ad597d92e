"""Task directories and random tasks for tests."""

import json
import shutil
from pathlib import Path

from hypothesis import strategies as st

from rookery.tasks.swe import FileMapping, SweStep, SweTask, Verifier


def write_files(folder, files):
    """Write files: path → text (None: an empty directory)."""
    for path, text in files.items():
        target = Path(folder, path)
        if text is None:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Path(folder)


def open_instruct(folder, **more):
    files = {"instruction.md": "Fix it.\n", "tests/test.sh": "exit 0\n", "image.txt": "python:3.12\n"}
    return write_files(folder, {**files, **more.pop("files", {})})


def harbor(folder, toml="", files=()):
    whole = {"task.toml": toml, "instruction.md": "Do it.\n", "tests/test.sh": "exit 0\n", **dict(files)}
    return write_files(folder, {name: text for name, text in whole.items() if text is not ...})


def problems_by_field(report):
    """Return the problems by field: whether each is a warning."""
    return {(one.task, one.field): one.warning for one in report.problems}


# ------------------------------------------------------------------------------------------------ any shape

words = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True).filter(lambda name: ".." not in name)
file_names = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/"), min_size=1, max_size=10
).filter(lambda name: name not in (".", "..", "setup.sh") and len(name.encode()) < 100)
content = st.one_of(words.map(str.encode), st.binary(max_size=20))
numbers = st.one_of(st.integers(1, 9999).map(float), st.floats(0.1, 9999.0))
env = st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True), words, max_size=3)
users = st.none() | st.sampled_from(("root", "agent", "1000"))
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-9999, 9999) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
hosts = st.sampled_from(("example.org", "*.example.org", "example.com:8443", "192.0.2.7"))


@st.composite
def networks(draw):
    mode = draw(st.sampled_from(("none", "allow", "all")))
    return mode, tuple(draw(st.lists(hosts, max_size=2, unique=True))) if mode == "allow" else ()


@st.composite
def trees(draw, needed=()):
    """Generate files: path → (bytes, executable, link target)."""
    found = {}
    for name in draw(st.lists(file_names, max_size=3, unique=True)):
        inside = draw(st.booleans())
        path = f"{name}/{draw(file_names)}" if inside else name
        kind = draw(st.sampled_from(("file", "file", "program", "link")))
        found[path] = (draw(content), kind == "program", draw(file_names) if kind == "link" else "")
    for name in needed:
        found = {path: file for path, file in found.items() if path.partition("/")[0] != name}
        found[name] = (b"exit 0 # " + draw(words).encode(), True, "")
    return found


def write_tree(folder, tree):
    for path, (data, program, link) in tree.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if link:
            target.symlink_to(link)
        else:
            target.write_bytes(data)
            target.chmod(0o755 if program else 0o644)


@st.composite
def shapes(draw, steps=1):
    """Generate a task without the location of its files."""
    network, allow = draw(networks())
    made = []
    for number in range(draw(st.integers(1, steps))):
        mode, hosts_ = draw(networks()) if draw(st.booleans()) else (None, ())
        made.append(
            {
                "name": f"s{number}" if steps > 1 and draw(st.booleans()) else "",
                "instruction": draw(words.filter(str.strip)),
                "files": draw(trees()),
                "tests": draw(trees(("test.sh",))),
                "solution": draw(trees(("solve.sh",)) | st.just({})),
                "setup": draw(st.just("") | words.filter(str.strip)),
                "solve_env": draw(env),
                "timeout": draw(st.none() | numbers),
                "min_reward": draw(st.none() | numbers),
                "verifier": Verifier(
                    mode=draw(st.sampled_from(("fresh", "shared"))),
                    timeout=draw(numbers),
                    env=draw(env),
                    user=draw(users),
                    services=draw(st.booleans()),
                    reward_from_exit=draw(st.booleans()),
                    network=mode,
                    allow=hosts_,
                ),
            }
        )
    return {
        "steps": made,
        "task": {
            "image": draw(st.none() | st.sampled_from(("python:3.12", "host.example/team/app:1"))),
            "workdir": draw(st.sampled_from(("/workspace", "/app", "/a b/c'd"))),
            "artifacts": tuple(draw(st.lists(st.sampled_from(("/opt/x", "/srv")), max_size=2, unique=True))),
            "env": draw(env),
            "user": draw(users),
            "memory": draw(st.none() | st.integers(1, 1 << 40)),
            "cpus": draw(st.none() | st.sampled_from((0.5, 1.0, 2.0))),
            "disk": draw(st.none() | st.integers(1, 1 << 12).map(lambda mb: mb << 20)),
            "gpus": draw(st.none() | st.integers(0, 2)),
            "network": network,
            "allow": allow,
            "mcp": draw(
                st.just(()) | st.just(({"name": "m", "transport": "stdio", "command": "x", "args": ["-a"]},))
            ),
            "rewards": draw(st.sampled_from(("mean", "final"))),
            "metadata": draw(
                st.dictionaries(words.filter(lambda key: key not in ("rookery", "task")), plain, max_size=3)
            ),
        },
    }


def build(shape, folder, name="t"):
    """Write the files of a task into a directory, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    workdir = shape["task"]["workdir"]
    steps = []
    for number, one in enumerate(shape["steps"]):
        here = folder / str(number)
        here.mkdir(parents=True)
        fields = dict(one)
        for key, target in (("files", workdir), ("tests", "/tests"), ("solution", "/solution")):
            tree = fields[key]
            if tree:
                write_tree(here / key, tree)
            fields[key] = (FileMapping(source=str(here / key), target=target),) if tree else ()
        if fields["setup"]:
            (here / "setup.sh").write_text(fields["setup"], newline="")
            fields["setup"] = str(here / "setup.sh")
        steps.append(SweStep(**fields))
    return SweTask(id=name, format="test", folder=str(folder), steps=tuple(steps), **shape["task"])


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
