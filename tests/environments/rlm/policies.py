"""Reference policies: cells that solve the built-in tasks, by reading the question and the whole context."""

PYTHON = {
    "needle": """<code>import re
vault = "{vault}"
parts = dict(re.findall(rf"part (\\d) of the code of vault {{vault}} is (\\d+)", context))
answer("".join(parts[str(at)] for at in range(1, 6)))""",
    "aggregate": """<code>import re
answer(sum(map(int, re.findall(r"\\| {region} \\| {item} \\| (\\d+) units \\| refunded", context))))""",
    "join": """<code>import re
def pairs(folder, pattern):
    return dict(pair for path in (context / folder).iterdir() for pair in re.findall(pattern, path.read_text()))
badges = pairs("badges", r"badge (\\w+) opens room (\\w+)")
rooms = pairs("rooms", r"room (\\w+) is on floor (\\d+)")
people = pairs("people", r"person (\\w+) is in team {team} and has badge (\\w+)")
answer(sum(rooms[badges[badge]] == "{floor}" for badge in people.values()))""",
}
BASH = {
    "needle": """<code>answer $(for at in 1 2 3 4 5; do
  sed -n "s/.*part $at of the code of vault {vault} is \\([0-9]*\\).*/\\1/p" "$CONTEXT"; done | tr -d '\\n')""",
    "aggregate": """<code>answer $(grep -F '| {region} | {item} |' "$CONTEXT" | grep refunded |
  awk -F'[|]' '{{ total += $4 }} END {{ print total }}')""",
    "join": """<code>cd "$CONTEXT"
answer $(awk '/^room/ {{ floor[$2] = $6; next }} /^badge/ {{ if (floor[$5] == "{floor}") good[$2] = 1; next }}
  $6 == "{team}" && ($10 in good) {{ n++ }} $6 == "{team}" && ($9 in good) {{ n++ }} END {{ print n }}' \\
  rooms/*.txt badges/*.txt people/*.txt)""",
}


def solve(kind: str, question: str, *, repl: str = "python") -> str:
    """Return a cell that solves a task."""
    words = question.replace("?", "").replace(",", "").replace(".", "").split()

    def after(*names: str) -> str:
        index = next(index for index in range(len(words)) if tuple(words[index : index + len(names)]) == names)
        return words[index + len(names)]

    values = {
        "needle": lambda: {"vault": after("of", "vault")},
        "aggregate": lambda: {"item": after("units", "of"), "region": after("the", "region")},
        "join": lambda: {"team": after("of", "team"), "floor": after("on", "floor")},
    }[kind]()
    return (PYTHON if repl == "python" else BASH)[kind].format(**values)
