"""The modules of this repository, as text and as syntax trees."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    path: Path

    @cached_property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @property
    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @cached_property
    def exported(self) -> frozenset[str]:
        """The names in ``__all__``; of the limits, every constant."""
        found = [node.value for name, _, node in self.assigned() if name == "__all__"]
        if self.name == "kvtier/core/limits.py":
            return frozenset(name for name, _, _ in self.assigned())
        return frozenset(ast.literal_eval(found[0])) if found else frozenset()

    def assigned(self) -> Iterator[tuple[str, int, ast.Assign | ast.AnnAssign]]:
        """Yield (name, place in the body, statement) of each module-level name."""
        for place, node in enumerate(self.tree.body):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            yield from ((t.id, place, node) for t in targets if isinstance(t, ast.Name))


def modules(folder: str) -> list[Module]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [Module(path) for path in paths if "kvtier/v1" not in path.as_posix()]


SOURCE = modules("kvtier")
DEPLOY = modules("deploy")
TESTS = modules("tests")
