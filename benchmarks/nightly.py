"""The generated tests with many more cases than the suite has time for, other ones every night.

    python -m benchmarks.nightly [--examples 10000] [--seed N]

Runs every hypothesis test of tests/data/test_hostile.py (metadata parser, StreamPlan) with that many cases each. A
failure prints the smallest case that shows it; the exit status is pytest's. The seed is printed: the same one repeats
the run.
"""

from __future__ import annotations

import argparse
import secrets
import sys

import hypothesis
import pytest


class ManyExamples:
    """A pytest plugin: only the generated tests, under another profile than tests/conftest.py's."""

    def __init__(self, examples: int):
        self._examples = examples

    def pytest_configure(self) -> None:
        hypothesis.settings.register_profile(
            "nightly", max_examples=self._examples, derandomize=False, deadline=None, database=None
        )
        hypothesis.settings.load_profile("nightly")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if hypothesis.is_hypothesis_test(getattr(item, "obj", None))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000, help="cases of each test")
    parser.add_argument("--seed", type=int, default=None, help="repeat the run that printed this seed")
    options = parser.parse_args(argv)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}, {options.examples} cases of each test", flush=True)
    arguments = ["tests/data/test_hostile.py", f"--hypothesis-seed={seed}", "--timeout=0", "--durations=0"]
    return int(pytest.main([*arguments, "--hypothesis-show-statistics"], plugins=[ManyExamples(options.examples)]))


if __name__ == "__main__":
    sys.exit(main())
