"""Random words in random places, against a plain reading of the rules."""

WORDS = [
    "a",
    "b c",
    " lead",
    "trail ",
    "*",
    "?",
    "x=y=z",
    "=",
    "a\\nb",
    "$HOME",
    "`id`",
    "'q'",
    '"',
    "é",
    "-",
    "a  b",
    "[a-z]",
    "~",
]
VALUES = [*WORDS, "", "-n", "--tag", "--", "-a=1", "-e"]
PLAIN = ["web", "db1", "file.txt", "v2"]


def case_of(r, odd):
    """Words, and the plan that they mean."""
    words, values = (WORDS, VALUES) if odd else (PLAIN, PLAIN)
    tag, envs, names, dry, given = None, [], [], False, []
    for _ in range(r.randrange(7)):
        kind = r.randrange(5)
        value = r.choice(values)
        if kind == 0:
            tag = value
            given.append(r.choice((["-t", value], ["--tag", value], [f"--tag={value}"])))
        elif kind == 1:
            value = f"N{r.randrange(100)}={value}"
            envs.append(value)
            given.append(r.choice((["-e", value], ["--env", value], [f"--env={value}"])))
        elif kind == 2:
            dry = True
            given.append([r.choice(("-n", "--dry-run"))])
        else:
            names.append(r.choice([word for word in words if word != "-"]))
            given.append([names[-1]])
    given = [word for group in given for word in group]
    if odd and r.random() < 0.5:
        behind = [r.choice(["-x", "--tag", "-n", "--", *words]) for _ in range(r.randrange(3))]
        names += behind
        given += ["--", *behind]
    if not names:
        return given, None
    lines = [f"target {names[0]}"]
    lines += [f"tag {tag}"] * (tag is not None)
    lines += [f"env {one}" for one in envs] + [f"file {one}" for one in names[1:]] + ["dry run"] * dry
    return given, "".join(f"{line}\n" for line in lines)


def check(g):
    r = g.random
    script = ["bash", f"{g.workspace}/deploy.sh"]
    fixed = [
        (["--env=OPTIONS=-a=1", "prod"], "target prod\nenv OPTIONS=-a=1\n"),
        (["prod", "release notes.txt", "*"], "target prod\nfile release notes.txt\nfile *\n"),
        (["--tag", "", "prod"], "target prod\ntag \n"),
        (["--tag=a=b", "prod", "-n"], "target prod\ntag a=b\ndry run\n"),
        (["--tag=a", "-t", "", "prod", "", "x"], "target prod\ntag \nfile \nfile x\n"),
        (["--", "-odd", "--", "-n"], "target -odd\nfile --\nfile -n\n"),
        (["-t", "--", "prod", "-e", "A="], "target prod\ntag --\nenv A=\n"),
        (["prod", "-e", "A=-n", "--env", "B=-e"], "target prod\nenv A=-n\nenv B=-e\n"),
        (["-n", "--", "-n"], "target -n\ndry run\n"),
        (["--tag", "-e", "prod", "-e", "E=a  b "], "target prod\ntag -e\nenv E=a  b \n"),
    ]
    for bad in (
        ["--what", "x"],
        ["x", "-t"],
        ["x", "--env"],
        ["x", "-e", "novalue"],
        ["x", "-e", "=v"],
        [],
        ["-n"],
        ["x", "--env="],
        ["-nt", "x"],
        ["x", "--tags=1"],
    ):
        fixed.append((bad, None))
    for number in range(24):
        fixed.append(case_of(r, number % 3 > 0))
    for words, wanted in fixed:
        g.case(f"{words}", [*script, *words], out=wanted or "", code=0 if wanted is not None else 2)
    g.settle()
