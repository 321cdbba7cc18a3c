"""Measure the tests: change a module in one small place, and see whether its own tests notice.

python ci/mutants.py [--sample 20] [--seed 0] [MODULE ...]

Each mutant is run by pytest in a process of its own, which imports the changed source from memory: no file changes.
The process is forked from one that has imported the packages already. A mutant that exceeds the time limit counts as
noticed. Exits with 1 where the tests notice less than 90 % of a module's mutants. Those that change no behaviour are in
mutants.toml, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.machinery
import importlib.util
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.9
TESTS = {
    "util.py": ["tests/test_util.py"],
    "vla_finetuning/data/plan.py": ["tests/data/test_plan.py", "-k", "not planned"],
    "vla_finetuning/data/quantiles.py": ["tests/data/test_quantiles.py"],
    "vla_finetuning/data/rows.py": ["tests/data/test_datasource.py", "tests/data/test_damaged_files.py"],
    "vla_finetuning/evaluation/intervals.py": ["tests/evaluation/test_intervals.py"],
    "vla_finetuning/rl/objectives/base.py": ["tests/rl/test_objective.py"],
    "vla_finetuning/rl/objectives/grpo.py": ["tests/rl/test_objective.py"],
    "vla_finetuning/rl/objectives/ppo.py": ["tests/rl/test_objective.py"],
    "vla_finetuning/rl/values.py": ["tests/rl/test_values.py"],
    "vla_finetuning/run/checkpoint.py": ["tests/run/test_checkpoint.py"],
    "vla_finetuning/training/stream.py": ["tests/training/test_stream.py"],
}
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not demo and not gate and not gpu and not ray"]
OPPOSITES = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or),
]  # fmt: skip
SWAPPED = {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])} | {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
NAMES = {"min": "max", "any": "all", "minimum": "maximum", "floor": "ceil", "argmin": "argmax", "zeros": "ones"}
NAMES |= {b: a for a, b in NAMES.items()}


class Mutant(NamedTuple):
    """A module's text with `before` at `line` replaced by `after`."""

    line: int
    before: str
    after: str
    text: str


def changed(node: ast.AST) -> Iterator[ast.AST | str]:
    """Return what may stand in a node's place: other nodes, or Python text."""

    def with_(**fields: object) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield with_(ops=[*ops[:at], SWAPPED[type(op)](), *ops[at + 1 :]])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPPED:
            yield with_(op=SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield f"not ({ast.unparse(test)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield from (str(value + 1), str(value - 1))
        case ast.Constant(value=float(value)):
            yield str(value + 1)
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield NAMES[name]
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in NAMES:
            yield with_(attr=NAMES[name])
        case ast.Return(value=ast.Tuple(elts=[first, second, *rest])):
            yield with_(value=ast.Tuple([second, first, *rest], ast.Load()))


def places(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below that say what the program does.

    No errors and log lines, annotations or decorators, nor constants of the module: a test would only repeat them.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            match child:
                case ast.Raise() | ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name("logger" | "_logger")))):
                    continue
                case ast.keyword(arg="strict"):
                    continue
                case ast.Assign(targets=[ast.Name(id)]) if id.isupper() and isinstance(node, ast.Module):
                    continue
                case ast.AST():
                    yield child
                    yield from places(child)


def mutants(source: str) -> list[Mutant]:
    raw = source.encode()
    begins = [0]
    for line in raw.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    result = []
    for place in places(ast.parse(source)):
        node = place.test if isinstance(place, ast.If | ast.While | ast.IfExp) else place
        for other in changed(place):
            assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None
            after = other if isinstance(other, str) else ast.unparse(other)
            inserted = after if isinstance(node, ast.stmt) else f"({after})"
            first = begins[node.lineno - 1] + node.col_offset
            last = begins[node.end_lineno - 1] + node.end_col_offset
            text = (raw[:first] + inserted.encode() + raw[last:]).decode()
            result.append(Mutant(node.lineno, ast.unparse(node), after, text))
    return result


class FromMemory(importlib.machinery.SourceFileLoader):
    """Import one module with a text that is not its file's."""

    def __init__(self, module: str, text: str):
        super().__init__(module, str(ROOT / f"{module.replace('.', '/')}.py"))
        self.text = text

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        return compile(self.text, self.path, "exec")

    def get_source(self, fullname: str) -> str:
        return self.text


class WithoutRay:
    """Leave out tests that start a cluster: its processes would import the module's file."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if not {"ray_cluster", "no_ray_cluster"} & {*item.fixturenames}]


def run_tests(file: str, text: str, limit_cpu_s: int, imported: Path | None = None) -> None:
    """In a process of its own: exit with what pytest says of a module with this text.

    `limit_cpu_s` ends endless loops, however busy the machine is. The file `imported` gets the names of the packages'
    modules that the tests import.
    """
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (limit_cpu_s, limit_cpu_s))
    if imported is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
    sys.path.insert(0, str(ROOT))
    sys.meta_path.insert(0, FromMemory(file.removesuffix(".py").replace("/", "."), text))  # type: ignore[arg-type]
    import pytest

    code = int(pytest.main([*OPTIONS, *TESTS[file]], plugins=[WithoutRay()]))
    if imported is not None:
        files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
        imported.write_text("\n".join(name for name, path in files.items() if "site-packages" in path))
    sys.stdout.flush()
    os._exit(code)


def passes(method: str, limit_s: float, *args: object) -> bool:
    """Return whether `run_tests` of these arguments is through with exit code 0 within the limit."""
    process = multiprocessing.get_context(method).Process(target=run_tests, args=args)  # type: ignore[attr-defined]
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return process.exitcode == 0


def unchanged_run(file: str, source: str) -> tuple[float, float, list[str]]:
    """Seconds that a module's tests take, those of a CPU, and what they import; in a fresh process."""
    begin, cpu_begin, imported = time.perf_counter(), _children_cpu_s(), Path(tempfile.mkstemp()[1])
    if not passes("spawn", 1800.0, file, source, 1800, imported):
        raise SystemExit(f"{file}: its tests {TESTS[file]} fail as it is; mend them first")
    return time.perf_counter() - begin, _children_cpu_s() - cpu_begin, imported.read_text().split()


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def import_before(names: list[str]) -> None:
    """Import here what every process would, with the environment that the tests set; the packages, not the project."""
    importlib.import_module("tests.conftest")
    for name in names:
        if name.partition(".")[0] in sys.modules or "." not in name:
            try:
                importlib.import_module(name)
            except ImportError:
                continue  # a package that makes a module by other means makes it again
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


def useful_mutants(file: str, source: str) -> list[Mutant]:
    """Return a module's mutants but those of mutants.toml. Raise SystemExit for an entry that is none of them."""
    equivalent = tomllib.loads((ROOT / "ci/mutants.toml").read_text())
    lines, possible = source.splitlines(), mutants(source)
    known = {(entry["line"], entry["after"]) for entry in equivalent.get(file, [])}
    if gone := known - {(lines[m.line - 1].strip(), m.after) for m in possible}:
        raise SystemExit(f"ci/mutants.toml: {file} has no such mutants any more, remove them: {sorted(gone)}")
    return [m for m in possible if (lines[m.line - 1].strip(), m.after) not in known]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="part of a file's name; all without")
    parser.add_argument("--sample", type=int, default=20, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    chosen = [file for file in TESTS if not options.modules or any(name in file for name in options.modules)]
    if not chosen:
        parser.error(f"{options.modules} name none of {list(TESTS)}")
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    weak = []
    for file in chosen:
        source = Path(file).read_text()
        useful = useful_mutants(file, source)
        drawn = random.Random(f"{options.seed} {file}").sample(useful, min(options.sample, len(useful)))
        took_s, cpu_s, names = unchanged_run(file, source)
        import_before(names)
        alive = 0
        for mutant in sorted(drawn):
            if passes("fork", 60 + 5 * took_s, file, mutant.text, 10 + int(2 * cpu_s)):
                alive += 1
                print(f"{file}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
        rate = 1 - alive / len(drawn)
        print(f"{file}: {len(drawn) - alive} of {len(drawn)} mutants noticed, {rate:.0%}", flush=True)
        weak += [file] if rate < LEAST else []
    return 1 if weak else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        code = main(sys.argv[1:])
    sys.exit(code)
