"""What the tools share."""

from dataclasses import replace

import numpy as np
import pytest

from diagnostics.tool import host_batches
from tests import in_process
from vla_finetuning.training.stream import Dealt

MASK = "observation.language.attention_mask"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return in_process.resolved(in_process.make_setting(tmp_path_factory.mktemp("tool")))


def test_batches_are_cut_and_weighed_as_in_training(run):
    weights = np.arange(run.rows.metas[0].total_frames, dtype=np.float32)
    dealt = Dealt(run.config.batch_size, run.rows.block_rows, 0, 1, 1)
    (whole,) = host_batches(replace(run, policy=replace(run.policy, prompts=())), dealt, 1)
    needed = int(whole[MASK].sum(1).max())
    assert needed < whole[MASK].shape[1] and "row_weight" not in whole
    shorter = replace(run.policy, prompts=(needed, whole[MASK].shape[1]))
    (cut,) = host_batches(replace(run, policy=shorter, rows=replace(run.rows, weights=weights)), dealt, 1)
    assert cut[MASK].shape == (run.config.batch_size, needed)
    ratio = cut["row_weight"] / weights[whole["index"]]
    assert ratio[0] > 0 and np.allclose(ratio, ratio[0])
