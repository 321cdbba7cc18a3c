"""Statistics and runs of relative actions against LeRobot's own."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.datasets import LeRobotDataset
from lerobot.datasets.compute_stats import compute_relative_action_stats
from lerobot.policies.factory import make_pre_post_processors

import vla
from tests import in_process
from tests.datasets import all_rows, make_dataset
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.relative_actions import RelativeActions, relative_action_stats, relative_chunks
from vla_finetuning.data.statistics import STATISTICS
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.resolve import with_stats
from vla_finetuning.policies.saving import save_pretrained

CHUNK, EXCLUDED = 6, ["motor_1"]


def lerobots(root, names):
    dataset = LeRobotDataset("local/test", root=root)
    features = {"action": {**dataset.meta.features["action"], "names": names}}
    return compute_relative_action_stats(dataset.hf_dataset.with_format(None), features, CHUNK, EXCLUDED)


def assert_same(actual, expected):
    assert set(actual) == set(STATISTICS) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


def test_relative_action_statistics_equal_lerobots(tmp_path):
    """Episodes of several files, one of them shorter than a chunk, and one dimension that stays absolute."""
    root = make_dataset(tmp_path / "d", episodes=(12, 7, 4, 15, 9), cameras={})
    meta = load_metadata(root)
    assert len(meta.data_files) > 1
    how = RelativeActions(CHUNK, (True, False, True))
    stats = partial(relative_action_stats, cache_dir=None, episodes=meta.episode_index)
    assert_same(stats(meta, how), lerobots(root, meta.features["action"].names))
    for spec in (how, how, replace(how, chunk_size=5)):
        relative_action_stats(meta, spec, cache_dir=tmp_path / "cache", episodes=meta.episode_index)
    assert len(list((tmp_path / "cache").iterdir())) == 2  # one for each chunk size
    # Chunks of every other frame.
    rows = [all_rows(root, [key])[key].astype(np.float32) for key in ("action", "observation.state")]
    apart = RelativeActions(3, how.dimensions, step=2)
    chunks = [
        relative_chunks(*(values[first:][:length] for values in rows), apart)
        for first, length in zip(meta.episode_start, meta.episode_length, strict=True)
    ]
    apart_stats = stats(meta, apart)
    for name, expected in (("min", np.min), ("max", np.max), ("mean", np.mean)):
        np.testing.assert_allclose(apart_stats[name], expected(np.concatenate(chunks), axis=0), rtol=1e-5, atol=1e-6)


def test_relative_action_run_equals_lerobots_processors(tmp_path):
    """The policy gets what LeRobot's processors make of the same rows; the export gives absolute actions."""
    folder, root, base = in_process.make_setting(tmp_path)
    flags = {"policy.use_relative_actions": "true", "policy.relative_exclude_joints": json.dumps(EXCLUDED)}
    flags |= {"dataset.statistics": "lerobot"}
    run = in_process.resolved((folder, root, base), **flags, **{"policy.chunk_size": CHUNK, "policy.n_action_steps": 2})
    assert run.robots[0].missing_stats["action"] >= {"q01", "q99"} and not run.robots[0].stats
    assert "predicts 2 of 3 dimensions of an action relative to the state" in describe(run)
    assert "which is played by lerobot-rollout --inference.type=rtc and PolicyServer; a loop" in describe(run)
    run = with_stats(run)
    names = load_metadata(root).features["action"].names
    assert_same(run.robots[0].stats["action"], lerobots(root, names))

    data = vla.build_dataset(run)
    source = data.read(stream=(0, run.rows.last_row))
    rows = next(source.read_rows(np.arange(4), 4))
    prepared = data.prepare(rows)
    dataset = LeRobotDataset(
        "local/test", root=root, video_backend="pyav", delta_timestamps={"action": [i / 10 for i in range(CHUNK)]}
    )
    batch = torch.utils.data.default_collate([dataset[int(i)] for i in rows["index"]])
    stats = {**dataset.meta.stats, "action": lerobots(root, names)}
    config = run.policy.config
    scaling = {"stats": stats, "norm_map": config.normalization_mapping}
    preprocessor, _ = make_pre_post_processors(
        config,
        pretrained_path=str(base),
        preprocessor_overrides={
            "device_processor": {"device": "cpu"},
            "normalizer_processor": {"features": {**config.input_features, **config.output_features}, **scaling},
            "relative_actions_processor": {"enabled": True, "exclude_joints": EXCLUDED, "action_names": list(names)},
        },
        postprocessor_overrides={"absolute_actions_processor": {"enabled": True}},
    )
    expected = preprocessor(batch)
    np.testing.assert_allclose(prepared["action"], expected["action"].numpy(), atol=1e-5)
    apart = (prepared["action"][..., 1] - prepared["action"][..., 0]).std()
    assert apart > 0

    export = folder / "export"
    save_pretrained(run.policy.start(), *run.policy.processors(), export)
    saved = PreTrainedConfig.from_pretrained(export, cli_overrides=["--device=cpu"])
    pre, post = make_pre_post_processors(saved, pretrained_path=str(export))
    absolute = post(pre(batch)["action"])
    torch.testing.assert_close(absolute, batch["action"], rtol=1e-4, atol=1e-4)
