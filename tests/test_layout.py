"""The packages of the code, and which may import which: imports run one way, and nowhere in a circle."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci import house
from ci.house import PACKAGE, modules, reachable

ROOT = Path(__file__).resolve().parents[1]

# What each unit may import of the project, besides itself. A unit is a file or a folder of files; the longest name that
# fits a module counts. Whoever adds a line here says why in docs or review: each is one more thing to hold in the head.
GROUND = {f"{PACKAGE}.{name}" for name in ("buckets", "cards", "columns", "environment", "files", "terminal")}
# All but the command line, which programs alone read.
GROUND |= {f"{PACKAGE}.options.{path.stem}" for path in (ROOT / PACKAGE / "options").glob("*.py")} - {
    f"{PACKAGE}.options.command_line"
}
DATA = {*GROUND, f"{PACKAGE}.data", "lerobot_datasource"}
LEROBOTS = {*GROUND, f"{PACKAGE}.lerobot_options"}
POLICIES = {*LEROBOTS, f"{PACKAGE}.policies", f"{PACKAGE}.data.hub", "util"}
ENVS = {*LEROBOTS, f"{PACKAGE}.envs"}
RUN = {*GROUND, f"{PACKAGE}.data.hub", f"{PACKAGE}.run"}
ROLLOUTS = {*POLICIES, *ENVS, *RUN, f"{PACKAGE}.rollouts"}
PLAN = {*DATA, *ROLLOUTS, f"{PACKAGE}.plan"}
TRAINING, EVALUATION = {*PLAN, f"{PACKAGE}.training"}, {*PLAN, f"{PACKAGE}.evaluation"}
REPORT = {*DATA, *POLICIES, *RUN, f"{PACKAGE}.report"}
SERVING = {*PLAN, f"{PACKAGE}.serving"}
# It trains on what the loop shows, so it imports both: what trains there also acts.
RL = {*TRAINING, *EVALUATION, f"{PACKAGE}.rl"}
COMMAND_LINE = f"{PACKAGE}.options.command_line"
PROGRAMS = {*TRAINING, *EVALUATION, *REPORT, COMMAND_LINE, f"{PACKAGE}.program", f"{PACKAGE}.start"}
DIAGNOSTICS = {*PROGRAMS, "vla", "diagnostics"}
MAY_IMPORT = {
    f"{PACKAGE}.buckets": set(),
    f"{PACKAGE}.cards": set(),
    f"{PACKAGE}.columns": set(),
    f"{PACKAGE}.environment": set(),
    f"{PACKAGE}.options": {f"{PACKAGE}.{name}" for name in ("buckets", "cards", "environment", "files")},
    f"{PACKAGE}.options.fields": set(),
    f"{PACKAGE}.options.command_line": {*GROUND, f"{PACKAGE}.options.command_line"},
    f"{PACKAGE}.options.lerobot_train": {f"{PACKAGE}.terminal"},
    f"{PACKAGE}.files": set(),
    f"{PACKAGE}.terminal": set(),
    f"{PACKAGE}.lerobot_options": GROUND,
    f"{PACKAGE}.data": DATA,
    "lerobot_datasource": DATA,
    "util": {f"{PACKAGE}.cards", f"{PACKAGE}.columns"},
    f"{PACKAGE}.policies": POLICIES,
    f"{PACKAGE}.envs": ENVS,
    f"{PACKAGE}.run": RUN,
    f"{PACKAGE}.rollouts": ROLLOUTS,
    f"{PACKAGE}.plan": PLAN,
    f"{PACKAGE}.training": TRAINING,
    f"{PACKAGE}.report": REPORT,
    f"{PACKAGE}.evaluation": EVALUATION,
    f"{PACKAGE}.rl": RL,
    f"{PACKAGE}.serving": SERVING,
    f"{PACKAGE}.program": {*PLAN, *REPORT, COMMAND_LINE},
    f"{PACKAGE}.start": {*PLAN, COMMAND_LINE},
    "vla": PROGRAMS,
    "evaluate": PROGRAMS,
    "record": PROGRAMS,
    "serve": {*PROGRAMS, *SERVING},
    "grpo": {*PROGRAMS, *RL, "vla"},  # the first half of its demo is a run of vla.py
    "value": {*PROGRAMS, *RL, "vla"},  # it trains as vla.py does
    "diagnostics": DIAGNOSTICS,
    "benchmarks": {*DIAGNOSTICS, *SERVING, "evaluate", "record", "value", "benchmarks", "tests"},
    "ci": {"ci"},
}
# The policy's own file is copied to robots alone; the datasource's modules must not need what only training needs.
FREE_STANDING = {f"{PACKAGE}.policies.tiny_pi05": set()}


@functools.cache
def imports(root):
    return list(house.imports(root))


def within(module, units):
    return [unit for unit in units if module == unit or module.startswith(f"{unit}.")]


def offending(root):
    """Imports that the table does not allow, as text."""
    for module, line, target in imports(root):
        unit = max(within(module, MAY_IMPORT), key=len, default=None)
        assert unit, f"{module} is in no unit of the table"
        allowed = FREE_STANDING.get(module, MAY_IMPORT[unit] | {unit})
        if not within(target, allowed):
            yield f"{modules(root)[module].relative_to(root)}:{line}: {unit} must not know {target}"


def circles(root):
    """Modules that import each other, maybe by way of others."""
    graph = {}
    for module, _, target in imports(root):
        graph.setdefault(module, set()).add(target)
    return sorted(module for module, targets in reachable(graph).items() if module in targets)


def test_imports_follow_the_layer_table():
    assert not list(offending(ROOT))


def test_no_circular_imports():
    assert not circles(ROOT)


@pytest.mark.parametrize(
    ("module", "upward", "how"),
    [
        ("environment", "data.plan", "from {} import x"),
        ("data.planted", "policies.pi05", "def f():\n    from {} import x"),
        ("plan.planted", "training.worker", "if TYPE_CHECKING:\n    import {}"),
    ],
)
def test_planted_upward_import_is_reported(tmp_path, module, upward, how):
    path, other = (tmp_path / PACKAGE / f"{name.replace('.', '/')}.py" for name in (module, upward))
    for file in (path, other):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    path.write_text(how.format(f"{PACKAGE}.{upward}") + "\n")
    (found,) = offending(tmp_path)
    assert f"{PACKAGE}.{module.partition('.')[0]} must not know {PACKAGE}.{upward}" in found and path.name in found


def test_planted_import_cycle_is_reported(tmp_path):
    folder = tmp_path / PACKAGE / "data"
    folder.mkdir(parents=True)
    for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (folder / f"{name}.py").write_text(f"def f():\n    from {PACKAGE}.data import {other}\n")
    assert circles(tmp_path) == [f"{PACKAGE}.data.{name}" for name in "abc"]


# ---- policies -------------------------------------------------------------------------------------------------------

# Types of policies, by LeRobot's folders and ours. A short one is part of other words.
TYPES = {
    path.stem.removeprefix("configuration_")
    for path in Path(find_spec("lerobot.policies").origin).parent.glob("*/configuration_*.py")
} - {"rtc"} | {"tiny_pi05"}  # real-time chunking is of many policies
TYPE_IN_NAME = re.compile("|".join(sorted(kind.replace("_", "_?") for kind in TYPES if len(kind) > 3)), re.IGNORECASE)
# Modules of LeRobot's that are of no policy alone.
OF_ALL = {f"lerobot.policies{name}" for name in ("", ".factory", ".pretrained", ".rtc")}


def naming_policies(root):
    """Where code outside of policies/ names a policy: by a module, a name, or its type; benchmarks choose by type."""
    for name, path in modules(root).items():
        if within(name, [f"{PACKAGE}.policies", "ci"]):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            found = [getattr(node, field, None) for field in ("id", "attr", "name", "module", "arg")]
            found = [value for value in found if isinstance(value, str)]
            named = any(TYPE_IN_NAME.search(value) for value in found)
            if isinstance(node, (ast.alias, ast.ImportFrom)):
                named |= any(value.startswith("lerobot.policies") and value not in OF_ALL for value in found)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= node.value in TYPES and not within(name, ["benchmarks"])
            if named:
                yield f"{path.relative_to(root)}:{node.lineno}"


def test_policy_types_are_named_in_policies_only():
    """A new family is a file there and a line of its registry."""
    assert not list(naming_policies(ROOT))


def test_planted_policy_names_are_reported(tmp_path):
    lines = [
        "action = 'acting'",
        "from lerobot.policies.act.configuration_act import ACTConfig",
        "import lerobot.policies.act",
        "from vla_finetuning.policies.families.pi05 import prompt_lengths",
        "from vla_finetuning.policies import tiny_pi05",
        "def f(loss): return isinstance(loss, family.PI05Loss)",
        "class SmolVLALoss: pass",
        "def f(config): return config.type in {'pi0', 'act'}",
    ]
    for file, last in ((f"{PACKAGE}/run/planted.py", 8), ("benchmarks/planted.py", 7)):  # which choose by type
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(lines))
        found = {place for place in naming_policies(tmp_path) if place.startswith(file)}
        assert found == {f"{file}:{line}" for line in range(2, last + 1)}


# ---- the data wing alone --------------------------------------------------------------------------------------------


def test_datasource_imports_no_training_packages():
    code = (
        "import sys; from lerobot_datasource import read_lerobot; "
        "print(*sorted({'.'.join(m.split('.')[:2]) for m in sys.modules}))"
    )
    loaded = set(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.split())
    ours = {name for name in loaded if name.startswith(f"{PACKAGE}.") or name in ("vla", "util")}
    assert ours <= {*GROUND, f"{PACKAGE}.options", f"{PACKAGE}.data"} and "ray" in loaded
    assert not loaded & {"torch", "lerobot", "transformers", "datasets", "matplotlib"}


def test_project_dependencies_match_imports_of_the_datasource():
    """The packages that the data wing imports, in the versions that are locked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {canonicalize_name(r.name): str(r.specifier) for r in map(Requirement, project["dependencies"])}
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    locked = {canonicalize_name(r.name): str(r.specifier) for r in map(Requirement, filter(None, lines))}
    assert installed.items() <= locked.items()
    distributions = {**packages_distributions(), "google": ["google-auth"]}  # a name that many packages share
    imported = set()
    units = ("lerobot_datasource", f"{PACKAGE}.data", *GROUND)
    for name, path in modules(ROOT).items():
        for node in ast.walk(ast.parse(path.read_text())) if within(name, units) else ():
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            imported |= {n.partition(".")[0] for n in names} - {PACKAGE}
    needed = {canonicalize_name(d) for name in imported for d in distributions.get(name, ())}
    # Imported where they are used: what LeRobot computes, by its own functions; the file of a mixture. google-auth
    # imports requests.
    assert needed - {"torch", "lerobot", "pyyaml"} == set(installed) - {"requests"}
