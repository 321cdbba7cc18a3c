"""Cached features of a frozen vision tower: the same training without the tower."""

import contextlib
import logging
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.step import HostReads
from tests import in_process
from tests.datasets import make_dataset
from tests.in_process import RunRows, alone, in_ranks
from tests.training import test_as_lerobot as as_lerobot
from tests.training.test_as_lerobot import resolved, resolved_from
from util import UNWATCHED, NumpyToTorchCollate
from vla_finetuning.columns import FEATURES_MISSING, IS_SKIPPED
from vla_finetuning.plan.describe import describe
from vla_finetuning.policies.families.smolvla import SmolVLALoss
from vla_finetuning.training.capacity import planned_memory
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.feed import Collate, policy_batches
from vla_finetuning.training.model import build_model
from vla_finetuning.training.vision_features import FOUND, CachedFeatures, made_by

FRAMES, ROWS, CAMERAS = 31, 2, 2
# Of the first epoch, so that no frame comes twice.
FIRST = 7
TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision_features") / "dataset"
    return make_dataset(root, episodes=(12, 9, 10), cameras={TOP: (48, 64), WRIST: (32, 32)})


@contextlib.contextmanager
def counting():
    """How many images each call of the vision tower is given; not of those without storage, whose work is counted."""
    given, own = [], SmolVLALoss._embed_images

    def noted(self, images):
        given.extend([] if images.is_meta else [len(images)])
        return own(self, images)

    with mock.patch.object(SmolVLALoss, "_embed_images", noted):
        yield given


@pytest.fixture
def seen():
    with counting() as given:
        yield given


def trained(root, folder, cache=None, steps=FIRST, **changes):
    """What a run trains, by name, with random weights of its seed."""
    changes |= {} if cache is None else {"train.feature_cache": cache}
    return as_lerobot.trained(resolved(root, "smolvla", folder, steps=steps, **{"train.mode": "expert", **changes}))


def apart(found, expected):
    """The largest difference of a tensor, relative to its size; 0 for equal bits."""
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).norm() / (1 + expected[name].norm())).item() for name in found)


def test_training_is_the_same_bit_for_bit_and_the_tower_sees_each_frame_once(dataset, tmp_path, seen):
    options = {"train.precision": "bf16"}
    plain = trained(dataset, tmp_path, **options)
    assert sum(seen) == CAMERAS * ROWS * FIRST
    seen.clear()
    cached = trained(dataset, tmp_path, tmp_path / "features", **options)
    assert sum(seen) == CAMERAS * ROWS * FIRST
    seen.clear()
    again = trained(dataset, tmp_path, tmp_path / "features", **options)
    assert seen == []
    for found in (cached, again):
        assert all(torch.equal(value, plain[name]) for name, value in found.items())
    # Other weights have other features.
    trained(dataset, tmp_path, tmp_path / "features", seed=5, **options)
    assert sum(seen) == CAMERAS * ROWS * FIRST


def test_what_a_computation_is_told_by(run):
    cpu, (loss, _) = torch.device("cpu"), build_model(run.policy, torch.device("cpu"))
    names, config = [made_by(loss, None, cpu)], loss.policy.config
    vlm = loss.policy.model.vlm_with_expert
    loss.policy.model.action_in_proj.weight.data.add_(1)
    next(vlm.lm_expert.parameters()).data.add_(1)
    assert made_by(loss, None, cpu) == names[0]
    names.append(made_by(loss, torch.bfloat16, cpu))
    for option, value in (("resize_imgs_with_padding", (64, 16)), ("normalization_mapping", {})):
        setattr(config, option, value)
        names.append(made_by(loss, None, cpu))
    for part in (vlm.vlm.model.connector, vlm.vlm.model.vision_model):
        next(part.parameters()).data.view(-1)[-1] += 1e-6
        names.append(made_by(loss, None, cpu))
    loss.images.divisor += 1
    names.append(made_by(loss, None, cpu))
    assert len(set(names)) == len(names)


def test_a_full_cache_costs_the_cache_alone(dataset, tmp_path, seen, caplog, monkeypatch):
    steps = FRAMES // ROWS
    plain = trained(dataset, tmp_path, steps=steps)
    seen.clear()
    monkeypatch.setenv("VLA_CACHE_GB", "1e-5")  # for 36 of 62 frames: four tokens of 16 numbers, and a mark
    for _ in range(2):
        cached = trained(dataset, tmp_path, tmp_path / "features", steps=steps)
    assert 0 < 2 * CAMERAS * ROWS * steps - sum(seen) <= 36
    assert apart(cached, plain) < 1e-6
    (warning,) = {record.message for record in caplog.records if record.levelno == logging.WARNING}
    assert "is full" in warning and "VLA_CACHE_GB" in warning


def test_a_resumed_run_goes_on_with_the_same_features(dataset, tmp_path, seen):
    def run_to(folder, steps, first_step=0):
        changes = {"output_dir": tmp_path / folder, "train.feature_cache": tmp_path / f"{folder} features"}
        run = resolved(dataset, "smolvla", tmp_path, steps=20, save_freq=10, **{"train.mode": "expert", **changes})
        run = replace(run, job=replace(run.job, steps=steps))
        torch.manual_seed(run.config.seed)
        return in_process.train(run, worker=alone(run, first_step), make_checkpoints=CheckpointWriter).named()

    whole = {name: value.clone() for name, value in run_to("whole", 20).items()}
    run_to("stopped", 10)
    seen.clear()
    resumed = run_to("stopped", 20, first_step=10)
    # Eleven more rows in the first epoch, and none of the second, which begins in the sixteenth step.
    assert CAMERAS * (FRAMES - 10 * ROWS) <= sum(seen) <= CAMERAS * (FRAMES - 10 * ROWS + ROWS)
    assert apart(resumed, whole) < 1e-6


# ---- a batch of which some frames were seen --------------------------------------------------------------------------


def batch_of(run, rows):
    """A batch of the first rows of a run's stream, as read tasks make it."""
    return next(iter(RunRows(run).iter_torch_batches(batch_size=rows, collate_fn=dict)))


def started(run, folder, **changes):
    loss, autocast = build_model(run.policy, torch.device("cpu"))
    config = replace(run.config, train=replace(run.config.train, feature_cache=str(folder)))
    run = SimpleNamespace(rows=run.rows, config=config, job=replace(run.job, feature_cache_gb=1.0))
    state = SimpleNamespace(run=run, clock=UNWATCHED, loss=loss, autocast=autocast)
    features = CachedFeatures(state)
    features.on_start(state)
    return features, loss


def filled(features, batch):
    """A batch of host columns as a step gets it."""
    host = Collate([features.on_host_batch], NumpyToTorchCollate(False))(batch)
    with HostReads() as reads:
        (found,) = features.on_device_batches(iter([host]))
    assert reads.count == 0
    features._writer.submit(int).result()  # what is to be written is
    return found


@pytest.fixture
def run(dataset, tmp_path):
    return resolved(dataset, "smolvla", tmp_path, **{"train.mode": "expert", "batch_size": 6})


@pytest.mark.parametrize("compiled", [False, True])
def test_of_a_batch_only_what_was_not_seen_is_computed(run, tmp_path, seen, compiled):
    torch.manual_seed(0)
    features, loss = started(run, tmp_path / "features")
    features._whole_batches = compiled
    batch = batch_of(run, 6)
    whole = loss.features(loss.images(NumpyToTorchCollate(False)(batch)))
    some = {key: value[:4] for key, value in batch.items()}
    filled(features, {key: value for key, value in some.items() if key != WRIST})
    seen.clear()
    found = filled(features, batch)
    # Of one camera the last two rows, of the other all six; compiled layers are for whole batches.
    assert seen == [2 * 6 if compiled else 2 + 6]
    for key in (TOP, WRIST):
        assert torch.allclose(found[key], whole[key], rtol=0, atol=1e-6)
    assert not [key for key in found if key.endswith(FOUND)]
    seen.clear()
    again = filled(features, batch)
    assert seen == [] and FEATURES_MISSING not in again
    assert all(torch.equal(again[key], found[key]) for key in ((WRIST,) if compiled else (TOP, WRIST)))
    # What a policy sees of it: the features, and no columns of the cache.
    (inputs,) = policy_batches([found], run.policy.config)
    assert inputs.keys() == batch.keys() - {"dataset_index", "index", "position"}
    features.on_end(None)


def test_a_row_that_could_not_be_read_leaves_nothing(run, tmp_path, seen):
    features, _ = started(run, tmp_path / "features")
    batch = batch_of(run, 6)
    filled(features, {**batch, IS_SKIPPED: np.arange(6) == 3})
    seen.clear()
    filled(features, batch)
    assert seen == [CAMERAS]
    features.on_end(None)


def test_an_error_while_writing_is_raised(run, tmp_path, monkeypatch):
    features, _ = started(run, tmp_path / "features")
    monkeypatch.setattr(features._store, "write", lambda *_: 1 / 0)
    filled(features, batch_of(run, 6))
    with pytest.raises(ZeroDivisionError):
        features.on_end(None)


# ---- two workers ----------------------------------------------------------------------------------------------------


def both(rank, world, root, folder):
    """What each of two processes trains with a cache that they share, and without: how far apart; images seen."""
    results, images = [], []
    for cache in ({}, *[{"train.feature_cache": folder / "features"}] * 2):
        options = {"train.mode": "expert", "steps": 2, "scaling.num_workers": world, **cache}
        with counting() as given:
            results.append(as_lerobot.trained(resolved(root, "smolvla", folder / str(rank), **options), rank, world))
        images.append(sum(given))
        dist.barrier()
    return {"apart": [apart(result, results[0]) for result in results], "images": images}


def test_two_workers_share_a_nodes_features(dataset, tmp_path, seen):
    for found in in_ranks(both, dataset, tmp_path, world=2):
        assert found == {"apart": [0, 0, 0], "images": [CAMERAS * ROWS * 2, CAMERAS * ROWS * 2, 0]}
    # One process finds what both have written.
    alone = trained(dataset, tmp_path, tmp_path / "features", steps=2, batch_size=2 * ROWS)
    assert seen == []
    assert apart(alone, trained(dataset, tmp_path, steps=2, batch_size=2 * ROWS)) < 1e-6


# ---- before a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changed", "error"),
    [
        ("smolvla", {"train.mode": "full"}, " with --train.mode=full: .*connector.*=expert"),
        ("smolvla", {"policy.freeze_vision_encoder": "false", "train.mode": "full"}, ".*vision_model.*=expert"),
        ("smolvla", {"train.augmentation": "openpi"}, "=.* with --train.augmentation=openpi: frames"),
        ("smolvla", {"dataset.image_transforms.enable": "true"}, "=.*image_transforms.enable=true: frames then differ"),
        ("act", {}, "=.*features is for smolvla, and the policy is of type act: leave it out"),
    ],
)
def test_what_changes_features_is_refused(dataset, tmp_path, kind, changed, error):
    options = {"train.mode": "expert" if kind == "smolvla" else "full", "train.feature_cache": tmp_path / "features"}
    with pytest.raises(ValueError, match=f"--train.feature_cache{error}"):
        resolved(dataset, kind, tmp_path, **{**options, **changed})


def test_adapters_on_the_tower_are_refused(dataset, tmp_path):
    run = resolved(dataset, "smolvla", tmp_path, **{"train.mode": "expert"})
    for part in (run.policy.start(), *run.policy.processors()):
        part.save_pretrained(tmp_path / "saved")
    options = {"train.mode": "expert", "peft.r": 4, "train.feature_cache": tmp_path / "features"}
    with pytest.raises(ValueError, match=r"--train.feature_cache with --peft: .*lora.*--peft.target_modules without"):
        resolved_from(tmp_path / "saved", dataset, "smolvla", **options, **{"peft.target_modules": r".*\.q_proj"})
    adapted = resolved_from(tmp_path / "saved", dataset, "smolvla", **options)  # LeRobot's choice leaves it alone
    in_process.train(adapted, RunRows(adapted))


def test_the_plan_says_what_features_take(dataset, tmp_path, monkeypatch):
    cache = {"train.mode": "expert", "train.feature_cache": tmp_path / "features", "train.exact_mean": "true"}
    run = resolved(dataset, "smolvla", tmp_path, **cache, steps=40, grad_accum=3)
    plan = planned_memory(run.policy, run.rows.frames)
    plain = plan(replace(run.config, train=replace(run.config.train, feature_cache=None)))
    # Of the three batches of a step and the next one: of each camera four tokens of 16 numbers.
    assert plan(run.config) == replace(plain, beside=plain.beside + 4 * ROWS * CAMERAS * 4 * 16 * 4)
    assert "none are used twice" not in describe(run)
    monkeypatch.setenv("VLA_CACHE_GB", "1e-9")
    text = describe(resolved(dataset, "smolvla", tmp_path, **cache, steps=3))
    assert "TOO MANY for VLA_CACHE_GB=1e-09" in text and "the run uses each feature once" in text
    without = resolved(dataset, "smolvla", tmp_path, **{"train.mode": "expert"})
    assert max(run.policy.flops_by_prompt.values()) < max(without.policy.flops_by_prompt.values())
