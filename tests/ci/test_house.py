"""The measures of the layout, on a small made-up project whose figures are counted by hand."""

import pytest

from ci import house

FILES = {
    "vla.py": '''import a, b
from vla_finetuning.run import job


def train(run):
    """Train."""
    from vla_finetuning.policies import first

    return first
''',
    "vla_finetuning/run/job.py": '''from vla_finetuning.data import plan


def what(given, of_rows):
    """What is there."""
    names = [found for found in given]
    if not run.robots and given or robots is None:
        return 1 if ready or mirror_of(path) else 2
    located = mirror_of(path)
    if ready and located is not None:
        assert located[0]
    return isinstance(path, str) if robots[0] else names
''',
    "vla_finetuning/data/plan.py": "from vla_finetuning.data import rows\n",
    "vla_finetuning/data/rows.py": "def f():\n    from vla_finetuning.data import frames\n",
    "vla_finetuning/data/frames.py": '"""Whose."""\n',
    "vla_finetuning/policies/first.py": "",
    "benchmarks/step.py": "import vla\nfrom tests import tiny\n",
    "ci/check.py": "kept = 1\n",
    "tests/deep/test_step.py": "def test_what_is_told(found):\n    loss = 1\n\n",
    "docs/flags.md": "## python vla.py\n| `--lr` |\n| `--train.mode` |\n| `--lr` |\n## python grpo.py\n| `--kl` |\n",
}
FIGURES = {
    "lines of the library": 9 + 12 + 1 + 2 + 1,
    "lines of diagnostics and benchmarks": 2,
    "lines of tests": 3,
    "lines of train in vla.py": 5,
    "names imported by vla.py": 4,
    "flags of vla.py": 2,
    "floors of imports": 4,  # benchmarks, vla, run, data
    "floors of imports in data/": 3,
    "floors of imports in policies/": 1,
    "packages in a circle": 0,
    "% of docstrings that begin without a verb": 50,
    "% of names that say nothing": 100 * 3 / 6,  # given, of_rows and found, of those and run, names and located
    "% of names in tests that say nothing": 50,
    "% of tests named by riddles": 100,
    "branches on a bucket": 2,
    "branches on robots or none": 1,
}


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_house_figures_equal_hand_counts(project):
    assert house.measure(project) == pytest.approx(FIGURES) and FIGURES.keys() == house.TARGETS.keys()


def test_house_counts_packages_in_import_cycles(project):
    (project / "vla_finetuning/data/rows.py").write_text("import vla_finetuning.run.job\n")
    figures = house.measure(project)
    assert figures["packages in a circle"] == 2  # run and data
    assert figures["floors of imports"] == 3


def test_house_fails_only_on_lost_targets(project, monkeypatch, capsys):
    targets = dict.fromkeys(house.TARGETS, (1_000, True))
    monkeypatch.setattr(house, "TARGETS", targets)
    assert house.main(project) == 0
    targets["lines of tests"], targets["flags of vla.py"] = (2, False), (2, False)
    assert house.main(project) == 0
    lines = {line[:42].strip(): line[42:].split(maxsplit=4)[4:] for line in capsys.readouterr().out.splitlines()}
    assert lines["lines of tests"] == ["not yet"] and lines["flags of vla.py"] == ["reached: say so in TARGETS"]
    targets["lines of tests"] = (2, True)
    assert house.main(project) == 1 and "LOST" in capsys.readouterr().out
