"""Fixtures of datasets."""

import shutil
from pathlib import Path

import pytest

from tests.datasets import make_dataset


@pytest.fixture(scope="module")
def original(request, tmp_path_factory):
    """The module's dataset, never changed: `ORIGINAL` in the module holds the options of `make_dataset`."""
    options = getattr(request.module, "ORIGINAL", {})
    return make_dataset(tmp_path_factory.mktemp("original") / "original", **options)


@pytest.fixture
def root(original, tmp_path):
    """A copy of the module's dataset `original`, to change or break."""
    return Path(shutil.copytree(original, tmp_path / "dataset"))
