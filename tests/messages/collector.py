"""Collect all messages that users see from the source of `rookery`, without importing it.

`python -m tests.messages.collector` writes the catalogue, `tests/messages/catalogue.txt`. Review it like prose.

The collector reads string literals of these kinds:

- error: the message of a constructed exception, of `self.fail` in option types and of `print_error`
- sentence: a finding that is printed together with others, such as the problems of a sandbox specification
- output: text that a command prints
- event: the `detail` or `message` of an event or an outcome, and the text of a log message
- help: help texts of commands and options
- doctor: what a check of `rookery doctor` found
- fix: what a check of `rookery doctor` suggests
- cause: the explanation of a failure cause
- advice: the next step for a failure cause

A part that is known only at run time is written as `{expression}`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "rookery"
CATALOGUE = Path(__file__).with_name("catalogue.txt")
COMMAND = "python -m tests.messages.collector"
SKIPPED = ("environments/swe/repairs/data/",)
"""Files of the built-in tasks, which are not part of the program."""
ERRORS = ("Error", "Warning", "Refusal", "Exit", "Stopped", "fail", "print_error")
PRINTED = {"echo", "write_line", "say", "note", "secho"}
LOGGED = {"warning", "error", "exception", "info", "debug"}
DETAILS = {"detail", "message", "problem", "reason"}


class Message(NamedTuple):
    """One message, with the file that contains it."""

    file: str
    kind: str
    text: str


class _Module(ast.NodeVisitor):
    """Collects the messages of one file."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file = file
        self.messages: list[Message] = []
        self.constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        self.visit(tree)

    def add(self, kind: str, node: ast.expr | None) -> None:
        """Add the texts of an expression; conditional expressions have several."""
        if isinstance(node, ast.IfExp):
            self.add(kind, node.body)
            self.add(kind, node.orelse)
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "style":
            self.add(kind, node.args[0])
            return
        text = self.render(node) if node is not None and _is_text(self.resolve(node)) else ""
        if re.search(r"[A-Za-z]{2}.* ", re.sub(r"\{[^}]*\}", "", text)):
            self.messages.append(Message(self.file, kind, " ".join(text.split())))

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return the value of a module constant, or the expression itself."""
        return self.constants.get(node.id, node) if isinstance(node, ast.Name) else node

    def render(self, node: ast.expr) -> str:
        """Return the text of a string expression, with `{expression}` for parts known only at run time."""
        node = self.resolve(node)
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=values):
                return "".join(self.render(value) for value in values)
            case ast.FormattedValue(value=value):
                constant = self.resolve(value)
                return self.render(constant) if _is_text(constant) else f"{{{_shorten(ast.unparse(value))}}}"
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.render(left) + self.render(right)
        return f"{{{_shorten(ast.unparse(node))}}}"

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        texts = [arg for arg in node.args if _is_text(self.resolve(arg)) or isinstance(arg, ast.IfExp)]
        if name.endswith(("Error", "Warning", "Refusal", "Exit")) or name in (
            "fail",
            "print_error",
            "Stopped",
            "Problem",
        ):
            for arg in (*texts, keywords.get("message"), keywords.get("detail")):
                self.add("error", arg)
        elif name == "Cause":
            for kind, arg in zip(("code", "fault", "cause", "advice"), node.args, strict=False):
                if kind in ("cause", "advice"):
                    self.add(kind, arg)
        elif name == "MachineCheck":
            for kind, arg in zip(("doctor", "fix"), node.args[2:], strict=False):
                self.add(kind, arg)
            self.add("doctor", keywords.get("found"))
            self.add("fix", keywords.get("fix"))
        elif name in PRINTED:
            for arg in texts:
                self.add("output", arg)
        elif (
            name == "append"
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value).endswith("problems")
        ):
            for arg in texts:
                self.add("sentence", arg)
        elif (
            name in LOGGED
            and isinstance(node.func, ast.Attribute)
            and "log" in ast.unparse(node.func.value).lower()
        ):
            for arg in texts:
                self.add("event", arg)
        else:
            for word in DETAILS & set(keywords):
                self.add("event", keywords[word])
        for word in ("help", "short_help"):
            self.add("help", keywords.get(word))
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in DETAILS:
                self.add("event", value)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        commands = [ast.unparse(decorator) for decorator in node.decorator_list]
        documented = ast.get_docstring(node)
        if documented and any(re.match(r"\w+\.(command|group)\(", text) for text in commands):
            self.messages.append(Message(self.file, "help", " ".join(documented.split())))
        self.generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _shorten(expression: str) -> str:
    return expression if len(expression) <= 40 else f"{expression[:39]}…"


def collect() -> Iterator[Message]:
    """Yield the messages of all files, in the order of files and lines."""
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        if not file.startswith(SKIPPED):
            yield from _Module(file, ast.parse(path.read_text(encoding="utf-8"))).messages


def format_catalogue() -> str:
    """Return the catalogue: the messages under the name of their file, each once."""
    files: dict[str, dict[str, None]] = {}
    for message in collect():
        files.setdefault(message.file, {})[f"{message.kind}: {message.text}"] = None
    head = f"User-facing messages of Rookery, collected by `{COMMAND}`. Do not edit this file.\n"
    return head + "".join(
        f"\n## {file}\n" + "".join(f"{line}\n" for line in lines) for file, lines in files.items()
    )


if __name__ == "__main__":
    CATALOGUE.write_text(format_catalogue(), encoding="utf-8")
