"""README.md, CONTRIBUTING.md and docs/: what they link, name and show exists."""

import functools
import re
from pathlib import Path

import pytest

from vla_finetuning.options.command_line import PROGRAMS, VLA, lerobot_groups

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "README.ipynb", "configs/README.md")),
        *(ROOT / "docs").glob("*.md"),
    )
}
# The first column of its tables names what is gone.
PAGES["docs/changes.md"] = re.sub(r"^\|[^|]*\|", "", PAGES["docs/changes.md"], flags=re.MULTILINE)
README = PAGES["README.md"]
README_LIMIT_WORDS, IMAGES_LIMIT_BYTES = 1000, 150_000
# Of LeRobot's lerobot-rollout and robot_client, which docs/robot.md and docs/serving.md show; tests/robot runs them.
ON_ROBOTS = {
    "aggregate_fn_name",
    "chunk_size_threshold",
    "duration",
    "fps",
    "strategy.type",
    "server_address",
    "policy_type",
    "pretrained_name_or_path",
    "actions_per_chunk",
    "policy_device",
    "task",
}


def pages(*without):
    return pytest.mark.parametrize("name", [name for name in PAGES if name not in without])


def test_readme_is_short_up_to_on_a_cluster():
    start = README.index("\n## On a cluster")
    assert len(README[: README.index("\n## ", start + 1)].split()) <= README_LIMIT_WORDS


def test_readme_shows_the_recorded_demo_result():
    (block,) = re.findall(r"```\n(Success in the loop.*?\n)```", README, flags=re.DOTALL)
    (linked,) = re.findall(r"\((benchmarks/results/demo-[\w-]+\.txt)\)", README)
    assert block in (ROOT / linked).read_text() and len(block.splitlines()) == 5


def test_images_are_small_and_shown():
    shown = set(re.findall(r'src="([^"]+)"', README))
    files = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in (ROOT / "docs" / "images").iterdir()}
    assert shown == files.keys() and sum(files.values()) < IMAGES_LIMIT_BYTES


def test_readme_links_every_page():
    assert {name for name in PAGES if name.startswith("docs/")} <= set(re.findall(r"\]\(([^)#]+)", README))


@pages()
def test_links_resolve(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, target


@pages()
def test_paths_and_programs_exist(name):
    text = PAGES[name]
    paths = re.findall(r"\b((?:benchmarks|configs|diagnostics|docs|tests|vla_finetuning)/[\w./-]*\w)", text)
    paths += [
        f"{module.replace('.', '/')}.py"
        for module in re.findall(r"python -m ((?!ruff|mypy|pip|lerobot)[\w.]+\w)", text)
    ]
    paths += re.findall(r"python ([\w/]+\.py)", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


@functools.cache
def known_flags():
    programs = "".join(
        path.read_text() for folder in ("benchmarks", "diagnostics") for path in (ROOT / folder).glob("*.py")
    )
    known = set(re.findall(r'(?:"--|options\.add\(")(\w+)"', programs)) | set(re.findall(r'"(\w+_json)"', programs))
    known |= set(re.findall(r"^        (\w+)=\(\d+, ", programs, flags=re.M))  # of `stages_parser`
    known |= set().union(*(program.flags for program in PROGRAMS))
    return known | {"help", "compare", "robot"}  # the last of run/push.py


@functools.cache
def defined_tests():
    """The tests of each file."""
    return {
        str(path.relative_to(ROOT)): set(re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE))
        for path in (ROOT / "tests").rglob("test_*.py")
    }


@pages("docs/lerobot_train.md")  # it names the flags of lerobot-train
def test_flags_exist(name):
    text = re.sub(r"--[\w.]+\.(\*|<)", "", PAGES[name])  # --optimizer.*: a group
    named = set(re.findall(r"(?<![\w-])--([a-z][\w.]*\w)", text))
    if name in ("docs/robot.md", "docs/serving.md"):
        named -= ON_ROBOTS | {flag for flag in named if flag.startswith(("robot.", "inference."))}
    groups = tuple(lerobot_groups(VLA.flags))
    assert {flag for flag in named - known_flags() if not flag.startswith(groups)} == set()


@pages()
def test_tests_exist(name):
    defined = defined_tests()
    for file, test in re.findall(r"((?:tests/)?[\w/]*\btest_\w+\.py)(?:::(test_\w+))?", PAGES[name]):
        assert file in defined and (not test or test in defined[file]), f"{file}::{test}"
    for test in re.findall(r"`(test_\w+)`", PAGES[name]):
        assert any(test in tests for tests in defined.values()), test


def test_contributing_describes_every_program_and_package():
    described = set(re.findall(r"^\| .*", PAGES["CONTRIBUTING.md"], flags=re.MULTILINE))
    described = set(re.findall(r"`([\w/.]+)`", "\n".join(described)))
    packages = {f"{path.parent.relative_to(ROOT)}/" for path in ROOT.glob("vla_finetuning/*/__init__.py")}
    assert described >= {path.name for path in ROOT.glob("*.py")} | packages and len(packages) >= 6
