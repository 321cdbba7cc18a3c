"""The folder of a run: storage that cannot hold one is refused before anything is trained."""

import errno
import os
from types import SimpleNamespace

import pytest

from run_folder import claim_folder


@pytest.mark.parametrize("lacking", ["rename", "replace"])
def test_storage_that_cannot_do_what_a_run_does(tmp_path, monkeypatch, lacking):
    """As a bucket that is mounted: folders cannot be renamed there, files not replaced."""
    run = SimpleNamespace(output_dir=tmp_path / "run", config=SimpleNamespace(preset=None, resume=False))

    def refused(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    with monkeypatch.context() as mounted:
        mounted.setattr(os, lacking, refused)
        with (
            pytest.raises(OSError, match=r"output_dir=.*run: its storage does not .*mounted bucket.*choose a folder"),
            claim_folder(run),
        ):
            pytest.fail("it was claimed")
    with claim_folder(run):  # nor does it stay locked
        assert [path.name for path in run.output_dir.iterdir()] == [".lock"]
