"""`make mutants`: it changes behaviour only, in memory, and tests import the mutant."""

import subprocess
import sys

import pytest

from ci import mutants

SOURCE = '''"""Add 1 or 2."""

def limited(x: "int | None", most=3, text="1 < 2") -> int:
    """At most 1."""
    if x is None or not text:
        raise ValueError(f"{x + 1} < 2")
    return min(x, most), f"é{x + most}"
'''


def test_mutants_change_behaviour_only():
    mutated = mutants.mutants(SOURCE)
    assert {(mutant.line, mutant.before, mutant.after) for mutant in mutated} == {
        (3, "3", "4"),
        (3, "3", "2"),
        (5, "x is None or not text", "not (x is None or not text)"),
        (5, "x is None or not text", "x is None and (not text)"),
        (5, "x is None", "x is not None"),
        (5, "not text", "text"),
        (7, "return (min(x, most), f'é{x + most}')", "return (f'é{x + most}', min(x, most))"),
        (7, "min", "max"),
        (7, "x + most", "x - most"),
    }
    (text,) = [mutant.text for mutant in mutated if mutant.after == "x - most"]
    assert text == SOURCE.replace("é{x + most}", "é{(x - most)}")


@pytest.mark.parametrize("file", mutants.TESTS)
def test_every_mutated_file_has_useful_mutants(file):
    assert mutants.useful_mutants(file, (mutants.ROOT / file).read_text())


@pytest.mark.gate
def test_mutant_is_imported_from_memory(tmp_path):
    (tmp_path / "small.py").write_text("LIMIT = 3\n")
    (tmp_path / "test_small.py").write_text("def test_limit():\n    import small\n    assert small.LIMIT == 3\n")
    program = (
        f"import sys; sys.path.insert(0, {str(mutants.ROOT)!r}); from pathlib import Path; from ci import mutants\n"
        f"mutants.ROOT, mutants.TESTS = Path({str(tmp_path)!r}), {{'small.py': ['test_small.py', '-c', '/dev/null']}}\n"
        "mutants.OPTIONS = []\n"
        "print([mutants.passes('fork', 60, 'small.py', text, 60) for text in ('LIMIT = 3', 'LIMIT = 4')])\n"
        "print(mutants.passes('fork', 2.0, 'small.py', 'import time; time.sleep(60)', 60))\n"
        "print(mutants.passes('fork', 60, 'small.py', 'while True: pass', 1))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["[True, False]", "False", "False"]
    assert (tmp_path / "small.py").read_text() == "LIMIT = 3\n"
