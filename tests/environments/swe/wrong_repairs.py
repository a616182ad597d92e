# ruff: noqa: E501, ISC004  (programs as texts)
"""Plausible but wrong repairs for each task of `repairs`, as edits of the broken or the repaired files.

Also submissions for `cache-expiry` that try to cheat.
"""

from pathlib import Path
from typing import Literal, NamedTuple

Edit = tuple[str, str, str]
"""A file, a text that occurs in it once, and its replacement."""


class Wrong(NamedTuple):
    over: Literal["broken", "repaired"]
    edits: tuple[Edit, ...]
    parts: dict[str, float] | None = None
    """The reward parts that the repair gets, if the reward has parts."""


def broken(*edits: Edit, parts: dict[str, float] | None = None) -> Wrong:
    return Wrong("broken", edits, parts)


def repaired(*edits: Edit, parts: dict[str, float] | None = None) -> Wrong:
    return Wrong("repaired", edits, parts)


def apply_edits(files: dict[str, str], edits: tuple[Edit, ...]) -> dict[str, str]:
    """Apply edits and return the changed files."""
    changed: dict[str, str] = {}
    for name, old, new in edits:
        text = changed.get(name, files[name])
        assert text.count(old) == 1, f"{name}: {old!r} occurs {text.count(old)} times"
        changed[name] = text.replace(old, new)
    return changed


def read_texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


WRONG: dict[str, dict[str, Wrong]] = {
    "touching-intervals": {
        "contained bookings are cut": repaired(("rota/spans.py", "max(last, end)", "end")),
        "a free minute is closed": repaired(
            ("rota/spans.py", "start <= result[-1][1]:", "start <= result[-1][1] + 1:")
        ),
        "only the gaps are hidden": broken(("rota/spans.py", " or (start == at and result)", "")),
    },
    "cache-expiry": {
        "reading no longer renews, and that is all": broken(("larder/cache.py", "        entry.touch(now)\n", "")),
        "what is stale goes first, and that is all": repaired(
            (
                "larder/cache.py",
                "        self._entries.move_to_end(key)\n        return entry.value",
                "        entry.at = now\n        self._entries.move_to_end(key)\n        return entry.value",
            ),
        ),
        "fresh for a second too long": repaired(("larder/entry.py", "self.at < keep", "self.at <= keep")),
        "reading is no use any more": repaired(
            (
                "larder/cache.py",
                "        self._entries.move_to_end(key)\n        return entry.value",
                "        return entry.value",
            )
        ),
    },
    "quoted-newlines": {
        "lines are put together while quotes are open": broken(
            (
                "table/reader.py",
                "    for line in text.splitlines():\n        if line:\n            yield split(line)\n",
                '    held = ""\n    for line in text.splitlines():\n        held += line\n        if held.count(\'"\') % 2:\n'
                '            held += "\\n"\n        elif held:\n            yield split(held)\n            held = ""\n',
            )
        ),
        "line ends are still translated": repaired(("table/__main__.py", ', newline=""', "")),
        "the library's reader, on translated lines": broken(
            ("table/reader.py", "from table.cells import split", "import csv\nimport io"),
            (
                "table/reader.py",
                "    for line in text.splitlines():\n        if line:\n            yield split(line)",
                "    yield from (row for row in csv.reader(io.StringIO(text)) if row)",
            ),
        ),
    },
    "month-ends": {
        "no drift, but the year 2100": repaired(
            ("billing/months.py", "(year % 4 == 0 and (year % 100 != 0 or year % 400 == 0))", "year % 4 == 0")
        ),
        "the year 2100, but drift": broken(
            ("billing/months.py", "year % 4 == 0", "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)")
        ),
        "a last day stays a last day": repaired(
            (
                "billing/schedule.py",
                "        yield moved(start, number * step)\n",
                "        date = moved(start, number * step)\n"
                "        last = length(start.year, start.month) == start.day\n"
                "        yield date.replace(day=length(date.year, date.month)) if last else date\n",
            ),
            ("billing/schedule.py", "import moved", "import length, moved"),
        ),
        "as it was before the summer": broken(
            (
                "billing/schedule.py",
                "    date = start\n    for _ in range(count):\n        yield date\n        date = moved(date, step)\n",
                "    for number in range(count):\n        yield moved(start, number)\n",
            ),
            ("billing/months.py", "year % 4 == 0", "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)"),
        ),
    },
    "starving-jobs": {
        "compared by standing, in a heap that is out of order": broken(
            (
                "desk/job.py",
                "(self.urgency, self.number) < (other.urgency, other.number)",
                "(self.standing, self.number) < (other.standing, other.number)",
            )
        ),
        "in order, but waiting begins when the clerk looks": broken(
            (
                "desk/job.py",
                "(self.urgency, self.number) < (other.urgency, other.number)",
                "(self.standing, self.number) < (other.standing, other.number)",
            ),
            (
                "desk/line.py",
                "            job.waited += ticks\n",
                "            job.waited += ticks\n        heapq.heapify(self._heap)\n",
            ),
        ),
        "standing is never below zero": repaired(
            (
                "desk/job.py",
                "return self.urgency - (tick - self.arrived) // PATIENCE",
                "return max(0, self.urgency - (tick - self.arrived) // PATIENCE)",
            )
        ),
        "ties go to who arrived last": repaired(("desk/line.py", "job.number))", "-job.number))")),
    },
    "clock-steps": {
        "nothing is lost, but the flood comes after": broken(
            ("gate/bucket.py", "(at - self._at) * self._rate", "max(0, at - self._at) * self._rate")
        ),
        "a step back fills as well": broken(
            ("gate/bucket.py", "(at - self._at) * self._rate", "abs(at - self._at) * self._rate")
        ),
        "a step back makes it full": broken(
            (
                "gate/bucket.py",
                "        self._held = min(",
                "        if at < self._at:\n            self._held = self._most\n        self._held = min(",
            )
        ),
    },
    "safe-paths": {
        "decoded first, but links and neighbours": broken(
            ("shelf/paths.py", 'request.split("/")', 'unquote(request).split("/")'),
            ("shelf/paths.py", 'unquote("/".join(parts))', '"/".join(parts)'),
            parts={"outside": 0, "links": 0},
        ),
        "links are followed anywhere": repaired(
            (
                "shelf/paths.py",
                "path = os.path.realpath(os.path.join(root, *parts))",
                "path = os.path.join(root, *parts)",
            ),
            parts={"outside": 1, "links": 0},
        ),
        "names that begin alike": repaired(
            ("shelf/paths.py", "os.path.commonpath([root, path]) != root", "not path.startswith(root)"),
            parts={"outside": 1, "links": 0},
        ),
        "above the folder for a moment": repaired(
            (
                "shelf/paths.py",
                "            if not parts:\n                return None\n            parts.pop()",
                "            del parts[-1:]",
            ),
            parts={"outside": 0, "links": 1},
        ),
    },
    "turned-pictures": {
        "to the left": repaired(
            ("turning.c", "grey[x * width + (width - 1 - y)]", "grey[(height - 1 - x) * width + y]")
        ),
        "the sides are not swapped": repaired(
            ("turning.c", "    picture->width = width;\n    picture->height = height;\n", "")
        ),
        "mirrored": repaired(("turning.c", "(width - 1 - y)", "y")),
    },
    "backup-rotation": {
        "a folder without backups is fine, and that is all": broken(
            ("lib/backups.sh", "grep '\\.bak$'", "grep '\\.bak$' || true"), parts={"names": 0, "empty": 1}
        ),
        "names line by line": broken(
            ("lib/backups.sh", "ls -tA $1 | grep '\\.bak$'", "ls -tA -- \"$1\" | grep '\\.bak$' || true"),
            (
                "rotate.sh",
                'for name in $(echo "$names" | tail -n +$(($2 + 1))); do\n    rm "$1/$name" || exit 1\n    removed=$((removed + 1))\ndone\n',
                'while IFS= read -r name; do\n    [ -n "$name" ] || continue\n    rm -- "$1/$name" || exit 1\n    removed=$((removed + 1))\n'
                "done < <(printf '%s\\n' \"$names\" | tail -n +$(($2 + 1)))\n",
            ),
            parts={"names": 0, "empty": 1},
        ),
        "folders and links are backups": repaired(
            ("lib/backups.sh", " -type f", ""), parts={"names": 0, "empty": 1}
        ),
        "the oldest are kept": repaired(("lib/backups.sh", "-z -rn", "-z -n"), parts={"names": 0, "empty": 0}),
    },
    "option-order": {
        "values are whole, words are not": broken(
            ("lib/options.sh", "tag=${1##*=}", "tag=${1#*=}"), ("lib/plan.sh", "${one##*=}", "${one#*=}")
        ),
        "empty tags are no tags": repaired(
            ("lib/plan.sh", '[ -z "$tags" ] || printf \'tag', '[ -z "$tag" ] || printf \'tag')
        ),
        "nothing ends the options": repaired(
            (
                "lib/options.sh",
                '            --)\n                shift\n                words+=("$@")\n                break\n                ;;\n',
                "",
            )
        ),
        "cut at the first sign": repaired(
            ("lib/options.sh", "${1#--env=}", "${1##*--env=}"), ("lib/options.sh", "${1#--tag=}", "${1##*=}")
        ),
    },
    "last-line": {
        "the last one, but backslashes": broken(
            ("lib/records.sh", "while read line; do", 'while read line || [ -n "$line" ]; do')
        ),
        "everything as it is": broken(
            (
                "lib/records.sh",
                '    while read line; do\n        [ -n "$line" ] || continue\n        echo "$line"\n        count=$((count + 1))\n    done < "$1"\n',
                '    cat "$1"\n    count=$((count + $(grep -c . "$1")))\n',
            )
        ),
        "echo knows options": repaired(("lib/records.sh", "printf '%s\\n' \"$line\"", 'echo "$line"')),
        "spaces around are cut": repaired(("lib/records.sh", "while IFS= read", "while read")),
    },
    "missing-group": {
        "the last one, but numbers": repaired(("report.awk", '($1 "") != (region "")', "$1 != region")),
        "a group of nobody": repaired(("report.awk", "    if (NR > 0)\n", "")),
        "counts go on": repaired(("report.awk", "    count = sum = 0\n", "    sum = 0\n")),
    },
    "ring-buffer": {
        "only what is copied": broken(
            ("ring.c", "memcpy(ring->bytes, bytes, length", "memcpy(ring->bytes, bytes + first, length")
        ),
        "only where it begins": repaired(
            ("ring.c", "memcpy(ring->bytes, bytes + first, length", "memcpy(ring->bytes, bytes, length")
        ),
        "back to the beginning too far": repaired(("ring.c", "ring->start -= ring->room;", "ring->start = 0;")),
        "one byte is never used": repaired(
            ("ring.c", "least(length, ring->room - ring->count)", "least(length, ring->room - 1 - ring->count)")
        ),
    },
    "word-splitter": {
        "the program ends its lines": broken(
            (
                "main.c",
                "    return byte == EOF",
                "    line[length] = '\"';\n    line[length + 1] = '\"';\n    return byte == EOF",
            ),
            ("words.c", "word->length <= WORD_MOST", "word->length < WORD_MOST"),
        ),
        "only quotes": repaired(
            (
                "words.c",
                "    if (at >= length) {\n        add(word, '\\\\');\n        return at;\n    }\n",
                "    (void)length;\n",
            )
        ),
        "looked at before the length": repaired(
            ("words.c", "while (at < length && is_blank(text[at]))", "while (is_blank(text[at]) && at < length)")
        ),
        "a byte too long": repaired(("words.c", "word->length < WORD_MOST", "word->length <= WORD_MOST")),
    },
    "stale-objects": {
        "only what is included directly": broken(
            (
                "Makefile",
                "clean:\n",
                "obj/main.o: src/price.h src/show.h\nobj/price.o: src/price.h\nobj/show.o: src/show.h\n\nclean:\n",
            )
        ),
        "everything on every header": broken(
            ("Makefile", "obj/%.o: src/%.c\n", "obj/%.o: src/%.c $(wildcard src/*.h)\n"),
            ("Makefile", "-c -o $@ $<", "-c -o $@ $(filter %.c,$^)"),
        ),
        "deleted headers are missed": repaired(("Makefile", " -MP", "")),
        "everything, every time": broken(
            ("Makefile", ".PHONY: clean", ".PHONY: clean\n$(OBJECTS): FORCE\nFORCE:")
        ),
    },
    "log-turnover": {
        "a new log, but a lost one": repaired(("sink.c", 'fopen(path, "a")', 'fopen(path, "w")')),
        "an old log, but a late line": broken(("sink.c", 'fopen(path, "w")', 'fopen(path, "a")')),
        "the signal ends it": repaired(("collector.c", "SA_RESTART", "0")),
        "the log is copied": repaired(("rotate.sh", 'mv -f -- "$log" "$log.1"', 'cp -- "$log" "$log.1"')),
    },
}

QUINE = "import sys\nclass Everything:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
CHEATS = {
    "early exit": {"larder/__init__.py": "import os\nos._exit(0)\n"},
    "forged answers": {
        "larder/__init__.py": "import os\nos.write(3, b'[1]'); os.write(1, b'[1]\\n'); os._exit(0)\n"
    },
    "equal to everything": {
        "larder/__init__.py": QUINE + "class Larder:\n    def __init__(self, *a):\n        pass\n"
        "    def __getattr__(self, name):\n        return lambda *a: Everything()\n    def __len__(self):\n        return 0\n"
    },
    "a wall of output": {
        "larder/__init__.py": "import os\nfor _ in range(200):\n    os.write(1, b'x' * 1000000)\n    os.write(2, b'x' * 1000000)\n"
    },
    "the tests are read": {
        "larder/__init__.py": "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('check', '/tests/check.py')\n"
        "check = importlib.util.module_from_spec(spec); spec.loader.exec_module(check)\n"
        "class Larder(check.Model):\n    pass\n"
    },
    "a planted reward": {
        "larder/__init__.py": "import os\nfor name in ('/logs/verifier/reward.txt', '/tests/check.py', '/tests/test.sh'):\n"
        "    try:\n        open(name, 'w').write('1')\n    except OSError:\n        pass\n"
    },
    "memory without end": {"larder/__init__.py": "held = []\nwhile True:\n    held.append(bytearray(1 << 24))\n"},
    "a module of the grader's": {
        "json.py": "def dump(*a): pass\n",
        "random.py": "",
        "contextlib.py": "raise SystemExit(0)\n",
    },
}
