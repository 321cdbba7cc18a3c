"""The folder of a run: storage that cannot hold one is refused, and changes to one are reported."""

import errno
import json
import os
from dataclasses import replace

import pytest

from vla_finetuning.config import CONFIG_NAME, Config, ScalingOptions
from vla_finetuning.run.folder import changed_options, claim_folder


def test_what_a_resumed_run_is_given_anew_is_told(tmp_path):
    """Steps and learning rate change the schedule of what is left: no user should do that unawares."""
    started = Config(lr=1e-3, steps=100, scaling=ScalingOptions(num_workers=2), output_dir=str(tmp_path))
    (tmp_path / CONFIG_NAME).write_text(json.dumps(started.to_json()))
    resumed = replace(started, resume=True, lr=5e-4, scaling=replace(started.scaling, num_workers=4))
    follows = "the learning rate of the steps that are left changes with it"
    assert changed_options(resumed) == [f"lr was 0.001, is 0.0005; {follows}", "scaling.num_workers was 2, is 4"]
    assert changed_options(replace(started, resume=True)) == []
    assert changed_options(replace(resumed, resume=False)) == []


@pytest.mark.parametrize("lacking", ["rename", "replace"])
def test_storage_that_cannot_do_what_a_run_does(tmp_path, monkeypatch, lacking):
    """As a bucket that is mounted: folders cannot be renamed there, files not replaced."""
    config = Config(output_dir=str(tmp_path / "run"))

    def refused(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    with monkeypatch.context() as mounted:
        mounted.setattr(os, lacking, refused)
        with (
            pytest.raises(OSError, match=r"output_dir=.*run: its storage does not .*mounted bucket.*choose a folder"),
            claim_folder(config),
        ):
            pytest.fail("it was claimed")
        assert not config.folder.exists(), "what is refused leaves nothing"
    with claim_folder(config):  # nor does it stay locked
        assert [path.name for path in config.folder.iterdir()] == [".lock"]
