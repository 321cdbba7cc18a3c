"""Shared parts of the diagnostics: GPUs, batches and scratch folders."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from diagnostics import audit_syncs, find_unused_params, profile_step
from diagnostics.step_report import Settings
from diagnostics.tool import host_batches, scratch_run
from tests import in_process
from tests.buckets import Bucket, other_process, runs_bucket
from vla_finetuning.buckets.mirror import address, pull, push
from vla_finetuning.plan.resolve import with_config
from vla_finetuning.run import cluster
from vla_finetuning.training.stream import RankSchedule

MASK = "observation.language.attention_mask"


def test_gpus_are_counted_on_cluster_nodes(setting, monkeypatch, capsys):
    """A head node has none: tools that step in the driver's process are refused there before the run loads."""
    scalings, runs = [], []

    def gpus_found(scaling, preset):
        scalings.append(scaling.use_gpu)
        return 1

    def examine(run, *_):
        runs.append(run.job.use_gpu)
        raise ValueError("no further")

    monkeypatch.setattr(cluster, "gpus_found", gpus_found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(profile_step.Settings, "of", lambda options, run: examine(run))
    monkeypatch.setattr(audit_syncs, "audit", examine)
    monkeypatch.setattr(find_unused_params, "with_stub_stats", lambda run: pytest.fail("the run was loaded"))
    flags = [flag for flag in in_process.flags(setting) if "use_gpu" not in flag]
    for tool, message in (
        (profile_step, "no further"),
        (audit_syncs, "no further"),
        (find_unused_params, "this machine has no GPU: start it on a GPU node, or give --scaling.use_gpu false"),
    ):
        assert tool.main(flags) == 2 and message in capsys.readouterr().err
    assert scalings == [None] * 3 and runs == [True] * 2


def test_host_batches_are_cut_and_weighted_as_in_training(run):
    weights = np.arange(run.rows.metas[0].total_frames, dtype=np.float32)
    schedule = RankSchedule(run.config.batch_size, run.rows.block_rows, 0, 1, 1)
    (uncut,) = host_batches(replace(run, policy=replace(run.policy, prompts=())), schedule, 1)
    needed = int(uncut[MASK].sum(1).max())
    assert needed < uncut[MASK].shape[1] and "row_weight" not in uncut
    shorter = replace(run.policy, prompts=(needed, uncut[MASK].shape[1]))
    (cut,) = host_batches(replace(run, policy=shorter, rows=replace(run.rows, weights=weights)), schedule, 1)
    assert cut[MASK].shape == (run.config.batch_size, needed)
    ratio = cut["row_weight"] / weights[uncut["index"]]
    assert ratio[0] > 0 and np.allclose(ratio, ratio[0])


def test_bucket_run_is_profiled_in_removed_scratch_folder(run):
    """Nodes share its folder, and nothing remains there."""
    options, _ = profile_step.parse_options(["--profile_warmup=1", "--profile_steps=2", "--trace=trace.json"])
    with runs_bucket():
        bucket = Bucket("s3://runs")
        bucket.write("mine/config.json", b"{}")
        of_bucket = with_config(run, replace(run.config, output_dir="s3://runs/mine"))
        settings = Settings.of(options, of_bucket)
        with scratch_run(of_bucket) as scratch:
            watched = profile_step.watched_run(scratch, settings)
            folder = watched.job.output_dir
            assert address(folder).startswith("s3://runs/mine-scratch-")

            def profile(run, worker, **options):
                profile_step.profile_worker(run, settings, worker, **options)

            in_process.train(watched, by=profile)
            assert profile_step.RankProfile.model_validate_json((folder / "rank-0.json").read_bytes()).rank == 0
            assert json.loads((folder / profile_step.TRACE_NAME).read_bytes())["traceEvents"]
        assert [name for name in bucket.names() if "mine" in name] == ["mine/config.json"]


def test_scratch_folder_of_bucket_root_run_is_in_bucket(run):
    with runs_bucket(), scratch_run(with_config(run, replace(run.config, output_dir="s3://runs"))) as scratch:
        folder = scratch.job.output_dir
        worker = other_process(address(folder))
        (worker / "rank-0.json").write_text("{}")
        push(worker)
        pull(folder)
        assert (folder / "rank-0.json").read_text() == "{}"
