"""What a run is resolved to, as far as the data is concerned. Without Ray."""

import json

import numpy as np
import pytest
import torch

import tiny_pi05
from config import parse_args
from lerobot_metadata import load_metadata
from pi05_loss import check_batch
from policy import load_policy
from processors import DeviceHalf, Prepare, make_processors
from run_plan import describe, resolve
from tests.datasets import make_dataset


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A dataset and a tiny base policy for it, which sees 56x56."""
    folder = tmp_path_factory.mktemp("run_plan")
    root = make_dataset(folder / "dataset", cameras={"observation.images.top": (48, 64)})
    meta = load_metadata(root)
    base = tiny_pi05.make_tiny_base(
        folder / "base", features=meta.features, tasks=list(meta.tasks.values()), stats=meta.stats, fps=10, chunk_size=8
    )
    return folder, root, base


def plan(setting, *flags, root=True):
    folder, dataset, base = setting
    options = [f"--policy.path={base}", f"--output_dir={folder / 'out'}", "--batch_size=4", "--steps=5"]
    options += [f"--dataset.root={dataset}"] if root else []
    return resolve(parse_args([*options, *flags]), gpus_found=0)


def policy_images(run, rows):
    """The images that reach the policy's vision tower, float32 (N, 3, H, W); and what came out of the read task."""
    source = run.reader()(stream=(0, run.last_row))
    (batch,) = source.read_rows(rows, len(rows))
    (camera,) = run.match.camera_keys
    assert batch[camera].shape[1:] == source.example()[camera].shape[1:]
    pre, _ = make_processors(run.policy_folder, run.policy_config, run.stats, {})
    prepared = Prepare(pre, run.match.camera_keys, {}, run.policy_config)(batch)
    inputs = {k: torch.from_numpy(v.copy()) for k, v in prepared.items()}
    check_batch(inputs, run.policy_config)
    policy = load_policy(run.policy_folder, run.policy_config)
    return policy._preprocess_images(DeviceHalf(pre, run.policy_config)(inputs))[0], source


def test_frames_fitted_while_decoding_reach_the_policy_as_after_its_own_resizing(setting, monkeypatch):
    from lerobot.policies.pi05 import modeling_pi05

    rows = [0, 7, 19, 33]
    expected, whole = policy_images(plan(setting), rows)
    small = plan(setting, "--dataset.image_size=[56, 56]")
    assert "56x56" in describe(small)
    # Nothing is left for the policy to resize.
    monkeypatch.setattr(modeling_pi05, "resize_with_pad_torch", None)
    found, fitted = policy_images(small, rows)
    assert len(found) == len(expected) == 1
    level = 2 / 255  # of uint8, in the policy's [-1, 1]
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=level)
    assert (found[0] - expected[0]).abs().mean() < 0.3 * level
    assert not torch.equal(found[0], expected[0])  # the float path is another one: something was compared
    assert small.decoded == {"frames_per_s": 1, "decoded_bytes_per_s": fitted.row_bytes()}
    assert whole.row_bytes() - fitted.row_bytes() == 48 * 64 * 3 - 56 * 56 * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset.image_size=[28, 28]"], r"the policy sees \[56, 56\]; give that"),
        (["--dataset.image_size=[56]"], r"--dataset.image_size=\[56\]"),
        (
            ["--dataset.image_size=[56, 56]", '--policy.normalization_mapping={"VISUAL": "MEAN_STD"}'],
            "normalises images before it resizes them",
        ),
    ],
)
def test_sizes_at_which_the_policy_would_see_something_else(setting, flags, message):
    with pytest.raises(ValueError, match=message):
        plan(setting, *flags)


def test_a_policy_that_fits_images_otherwise(setting):
    with pytest.raises(ValueError, match="a smolvla policy fits no images into a size"):
        folder, root, _ = setting
        flags = [f"--dataset.root={root}", "--policy.type=smolvla", "--train.mode=full", f"--output_dir={folder / 'o'}"]
        resolve(parse_args([*flags, "--batch_size=2", "--dataset.image_size=[512, 512]"]), gpus_found=0)


# ---- mixtures -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(setting):
    """A dataset of 12 rows beside the other's 54."""
    return make_dataset(
        setting[0] / "second", cameras={"observation.images.top": (48, 64)}, episodes=(4, 8), seed=1, tasks=("wait",)
    )


def mixture_flag(weights):
    return f"--dataset.mixture={json.dumps({str(root): weight for root, weight in weights.items()})}"


def test_a_mixture_of_datasets(setting, second, monkeypatch):
    from lerobot.datasets.compute_stats import aggregate_stats

    folder, root, _ = setting
    monkeypatch.chdir(folder)
    run = plan(setting, mixture_flag({root: 1, "second": 2}), root=False)
    assert run.config.dataset.mixture == {str(root): 1, str(second): 2}  # whoever resumes it stands elsewhere
    assert run.rows_per_epoch == 66 and run.stream["rows_per_source"] == [22, 44]
    assert "weight 2 of 3: 44 of an epoch's 66 rows, 3.67 times its frames" in describe(run)
    source = run.reader()(stream=(0, run.last_row))
    (batch,) = source.read_rows(range(66), 66)
    assert np.bincount(batch["dataset_index"]).tolist() == [22, 44]
    assert set(batch["task"][batch["dataset_index"] == 1]) == {"wait"}
    expected = aggregate_stats([load_metadata(r).stats for r in (root, second)])
    for key in ("action", "observation.state"):
        np.testing.assert_array_equal(run.stats[key]["q01"], expected[key]["q01"])
    # What a run is saved as, it is resumed as.
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out" / "config.json").write_text(json.dumps(run.config.to_json()))
    again = resolve(parse_args(["--resume", f"--output_dir={folder / 'out'}"]), gpus_found=0)
    assert again.stream == run.stream
    assert plan(setting, mixture_flag({root: 1, second: 1}), root=False).stream != run.stream


def test_a_dataset_that_is_named_twice(setting, monkeypatch):
    monkeypatch.chdir(setting[0])
    with pytest.raises(ValueError, match="--dataset.mixture names a dataset twice"):
        plan(setting, mixture_flag({setting[1]: 1, "dataset": 2}), root=False)
