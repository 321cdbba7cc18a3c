"""Row weights in the loss against LeRobot's RABC weights and training step."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub.errors import RemoteEntryNotFoundError
from lerobot.rewards.sarm.rabc import RABCWeights

from tests.datasets import make_dataset
from tests.tiny import make_base, make_batch, make_policy, reference
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.programs import Config
from vla_finetuning.options.sample_weighting import SampleWeightingOptions
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.plan.row_weights import loss_factors, row_weights
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.run.checkpoint import check_resumable
from vla_finetuning.training.feed import training_transforms, weigh_rows

CHUNK, FRAMES = 8, 60


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Make a dataset whose progress rises, stalls, falls, and has gaps."""
    folder = tmp_path_factory.mktemp("row_weights")
    root = make_dataset(folder / "dataset", episodes=(30, 12, 18), cameras={"observation.images.top": (48, 64)})
    meta = load_metadata(root)
    rng, frame = np.random.default_rng(0), np.concatenate([np.arange(n) for n in (30, 12, 18)])
    progress = np.clip(frame / 30 + 0.02 * rng.normal(size=FRAMES), 0, 1)
    progress[30:42] = 0.5 + 0.001 * np.arange(12)
    progress[42:] = 0.9 - 0.02 * np.arange(18)
    progress[[3, 20, 45]] = np.nan
    rows = pa.table(
        {"index": np.arange(FRAMES), "episode_index": np.repeat([0, 1, 2], (30, 12, 18)), "progress_sparse": progress}
    )
    pq.write_table(rows.take([i for i in range(FRAMES) if i != 7]), root / "sarm_progress.parquet")
    return folder, root, make_base(folder / "base", meta, chunk_size=CHUNK)


def run_of(setting, *flags):
    folder, root, base = setting
    options = [f"--dataset.root={root}", f"--policy.path={base}", f"--output_dir={folder / 'out'}", "--batch_size=4"]
    # No prompts to cut: the batches here have none.
    run = resolve(parse_args([*options, "--steps=3", *flags]), gpus_found=0)
    return replace(run, policy=replace(run.policy, prompts=()))


@pytest.mark.parametrize(
    "options",
    [
        {"kappa": 0.3, "epsilon": 1e-3},
        {"type": "rabc", "kappa": 0.0, "extra_params": {"fallback_weight": 0.25}},
    ],
)
def test_row_weights_match_lerobot_rabc(setting, options):
    flags = [f"--sample_weighting.{k}={json.dumps(v).strip(chr(34))}" for k, v in options.items()]
    run = run_of(setting, *flags)
    parameters = {k: v for k, v in options.items() if k in ("kappa", "epsilon")} | options.get("extra_params", {})
    theirs = RABCWeights(setting[1] / "sarm_progress.parquet", CHUNK, device=torch.device("cpu"), **parameters)
    deltas = np.array([theirs._compute_delta(i) for i in range(FRAMES)], np.float32)
    np.testing.assert_array_equal(run.rows.weights, theirs._compute_weights(deltas))
    mixture = {str(setting[1]): {"fps": 5}}  # half of the dataset's: a chunk spans twice as many frames
    slower = run_of(setting, f"--dataset.mixture={json.dumps(mixture)}", "--dataset.root=null", *flags)
    theirs_slower = RABCWeights(
        setting[1] / "sarm_progress.parquet", 2 * CHUNK, device=torch.device("cpu"), **parameters
    )
    deltas = np.array([theirs_slower._compute_delta(i) for i in range(FRAMES)], np.float32)
    np.testing.assert_array_equal(slower.rows.weights, theirs_slower._compute_weights(deltas))
    assert len(set(run.rows.weights.tolist())) > 2 and (run.rows.weights == 0).any()
    rng = np.random.default_rng(1)
    for _ in range(20):
        index, losses = rng.integers(0, FRAMES, 4), torch.from_numpy(rng.random(4).astype(np.float32))
        weights, _ = theirs.compute_batch_weights({"index": index})
        expected = (losses * weights).sum() / (weights.sum() + 1e-6)  # as `update_policy` has it
        batch = weigh_rows({"index": index, "x": index}, run.rows.weights, 0.0)
        assert batch["row_weight"].dtype == np.float32
        torch.testing.assert_close((losses * torch.from_numpy(batch["row_weight"])).mean(), expected, rtol=1e-6, atol=0)
    skipped = {"index": index, "is_read": np.array([True, False, True, True])}
    assert weigh_rows(skipped, run.rows.weights, 0.0)["row_weight"][1] == 0
    plan = describe(run)
    assert (
        f"of 60 frames {(run.rows.weights == 0).sum()} have weight 0 and {(run.rows.weights == 1).sum()} weight 1"
        in plan
    )


def test_weighted_gradient_matches_lerobot():
    policy, weights = make_policy(), np.array([0.0, 1.0, 0.4], np.float32)
    batch, noise, time = make_batch(policy)
    batch, noise, time = {key: value[:3] for key, value in batch.items()}, noise[:3], time[:3]
    theirs = reference(policy, noise, time)
    losses, _ = theirs.forward(batch, reduction="none")
    normalised = torch.from_numpy(weights * np.float32(3 / (weights.sum() + 1e-6)))
    ((losses * normalised).sum() / (normalised.sum() + 1e-6)).backward()
    row_weight = torch.from_numpy(loss_factors(weights, 1e-6))
    PI05Loss(policy)({**batch, "row_weight": row_weight}, noise, time).backward()
    actual, expected = (p.model.action_out_proj.weight.grad for p in (policy, theirs))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_missing_hub_progress_names_remedy(setting, monkeypatch):
    absent = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co/x"))
    download = Mock(side_effect=RemoteEntryNotFoundError("404 Client Error.", response=absent))
    monkeypatch.setattr("vla_finetuning.plan.row_weights.hf_hub_download", download)
    with pytest.raises(FileNotFoundError, match="^hf://datasets/a/b/c: no such file; .*compute_rabc_weights"):
        run_of(setting, "--sample_weighting.progress_path=hf://datasets/a/b/c")


def test_sample_weighting_is_off_by_default(setting):
    run = run_of(setting, "--sample_weighting.type=uniform")
    assert run.rows.weights is None and "Weighted" not in describe(run)
    assert not training_transforms(run)
    assert Config().sample_weighting.type is None
    assert parse_args(["--sample_weighting.kappa=1", "--preset=demo"]).sample_weighting == SampleWeightingOptions(
        type="rabc", kappa=1
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sample_weighting.type=best"], "--sample_weighting.type=best: expected one of rabc, uniform"),
        (["--sample_weighting.head_mode=dense"], r"lacks the columns \['progress_dense'\]"),
        (["--sample_weighting.progress_path=hf://datasets/name"], "hf://datasets/USER/NAME/FILE, which"),
        (["--sample_weighting.progress_path=no.parquet"], "no.parquet: no such file; --sample_weighting.progress_path"),
        (['--sample_weighting.extra_params={"chunk_size": 3}'], r"extra_params has \['chunk_size'\]"),
        *(
            ([f'--sample_weighting.extra_params={{"fallback_weight": {value}}}'], "fallback_weight is .*at least 0")
            for value in ("NaN", "-3", '"x"', "true", "Infinity")
        ),
    ],
)
def test_invalid_sample_weighting_is_refused(setting, flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_of(setting, *flags)


def test_resume_requires_same_progress_file_and_revision(setting, tmp_path, monkeypatch):
    folder, root, base = setting
    table, downloads = pq.read_table(root / "sarm_progress.parquet"), []
    halved = table.set_column(2, "progress_sparse", pa.array(np.asarray(table["progress_sparse"]) / 2))
    pq.write_table(halved, tmp_path / "other.parquet")
    flags = "--sample_weighting.type=rabc", f"--sample_weighting.progress_path={tmp_path / 'other.parquet'}"
    saved = replace(run_of(setting, flags[0]).job.start, step=1)
    with pytest.raises(ValueError, match="the data is not what the run was started with .row_weights: was"):
        check_resumable(saved, run_of(setting, *flags).job.start)
    check_resumable(saved, run_of(setting, flags[0]).job.start)

    run = run_of(setting, flags[0])
    dataset = replace(run.config.dataset, repo_id="them/theirs", revision="f00d")
    monkeypatch.setattr(
        "vla_finetuning.plan.row_weights.hf_hub_download", lambda *a, **k: downloads.append((a, k)) or path
    )
    path = root / "sarm_progress.parquet"
    for named in (None, "hf://datasets/them/theirs/a/b.parquet", "hf://datasets/others/b.parquet/c"):
        weighting = replace(run.config.sample_weighting, progress_path=named)
        config = replace(run.config, dataset=dataset, sample_weighting=weighting)
        row_weights(config, run.rows.metas, run.policy.config, step=1)
    assert [(*a, k["revision"]) for a, k in downloads] == [
        ("them/theirs", "sarm_progress.parquet", "f00d"),
        ("them/theirs", "a/b.parquet", "f00d"),
        ("others/b.parquet", "c", None),
    ]


def test_mismatched_progress_is_refused(setting, tmp_path):
    table = pq.read_table(setting[1] / "sarm_progress.parquet")
    shifted = table.set_column(0, "index", pa.array(np.asarray(table["index"]) + 5))
    pq.write_table(shifted, tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="frame 64 is not in .*which has 60: of another one"):
        run_of(setting, f"--sample_weighting.progress_path={tmp_path / 'other.parquet'}")
    infinite = pa.array([0.0, *[-np.inf] * (len(table) - 1)])
    pq.write_table(table.set_column(2, "progress_sparse", infinite), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="other.parquet: progress_sparse of frame 1 is infinite, expected a number"):
        run_of(setting, f"--sample_weighting.progress_path={tmp_path / 'other.parquet'}")
    run = run_of(setting, "--sample_weighting.type=rabc")
    with pytest.raises(ValueError, match="needs a loss by rows, which .*pi05, .*have; the policy is of type act"):
        row_weights(run.config, run.rows.metas, SimpleNamespace(type="act"), step=1)
    both = f"--dataset.root={setting[1]},{shutil.copytree(setting[1], tmp_path / 'other')}"
    with pytest.raises(ValueError, match="knows frames by their index in one dataset, and there are 2"):
        run_of(setting, "--sample_weighting.type=rabc", both)
