"""How far each policy type is, after some steps of the whole program, from LeRobot's own update over the same rows.

    python -m benchmarks.policies [--junitxml FILE]

Runs tests/training/test_as_lerobot.py, whose tests note the differences that they compare with their limits; or reads
what such a run has written by `--junitxml=FILE`. Results go to `benchmarks/results/policies-<cpus>-<date>.json`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from diagnostics.report import Environment
from vla_finetuning.files import write_json

TESTS = "tests/training/test_as_lerobot.py"
MEASURES = {
    "test_ten_steps_are_lerobots_own": "ten_steps",
    "test_two_workers_are_two_of_lerobots_processes": "two_workers_four_steps",
    "test_two_workers_equal_one": "two_workers_and_one_four_steps",
}


def read(file: Path) -> dict[str, dict[str, float]]:
    """{policy type: {measure: largest relative difference of a tensor}} of a run of the tests.

    Raises:
        ValueError: a test failed, or noted nothing.
    """
    found: dict[str, dict[str, float]] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        named = re.fullmatch(r"(\w+)\[(.+)\]", case.get("name") or "")
        if named is None or named[1] not in MEASURES:
            continue
        noted = [
            float(p.get("value") or "nan") for p in case.iter("property") if p.get("name") == "relative difference"
        ]
        if not noted or case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(f"{file}: {case.get('name')} failed or noted no difference")
        found.setdefault(named[2], {})[MEASURES[named[1]]] = max(noted)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--junitxml", type=Path, help="of a run of the tests; they are run when it is absent")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.junitxml or Path(folder) / "tests.xml"
        if options.junitxml is None:
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", TESTS, f"--junitxml={file}", "-o", "junit_family=xunit1"],
                check=True,
            )
        results: dict[str, Any] = {
            "command": "python -m benchmarks.policies",
            "unit": "largest relative difference of a tensor, norm(ours - theirs) / (1 + norm(theirs))",
            "environment": Environment.here().model_dump(),
            "results": read(file),
        }
    path = RESULTS / f"policies-{os.cpu_count()}cpu-{datetime.date.today().isoformat()}.json"
    write_json(path, results)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
