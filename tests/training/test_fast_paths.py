"""What a loss of this project's own is for, of PI0 and SmolVLA; PI0.5's tests have the same of PI0.5, one by one."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from diagnostics import audit_syncs
from tests import in_process
from tests.datasets import make_dataset
from tests.tiny_backbones import KINDS
from tests.training.test_as_lerobot import resolved

CPU = torch.device("cpu")
FRAMES = 31
BOTH = pytest.mark.parametrize("kind", ["pi0", "smolvla"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("fast_paths") / "dataset"
    make_dataset(root, episodes=(12, 9, 10), cameras={"observation.images.top": (48, 64)})
    rows = {"index": np.arange(FRAMES), "episode_index": np.repeat([0, 1, 2], (12, 9, 10))}
    pq.write_table(
        pa.table({**rows, "progress_sparse": np.arange(FRAMES) ** 2 / FRAMES**2}), root / "sarm_progress.parquet"
    )
    return root


def trained(run, shard=None):
    torch.manual_seed(run.config.seed)
    return in_process.train(run, shard or in_process.RunRows(run)).named()


@BOTH
def test_rows_weigh_and_tasks_have_their_held_out_losses(dataset, tmp_path, kind):
    with KINDS[kind].here(), in_process.tasks_here():
        options = {"steps": 2, "dataset.eval_split": 0.3, "eval_steps": 2}
        plain = trained(resolved(dataset, kind, tmp_path / "plain", **options))
        run = resolved(dataset, kind, tmp_path, **options, **{"sample_weighting.type": "rabc"})
        weighted = trained(run)
    assert max((weighted[name] - plain[name]).abs().max() for name in plain) > 1e-6
    (line,) = (json.loads(line) for line in (run.job.output_dir / "metrics.jsonl").read_text().splitlines()[-1:])
    by_task = line["eval_loss_by_task"]
    assert len(by_task) == 2 and all(np.isfinite(loss) for loss in by_task.values())
    assert np.isfinite(line["eval_loss"])


class Unreadable(in_process.RunRows):
    """The first row of each batch could not be read; something else is in its place."""

    def __init__(self, run, instead):
        super().__init__(run)
        prepare = self._data.prepare

        def with_skipped(rows):
            rows = {key: value.copy() for key, value in rows.items()}
            for key, value in instead.items():
                rows[key][0] = value
            skipped = np.zeros(len(rows["index"]), bool)
            skipped[0] = True
            return prepare({**rows, "is_skipped": skipped})

        self._data = replace(self._data, prepare=with_skipped)


@BOTH
def test_what_could_not_be_read_does_not_matter(dataset, tmp_path, kind):
    found = []
    with KINDS[kind].here():
        for number in (1, 2):
            options = {"steps": 2, "dataset.on_error": "skip", "dataset.max_skipped": 1}
            run = resolved(dataset, kind, tmp_path / str(number), **options)
            instead = {"observation.images.top": 100 * number, "action": number, "observation.state": number}
            found.append(trained(run, Unreadable(run, instead)))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("kind", [pytest.param("pi0", marks=pytest.mark.gate), "smolvla"])
def test_a_step_reads_nothing_from_the_device(dataset, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(audit_syncs, "WINDOW_STEPS", 1)
    with KINDS[kind].here():
        found = audit_syncs.audit(resolved(dataset, kind, tmp_path, **{"grad_accum": 2}))
    assert not found.syncs, found.table()
