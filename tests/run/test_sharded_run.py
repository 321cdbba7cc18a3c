"""The whole program with parameters in parts: killed, started anew in parts, and gone on with in one piece."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file

import vla
from tests.broken import flags, resumed_from, run_with
from tests.planted import Fault
from tests.run import test_faults
from tests.run.test_faults import assert_every_row_once

setting, measured = test_faults.setting, test_faults.measured
pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_fsdp2_run_survives_kills_and_resumes_as_ddp(setting, ray_cluster):
    assert vla.main(flags(setting, "copies")) == 0
    copies, folder = setting[0] / "copies", setting[0] / "parts"

    argv = flags(setting, "parts", **{"scaling.strategy": "fsdp2_reshard", "scaling.max_failures": 1})
    assert run_with(argv, Fault("kill", step=6), Fault("kill", step=10, attempt=1)) == 1
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    assert [path.name for path in checkpoints] == ["step_00000004", "step_00000008"]
    assert len(list(checkpoints[1].rglob("trainable-0000?-of-00002.safetensors"))) == 2

    other = ["--scaling.strategy=ddp", "--scaling.num_workers=1", "--batch_size=6"]
    assert vla.main([f"--output_dir={folder}", "--resume", *other]) == 0
    assert resumed_from(folder) == [0, 4, 8]
    assert_every_row_once(folder)
    np.testing.assert_allclose(losses(folder), losses(copies), rtol=1e-3)
    found, expected = (load_file(run / "pretrained_model" / "model.safetensors") for run in (folder, copies))
    assert found.keys() == expected.keys()
    assert not list(folder.rglob("*.p*kl")) and not list(folder.rglob(".metadata"))
