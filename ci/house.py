"""Measure the layout of the code: print each figure beside its target, and fail where a reached target is lost.

python ci/house.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vla_finetuning"

# Figure: the most that it may be, and whether that is reached: then more is an error, else "not yet".
TARGETS = {
    "lines of the library": (31_000, False),
    "lines of diagnostics and benchmarks": (5_000, True),
    "lines of tests": (30_000, False),
    "lines of train in vla.py": (60, True),
    "names imported by vla.py": (40, True),
    "flags of vla.py": (115, True),
    "floors of imports": (9, True),
    "floors of imports in data/": (6, True),
    "floors of imports in policies/": (8, True),
    "packages in a circle": (0, True),
    "% of docstrings that begin without a verb": (3, True),
    "% of names that say nothing": (0.5, True),
    "% of names in tests that say nothing": (3, True),
    "% of tests named by riddles": (1, True),
    "branches on a bucket": (0, False),
    "branches on robots or none": (0, False),
}
VERBLESS = re.compile(r"(What|Whether|Of|Where|Those|How|Which|Who|As|All|So|Until)\b")
EMPTY_NAME = re.compile(
    r"(found|own|given|asked|left|there|here|one|whole|said|told|of|others|wanted|each|kept|drawn|known|kind|which|how"
    r"|what|where|beside|taken|made|held|shown|came|begun|of_\w*)$"
)

# Words in the name of a test that leave its subject or its effect to be guessed.
RIDDLE = re.compile(
    r"test_(\w+_)?(told|said|kept|dealt|asked|found|made|there|what|whose|which|who|goes|comes|are_left|begun|taken|seen"
    r"|given|drawn|whole)(_|$)"
)

Graph = Mapping[str, Iterable[str]]


def modules(root: Path) -> dict[str, Path]:
    """Return the project's Python files by module name, without the tests."""
    folders = (PACKAGE, "diagnostics", "benchmarks", "ci")
    paths = [*root.glob("*.py"), *(path for folder in folders for path in (root / folder).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    return {name: path for path, name in names.items()}


def imports(root: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (module, line, imported module) of every import, also inside functions and under TYPE_CHECKING."""
    known = modules(root)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: imports are written out"
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                if target not in known and isinstance(node, ast.ImportFrom):
                    target = target.rpartition(".")[0]
                if target != name and (target in known or target.partition(".")[0] == "tests"):
                    yield name, node.lineno, target


def reachable(graph: Graph) -> dict[str, set[str]]:
    """Return the nodes that each node leads to, itself among them where it is in a circle."""
    reach = {node: set(targets) for node, targets in graph.items()}
    changed = True
    while changed:
        changed = False
        for targets in reach.values():
            more = set().union(*(reach.get(target, set()) for target in targets)) - targets
            targets |= more
            changed |= bool(more)
    return reach


def floors(graph: Graph) -> int:
    """Count the nodes of the longest chain; imports within a circle do not count."""
    reach = reachable(graph)

    @cache
    def depth(node: str) -> int:
        return 1 + max((depth(t) for t in graph.get(node, ()) if node not in reach.get(t, ())), default=0)

    return max(map(depth, graph), default=0)


def _package(module: str) -> str:
    """Return the folder of a module, or the module itself where it is in none."""
    return ".".join(module.split(".")[: 2 if module.startswith(f"{PACKAGE}.") else 1])


def _measure_imports(root: Path) -> dict[str, float]:
    by_module: dict[str, set[str]] = {name: set() for name in modules(root)}
    by_package: dict[str, set[str]] = {}
    for module, _, target in imports(root):
        by_module[module].add(target)
    for module, targets in by_module.items():
        packages = {_package(target) for target in targets if not target.startswith("tests")}
        by_package.setdefault(_package(module), set()).update(packages - {_package(module)})

    def within(folder: str) -> Graph:
        names = {name for name in by_module if name.startswith(f"{PACKAGE}.{folder}.")}
        return {name: by_module[name] & names for name in names}

    return {
        "floors of imports": floors(by_package),
        "floors of imports in data/": floors(within("data")),
        "floors of imports in policies/": floors(within("policies")),
        "packages in a circle": sum(node in targets for node, targets in reachable(by_package).items()),
    }


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the operands of a condition's `and`, `or`, `not`, `is None` and `is not None`."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand)
    elif isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        yield test.left
    else:
        yield test


def _bucket_branches(tree: ast.AST) -> int:
    """Count conditions that ask the mirror whether a path is in a bucket, at once or by a name for its answer."""

    def asks(node: ast.AST) -> bool:
        return any(isinstance(call, ast.Call) and ast.unparse(call.func) == "mirror_of" for call in ast.walk(node))

    nodes = list(ast.walk(tree))
    answers = {ast.unparse(node.targets[0]) for node in nodes if isinstance(node, ast.Assign) and asks(node.value)}
    tests = [node.test for node in nodes if isinstance(node, (ast.If, ast.IfExp))]
    return sum(asks(test) or any(ast.unparse(o) in answers for o in _operands(test)) for test in tests)


def _percent(pattern: re.Pattern[str], texts: list[str]) -> float:
    return 100 * sum(bool(pattern.match(text)) for text in texts) / max(len(texts), 1)


def _nodes(texts: Iterable[str]) -> list[ast.AST]:
    return [node for text in texts for node in ast.walk(ast.parse(text))]


def _variables(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names of arguments and of variables, once for each assignment."""
    stored = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return [*(node.arg for node in nodes if isinstance(node, ast.arg)), *stored]


def _functions(nodes: Iterable[ast.AST]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _measure_words(library: Sequence[ast.AST], tests: Sequence[ast.AST]) -> dict[str, float]:
    docstrings = [text.lstrip("`") for node in _functions(library) if (text := ast.get_docstring(node))]
    conditions = [node.test for node in library if isinstance(node, (ast.If, ast.IfExp))]
    named = [{getattr(o, key, "") for o in _operands(test) for key in ("id", "attr")} for test in conditions]
    tested = [node.name for node in _functions(tests) if node.name.startswith("test_")]
    return {
        "% of docstrings that begin without a verb": _percent(VERBLESS, docstrings),
        "% of names that say nothing": _percent(EMPTY_NAME, _variables(library)),
        "% of names in tests that say nothing": _percent(EMPTY_NAME, _variables(tests)),
        "% of tests named by riddles": _percent(RIDDLE, tested),
        "branches on robots or none": sum("robots" in names for names in named),
    }


def measure(root: Path) -> dict[str, float]:
    """Return each figure of `TARGETS` for the project in a folder."""
    paths = {name: path for name, path in modules(root).items() if _package(name) != "ci"}
    tools = {name for name in paths if _package(name) in ("diagnostics", "benchmarks")}
    texts = {name: path.read_text() for name, path in paths.items()}
    library = [text for name, text in texts.items() if name not in tools]
    tests = [path.read_text() for path in (root / "tests").rglob("*.py")]
    program = ast.parse(texts["vla"])
    trains = [node for node in program.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    imported = [node for node in ast.walk(program) if isinstance(node, (ast.Import, ast.ImportFrom))]
    (flags,) = re.findall(r"^## python vla\.py$.*?(?=^## |\Z)", (root / "docs/flags.md").read_text(), re.M | re.S)
    figures = {
        "lines of the library": sum(text.count("\n") for text in library),
        "lines of diagnostics and benchmarks": sum(texts[name].count("\n") for name in tools),
        "lines of tests": sum(text.count("\n") for text in tests),
        "lines of train in vla.py": sum((node.end_lineno or 0) - node.lineno + 1 for node in trains),
        "names imported by vla.py": sum(len(node.names) for node in imported),
        "flags of vla.py": len(set(re.findall(r"^\| `(--[\w.]+)`", flags, re.M))),
        **_measure_imports(root),
        **_measure_words(_nodes(library), _nodes(tests)),
        "branches on a bucket": sum(
            _bucket_branches(ast.parse(text)) for name, text in texts.items() if not name.endswith(".mirror")
        ),
    }
    return {name: figures[name] for name in TARGETS}


def main(root: Path = ROOT) -> int:
    is_lost = False
    for name, figure in measure(root).items():
        most, is_reached = TARGETS[name]
        if figure > most:
            verdict = "LOST: it was reached" if is_reached else "not yet"
        else:
            verdict = "" if is_reached else "reached: say so in TARGETS"
        is_lost |= is_reached and figure > most
        print(f"{name:42} {round(figure, 2):>8g}  at most {most:<6g} {verdict}".rstrip())
    return int(is_lost)


if __name__ == "__main__":
    sys.exit(main())
