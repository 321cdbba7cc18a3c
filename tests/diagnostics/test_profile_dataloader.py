"""The rate of the data engine and the verdict on the bottleneck, against given times."""

import argparse
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import util
import vla
from diagnostics import profile_dataloader, profile_step
from diagnostics.profile_dataloader import PRODUCED, RankFetches, StageClock, balance
from diagnostics.report import Environment
from tests import in_process
from vla_finetuning.plan.resolve import with_config
from vla_finetuning.training.worker import Worker

STORE = argparse.Namespace(peak_bytes=5 * 2**20, spilled_bytes=0)


def options_of(*argv):
    return profile_dataloader.parse_options(argv)[0]


def fetches(rank=0, **changes):
    """Fetches of one batch by a worker."""
    fields = {"warm_at_s": 0.0, "done_at_s": 1.0, "fetch_s": [1.0], "copy_s": None, "produced_at_s": [0.5], **changes}
    return RankFetches(rank=rank, environment=Environment.here(), **fields)


def summarise(run, ranks, cpus=1.0, options=None):
    return profile_dataloader.summarise(run, options or options_of(), ranks, {"decode": 1.0}, cpus, STORE)


TEN = ("--profile_batches=10", "--profile_warmup=3")


def pull(run, tmp_path, produced_at_s, *argv, before_batch=lambda: None):
    """Pull rows that were read at `produced_at_s(micro)` through the tool's worker loop, in this process."""
    options = options_of(*argv)
    pulled = profile_dataloader.pulled_run(run, options)
    pulled = with_config(pulled, replace(pulled.config, output_dir=str(tmp_path)))
    shard = in_process.Shard(pulled, before_batch, lambda micro, rows: {PRODUCED: np.full(rows, produced_at_s(micro))})
    profile_dataloader.pull(pulled, options.profile_warmup, Worker(torch.device("cpu"), shard))
    return RankFetches.model_validate_json((tmp_path / "rank-0.json").read_bytes()), options


@pytest.fixture
def clock(monkeypatch):
    """Time of the tool, and of the iterator that times waits, that passes only by `spend`."""
    clock = in_process.GivenTime()
    monkeypatch.setattr(profile_dataloader, "time", clock)
    monkeypatch.setattr(util, "time", clock)
    return clock


def test_loader_rate_equals_pace_of_slow_source(run, tmp_path, clock):
    rank, options = pull(run, tmp_path, lambda _: clock.time(), *TEN, before_batch=lambda: clock.spend(0.5))
    assert rank.fetch_s == [0.5] * 10
    assert rank.copy_s is None
    report = summarise(run, [rank], options=options)
    assert (report.rows, report.wall_s, report.rows_per_s) == (10 * 2, 5.0, 4.0)


def test_prebuffered_rows_are_not_counted(run, tmp_path, clock):
    """Seven of ten batches had been read before the clock started."""
    start = clock.time()

    def produced_at_s(micro):
        return start if micro < 10 else clock.time()

    rank, options = pull(run, tmp_path, produced_at_s, *TEN, before_batch=lambda: clock.spend(0.25))
    assert summarise(run, [rank], options=options).rows == 3 * 2
    with pytest.raises(ValueError, match="raise --profile_batches"):
        summarise(run, [rank.model_copy(update={"produced_at_s": [start] * 10})], options=options)


def test_rows_of_all_ranks_are_counted_until_the_last_finishes(run):
    ranks = [
        fetches(0, warm_at_s=100.0, done_at_s=108.0, produced_at_s=[99.0, 101.0, 103.0]),
        fetches(1, warm_at_s=102.0, done_at_s=112.0, produced_at_s=[101.0, 103.0, 104.0]),
    ]
    report = summarise(run, ranks, 2.0)
    assert (report.rows, report.wall_s, report.world_size) == (3 * run.config.batch_size, 10.0, 2)
    assert sum(drawn.count("<rect") for _, drawn in profile_dataloader.charts(report)[1:]) == sum(
        len(rank.fetch_s) for rank in report.ranks
    )
    printed = profile_dataloader.table(report)
    assert "rank 0" in printed and "rank 1" in printed
    assert "5 MiB at most, 0 MiB spilled" in printed


@pytest.mark.gate
def test_stage_times_cover_cpu_time_of_read_tasks(setting):
    """Most of the CPU's time is in one stage or another, and each stage has some."""
    run = in_process.resolved(setting, **{"dataset.image_size": "[56,56]"})
    data = vla.build_dataset(run)
    with in_process.tasks_here():
        profile_dataloader.time_stages(data, run.rows.last_row, run.config.batch_size)  # imports
        before = time.process_time()
        stages = profile_dataloader.time_stages(data, run.rows.last_row, run.config.batch_size)
        spent = time.process_time() - before
    assert stages.keys() == profile_dataloader.EXPLAINED.keys()
    assert all(seconds > 0 for seconds in stages.values()), stages
    # One task holds all the rows of this short run. Outside the stages its tasks are planned.
    assert 0.5 * spent < sum(stages.values()) * run.rows.last_row / 1000 < spent


def test_nested_stage_is_counted_once(clock):
    stages = StageClock()
    decode = stages.stage("decode")(lambda: clock.spend(4))

    def shuffle():
        clock.spend(1)
        decode()
        clock.spend(2)

    stages.stage("shuffle")(shuffle)()
    assert {name: seconds for name, seconds in stages.cpu_s.items() if seconds} == {"decode": 4, "shuffle": 3}


def test_time_stamps_are_removed_from_batches(run, clock):
    data = vla.build_dataset(run)
    stamped = profile_dataloader.Stamped(data.prepare)
    row = data.read(stream=(0, run.rows.last_row)).example()
    batch = stamped(row)
    assert batch.keys() == data.prepare(row).keys() | {PRODUCED}
    collate = profile_dataloader._StampReader(False)
    assert collate(batch).keys() == data.prepare(row).keys()
    assert collate.produced_at_s == {0: clock.time()}


# --- which side is the bottleneck -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step_report(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    settings = profile_step.Settings.of(profile_step.parse_options(["--profile_steps=2", "--profile_warmup=1"])[0], run)
    watched = profile_step.watched_run(run, settings)
    watched = with_config(watched, replace(watched.config, output_dir=str(folder)))
    in_process.train(watched, by=lambda run, worker, **o: profile_step.profile_worker(run, settings, worker, **o))
    rank = profile_step.RankProfile.model_validate_json((folder / "rank-0.json").read_bytes())
    return profile_step.summarise(run, settings, [rank])


def at(step_report, step_s, wait_s):
    wait = step_report.phases["data_wait"].model_copy(update={"share": wait_s / step_s})
    return step_report.model_copy(
        update={"step_s": {"untouched": [step_s] * 2}, "phases": step_report.phases | {"data_wait": wait}}
    )


@pytest.fixture(scope="module")
def loader_report(run):
    return summarise(run, [fetches(produced_at_s=[0.5] * 50)], 4.0)


def test_balance_names_the_bottleneck(step_report, loader_report):
    """The engine gives 100 rows/s with 4 CPUs; a step is 4 rows."""
    assert loader_report.rows_per_s == 100
    _, verdict, cpus = balance(loader_report, at(step_report, 0.04, 0.02))  # computes 0.02 s: 200 rows/s
    assert verdict == "The data engine is the bottleneck: the step could take 2.00x as much."
    assert cpus.startswith("8.00 CPUs for data per worker would balance them") and cpus.endswith("there are 4.00.")
    _, verdict, cpus = balance(loader_report, at(step_report, 0.16, 0.0))  # 25 rows/s
    assert verdict == "The step is the bottleneck: the data engine could feed 4.00x as much."
    assert cpus.startswith("1.00 CPUs for data per worker")
    assert balance(loader_report, at(step_report, 0.04, 0.0))[1] == "They are balanced."
    verdict = balance(loader_report, at(step_report, 2.0, 1.99))[1]  # a step that nearly only waits
    assert verdict == "The data engine is the bottleneck: the step could take 4.00x as much."
    other = at(step_report, 0.04, 0.0).model_copy(update={"config": step_report.config | {"batch_size": 64}})
    assert balance(loader_report, other)[-1] == "Beware: the two results differ in batch_size."
