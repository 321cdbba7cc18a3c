"""Filtered imitation with demonstrations: rows, order and loss, against LeRobot's dataset and losses."""

import json
import shutil
from unittest import mock

import numpy as np
import pytest
import ray
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors

from tests.rl.test_learning import equal, resolved, train
from vla_finetuning.plan.demo import make_demo_dataset
from vla_finetuning.rl import demonstrations, loop
from vla_finetuning.rl.demonstrations import as_batch, split_positions, task_reader
from vla_finetuning.rl.objectives.filtered import FilteredImitation
from vla_finetuning.training.held_out import read_chunk
from vla_finetuning.training.model import make_prepare


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_demo_dataset(tmp_path_factory.mktemp("demonstrations") / "dataset", pairs=2)


def filtered(base, folder, root, **changes):
    options = {"grpo.method": "filtered", "grpo.demonstrations": root, "grpo.minibatch": 8}
    return resolved(base, folder, **options | changes)


def in_process(rows, policy, positions_read):
    """Read in this process, in place of cluster tasks, and list the positions."""
    source, prepare = rows.source(), make_prepare(policy, rows)

    def read(micros):
        for positions in micros:
            positions_read.extend(positions.tolist())
            yield read_chunk(source, prepare, positions)

    return read


def trained(run):
    positions = []
    with mock.patch.object(loop, "task_reader", lambda rows, policy, _: in_process(rows, policy, positions)):
        return (*train(run), positions)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_split_positions_covers_each_row_once_with_equal_micro_batch_counts(ranks):
    for count in range(1, 30):
        each = [split_positions(100, count, rank=rank, ranks=ranks, micro_rows=4) for rank in range(ranks)]
        assert sorted(np.concatenate([p for micros in each for p in micros])) == list(range(100, 100 + count))
        assert len({len(micros) for micros in each}) == 1
        assert all(len(micro) <= 4 for micros in each for micro in micros)


def test_demonstration_rows_are_used_once_across_resume(base, root, tmp_path):
    """Two iterations equal one and a resume bit for bit; rows follow the stream without a gap."""
    options = {"save_freq": 1, "grpo.eval_every": 1}
    uninterrupted, lines, rows = trained(filtered(base, tmp_path / "uninterrupted", root, **options))
    *_, before = trained(filtered(base, tmp_path / "parts", root, **options, **{"grpo.iterations": 1}))
    resumed, lines_of_resumed, after = trained(filtered(base, tmp_path / "parts", root, **options))
    assert before + after == rows == list(range(len(rows))) and before and after
    assert equal(uninterrupted, resumed) and lines == lines_of_resumed
    assert [line["demonstrated"] for line in lines[1:]] == [2 * line["used"] for line in lines[1:]]  # of two passes
    without, _ = train(resolved(base, tmp_path / "without", **{"grpo.method": "filtered"}))
    assert not equal(uninterrupted, without)


def test_demonstrations_may_be_fewer_than_global_batch(base, root, tmp_path):
    """Their order depends neither on the batch size nor on the number of workers."""
    runs = filtered(base, tmp_path, root), filtered(base, tmp_path, root, batch_size=100, **{"scaling.num_workers": 4})
    assert runs[1].demonstrations.per_epoch < 400 and runs[0].job.start.stream == runs[1].job.start.stream


def test_demonstration_rows_equal_lerobot_dataset_and_processors(base, root, tmp_path):
    run = filtered(base, tmp_path / "run", root)
    source, prepare = run.demonstrations.source(), make_prepare(run.policy, run.demonstrations)
    (rows,) = source.read_rows([3, 90, 5], 3)
    actual = as_batch(read_chunk(source, prepare, np.array([3, 90, 5])))
    seconds = [i / 10 for i in range(10)]
    dataset = LeRobotDataset("local/t", root=root, video_backend="pyav", delta_timestamps={"action": seconds})
    pre, _ = make_pre_post_processors(run.policy.config, pretrained_path=str(base))
    expected = pre(torch.utils.data.default_collate([dataset[int(index)] for index in rows["index"]]))
    for key in ("action", "observation.language.tokens", "observation.language.attention_mask"):
        torch.testing.assert_close(actual[key], expected[key])
    assert not actual["action_is_pad"].any()


def test_rollouts_and_demonstrations_contribute_equally_to_loss(base, root, tmp_path):
    """By LeRobot's losses in the only update; a rollout's is the mean over its four executed steps of ten."""
    changes = {"policy.n_action_steps": 4, "grpo.iterations": 1, "grpo.epochs": 1, "grpo.minibatch": 1000}
    run = filtered(base, tmp_path / "run", root, **changes)
    micros, forward, policy = [], FilteredImitation.forward, run.policy.start()

    def record(self, batch, *rest):
        loss = forward(self, batch, *rest)
        micros.append((self.loss.images(batch), float(loss.detach())))
        return loss

    with mock.patch.object(FilteredImitation, "forward", record):
        _, lines, _ = trained(run)
    rows, total = {4: 0, 10: 0}, 0.0
    for batch, loss in micros:
        images, masks = policy._preprocess_images(batch)
        language = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
        actions = policy.prepare_action(batch)
        with torch.no_grad():
            losses = policy.model.forward(images, masks, *language, actions, batch["noise"], batch["time"])
        steps = 4 if batch["action_is_pad"].any() else 10
        expected = sum(float(row[:steps, :3].mean()) for row in losses)
        assert loss == pytest.approx(expected, rel=1e-4)
        rows[steps] += len(losses)
        total += expected
    assert rows == {4: lines[1]["used"], 10: lines[1]["used"]} and lines[1]["updates"] == 1
    assert lines[1]["loss"] == pytest.approx(total / sum(rows.values()), rel=1e-4)


def test_invalid_demonstration_options_are_refused(base, root, tmp_path):
    with pytest.raises(ValueError, match="--grpo.demonstrations=.*only imitation takes them"):
        resolved(base, tmp_path / "run", **{"grpo.demonstrations": root})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        filtered(base, tmp_path / "run", tmp_path / "nowhere")


def test_demonstrations_may_lack_policy_camera_and_environment_names(base, root, tmp_path):
    """As in training with --dataset.missing_cameras mask."""
    policy, data = (shutil.copytree(folder, tmp_path / folder.name) for folder in (base, root))
    for file in policy.glob("*.json"):
        file.write_text(file.read_text().replace("images.top", "images.cam"))
    info = json.loads((data / "meta" / "info.json").read_text())
    del info["features"]["observation.images.top"]
    (data / "meta" / "info.json").write_text(json.dumps(info))
    names = {"observation.images.top": "observation.images.cam"}
    run = filtered(policy, tmp_path / "run", data, rename_map=json.dumps(names))
    assert "observation.images.cam" in run.policy.config.image_features
    assert "observation.images.top" not in run.demonstrations.metas[0].camera_keys


def test_task_reader_reads_two_micro_batches_ahead(monkeypatch):
    """Tasks hold no CPU, so nothing else limits their processes."""
    started = []
    monkeypatch.setattr(demonstrations, "make_prepare", mock.Mock())
    monkeypatch.setattr(demonstrations, "read_task", lambda *_, **options: lambda micro: started.append(micro) or micro)
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    micros = task_reader(mock.Mock(), None, 1.0)(range(4))
    assert [(micro, len(started)) for micro in micros] == [(0, 2), (1, 3), (2, 4), (3, 4)]


@pytest.mark.ray
@pytest.mark.gate
def test_read_tasks_run_when_all_cluster_cpus_are_reserved(base, root, tmp_path, ray_cluster):
    """As by simulators, which wait meanwhile."""
    run = filtered(base, tmp_path / "run", root)
    source, prepare = run.demonstrations.source(), make_prepare(run.policy, run.demonstrations)
    reservation = ray.util.placement_group([{"CPU": ray.available_resources()["CPU"]}])
    ray.get(reservation.ready(), timeout=60)
    try:
        micros = [np.array(positions) for positions in ([7, 2], [11], [0], [1])]
        for positions, rows in zip(micros, task_reader(run.demonstrations, run.policy, 120.0)(micros), strict=True):
            expected = read_chunk(source, prepare, positions)
            assert all(np.array_equal(rows[key], expected[key]) for key in expected)
    finally:
        ray.util.remove_placement_group(reservation)
