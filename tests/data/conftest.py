"""Fixtures of datasets."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def root(original, tmp_path):
    """A copy of the module's dataset `original`, to change or break."""
    return Path(shutil.copytree(original, tmp_path / "dataset"))
