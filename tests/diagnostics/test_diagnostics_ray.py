"""The profilers through Ray Data and Ray Train, with two workers."""

import json

import numpy as np
import pytest

from diagnostics import profile_dataloader, profile_step
from diagnostics.profile_dataloader import LoaderReport
from diagnostics.step_report import COMMUNICATION_STEPS, StepReport
from tests import in_process

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    setting = in_process.make_setting(tmp_path_factory.mktemp("two"))
    return in_process.flags(setting, **{"scaling.num_workers": 2, "scaling.cpus_per_worker": 0.5}), setting[0]


@pytest.fixture(scope="module")
def step_json(argv, ray_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    flags = ["--profile_steps=10", "--profile_warmup=4", f"--profile_step_json={folder / 'step.json'}"]
    flags += [f"--profile_trace={folder / 'trace.json'}", f"--profile_html={folder / 'step.html'}"]
    assert profile_step.main([*argv[0], *flags]) == 0
    return folder / "step.json"


def test_step_report_of_two_ranks(step_json, argv):
    report = StepReport.read(step_json)
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert report.global_batch_size == 2 * 2 * 2
    for rank in report.ranks:
        total = sum(map(sum, rank.timed.exposed.values())) / report.settings.steps
        assert 0 < total <= np.mean(rank.block_step_s["timed"]) * (1 + 1e-9)  # phases are within the blocks
        assert len(rank.communication.total_s) == COMMUNICATION_STEPS
        assert all(seconds > 0 for seconds in rank.communication.total_s)
        assert rank.checkpoint_s > 0
    means = [np.mean(rank.timed.full["backward"]) for rank in report.ranks]
    assert report.phases["backward"].slowest_rank == int(np.argmax(means))
    assert sorted(entry.name for entry in argv[1].iterdir()) == ["base", "dataset"]


def test_trace_contains_steps_and_cluster_tasks(step_json):
    events = json.loads((step_json.parent / "trace.json").read_text())["traceEvents"]
    steps = [event for event in events if event.get("name") == "backward" and event.get("cat") == "user_annotation"]
    tasks = [event for event in events if str(event.get("cat", "")).startswith("task::")]
    assert steps and tasks
    assert min(task["ts"] for task in tasks) <= steps[-1]["ts"]
    assert (step_json.parent / "step.html").read_text().startswith("<!doctype html>")


def test_loader_report_of_two_workers(step_json, argv, capsys):
    loader_json = step_json.parent / "loader.json"
    flags = ["--profile_batches=40", "--profile_warmup=4", f"--against={step_json}"]
    assert profile_dataloader.main([*argv[0], *flags, f"--profile_dataloader_json={loader_json}"]) == 0
    report = LoaderReport.read(loader_json)
    assert [len(rank.fetch_s) for rank in report.ranks] == [40, 40]
    assert 0 < report.rows <= 2 * 40 * 2
    assert report.spilled_bytes == 0 and report.object_store_peak_bytes > 0
    assert all(seconds > 0 for stage, seconds in report.stages.items() if stage != "resize")
    printed = capsys.readouterr().out
    assert "The step, never waiting, takes" in printed and "CPUs for data per worker would balance them" in printed
    assert sorted(entry.name for entry in argv[1].iterdir()) == ["base", "dataset"]
