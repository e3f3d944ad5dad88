"""Rules of docs/style.md that no other tool checks, each with the file and line that breaks it.

ruff has the rest (docstrings, sorted ``__all__``, line length), mypy the types, import-linter which
way imports go, ``make proto-check`` the generated code. An exception is a line in ``ALLOWED``.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping

import pytest
from source import DEPLOY, ROOT, SOURCE, TESTS, Function, Module

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600
TEST_LINES_MAX = 800
POSITIONAL_MAX = 6
NESTING_MAX = 4

BANNED = re.compile(r"manager|handler|helpers?|utils?|data|info|process|misc|impl|tmp|cfg|idx|req")
NOT_IN_CORE = re.compile(
    r"asyncio|datetime|logging|os|random|secrets|socket|threading|time|torch|uuid"
)
ENGINE_ONLY = re.compile(r"accelerate|safetensors|torch|transformers")
ENGINES = ("kvtier/engine/", "kvtier/connectors/kit/", "kvtier/connectors/vllm")
MUTABLE_CALLS = re.compile(r"bytearray|defaultdict|deque|dict|list|set")
READ_ONLY = ("Mapping", "Sequence", "Set", "Final")

ALLOWED: Mapping[tuple[str, str], str] = {
    ("banned_names", "kvtier/api/http/server.py"): "asyncio calls data_received()",
    ("banned_names", "kvtier/observe/log.py"): "a log has an info(), as everywhere",
    ("banned_names", "kvtier/connectors/vllm/connector.py"): "vLLM passes by its own names",
    ("documented", "deploy/source/vllm.py"): "the connector's rows say it in their text",
}
"""(rule, file) -> the reason for the exception."""

Found = Iterator[tuple[int, str]]


def function_length(module: Module) -> Found:
    for node in module.functions:
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES_MAX:
            yield node.lineno, f"{node.name} has {length} lines, the most is {FUNCTION_LINES_MAX}"


def module_length(module: Module) -> Found:
    most = TEST_LINES_MAX if module.name.startswith("tests/") else MODULE_LINES_MAX
    if len(module.lines) > most:
        yield len(module.lines), f"the most is {most} lines"


def parameters(module: Module) -> Found:
    for node in module.functions:
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        if len([name for name in names if name not in {"self", "cls"}]) > POSITIONAL_MAX:
            yield node.lineno, f"{node.name} has more than {POSITIONAL_MAX} positional parameters"


def _depth(node: ast.AST) -> int:
    """Return the deepest nesting of statements below ``node``; an elif is no deeper than its if."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and [child] == node.orelse
        nests = isinstance(child, ast.Match) or (
            isinstance(child, ast.stmt) and hasattr(child, "body")
        )
        deepest = max(deepest, _depth(child) + (nests and not is_elif))
    return deepest


def nesting(module: Module) -> Found:
    for node in module.functions:
        if (depth := _depth(node)) > NESTING_MAX:
            yield node.lineno, f"{node.name} nests {depth} deep, the most is {NESTING_MAX}"


def banned_names(module: Module) -> Found:
    names = [(1, module.path.stem)]
    for node in ast.walk(module.tree):
        if isinstance(node, (*Function.__args__, ast.ClassDef)):
            names.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
    for line, name in names:
        words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
        if any(BANNED.fullmatch(word.lower()) for word in words):
            yield line, f"{name} has a word that says nothing"


def mutable_state(module: Module) -> Found:
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for name, _, node in module.assigned():
        typed = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        value = node.value
        called = getattr(getattr(value, "func", None), "id", "")
        if name == "__all__" or typed.partition("[")[0] in READ_ONLY:
            continue
        if isinstance(value, literals) or MUTABLE_CALLS.fullmatch(called):
            yield node.lineno, f"{name} can change; annotate it as Mapping or Sequence, or move it"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def bare_ignores(module: Module) -> Found:
    for number, line in enumerate(module.lines, 1):
        if re.search(r"#\s*noqa\b(?!: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)* +\S)", line):
            yield number, "noqa takes a code and a reason"
        if re.search(r"#\s*type: *ignore(?!\[[\w, -]+\] +\S)", line):
            yield number, "an ignored type takes a code and a reason"


def unfinished(module: Module) -> Found:
    words = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
    for number, line in enumerate(module.lines, 1):
        if words.search(line) and not re.search(r"#\d+", line):
            yield number, "unfinished, and without the number of an issue"


def printing(module: Module) -> Found:
    for node in ast.walk(module.tree):
        called = getattr(getattr(node, "func", None), "id", "")
        if called == "print" and not module.name.startswith("kvtier/cli/"):
            yield node.lineno, "only the command line prints"


def _imports(module: Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module.partition(".")[0]


def imports(module: Module) -> Found:
    for line, name in _imports(module):
        if module.name.startswith("kvtier/core/") and NOT_IN_CORE.fullmatch(name):
            yield line, f"core is pure and imports no {name}"
        if ENGINE_ONLY.fullmatch(name) and not module.name.startswith(ENGINES):
            yield line, f"only the engine imports {name}"


def documented(module: Module) -> Found:
    """Constants and aliases; a comment above, a docstring below, or a sentence in the value."""
    public = module.exported
    is_limits = module.name == "kvtier/core/limits.py"
    for name, place, node in module.assigned():
        after = module.tree.body[place + 1 : place + 2]
        below = after and isinstance(getattr(after[0], "value", None), ast.Constant)
        above = module.lines[node.lineno - 2].startswith("#")
        inside = any(isinstance(c, ast.Constant) and " " in str(c.value) for c in ast.walk(node))
        is_union = isinstance(node.value, ast.BinOp)  # of names that say it themselves
        if name in public and not (below or above or is_union or (inside and not is_limits)):
            yield node.lineno, f"{name} is public and nothing says what it is for"


def exported(module: Module) -> Found:
    defined = {
        name: node.lineno
        for name, _, node in module.assigned()
        if getattr(getattr(node.value, "func", None), "id", "") != "TypeVar"
    }
    for node in module.tree.body:
        if isinstance(node, (*Function.__args__, ast.ClassDef)):
            defined[node.name] = node.lineno
    for name, line in defined.items():
        if not name.startswith("_") and name not in module.exported:
            yield line, f"{name} is public and not in __all__"


def sleeping(module: Module) -> Found:
    for number, line in enumerate(module.lines, 1):
        if re.search(r"\btime\.sleep\(|\basyncio\.sleep\([^0)]", line):
            yield number, "a test waits for an event or moves a fake clock; it does not sleep"


Rule = Callable[[Module], Found]
EVERYWHERE: list[Rule] = [module_length, bare_ignores, unfinished]
IN_SOURCE: list[Rule] = [function_length, parameters, nesting, banned_names, mutable_state]
IN_SOURCE += [printing, imports, documented, exported]
CASES = [(rule, SOURCE + DEPLOY + TESTS) for rule in EVERYWHERE]
CASES += [(rule, SOURCE + DEPLOY) for rule in IN_SOURCE]
CASES += [(sleeping, [module for module in TESTS if module.path.name != "test_tidy.py"])]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "where"), CASES, ids=[rule.__name__ for rule, _ in CASES])
def test_tidy(rule: Rule, where: list[Module]) -> None:
    assert where, "there is something to look at"
    found = [
        f"{module.name}:{line}: {what}"
        for module in where
        if (rule.__name__, module.name) not in ALLOWED
        for line, what in rule(module)
    ]
    assert not found, f"{rule.__name__}:\n" + "\n".join(found)


def test_public_classes_have_unique_names() -> None:
    where: dict[str, list[str]] = {}
    for module in SOURCE:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(f"{module.name}:{node.lineno}")
    assert not {name: places for name, places in where.items() if len(places) > 1}


def test_no_exception_is_left_over() -> None:
    rules = {rule.__name__: rule for rule, _ in CASES}
    for (rule, name), reason in ALLOWED.items():
        assert reason
        assert any(rules[rule](Module(ROOT / name))), f"{name} no longer needs {rule}"
