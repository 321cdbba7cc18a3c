"""The log of a run, without Ray: its lines, how they are printed, and the limit of skipped rows."""

import json
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray._private import internal_api

from tests import in_process
from tests.buckets import other_process
from vla_finetuning.buckets.mirror import as_path, pull, push
from vla_finetuning.files import append_line
from vla_finetuning.run import progress
from vla_finetuning.run.attempts import start_attempt
from vla_finetuning.run.folder import attempts, skipped_episodes
from vla_finetuning.run.progress import check_skipped, follow_progress, keep_metrics, keep_skipped
from vla_finetuning.training.callbacks import MetricsLines, RowLog, SuccessInLoop
from vla_finetuning.training.worker import RayWorker, Worker


def test_success_of_each_evaluation_is_logged_once(tmp_path):
    state = SimpleNamespace(
        run=SimpleNamespace(job=SimpleNamespace(output_dir=tmp_path)), worker=Worker(in_process.CPU)
    )
    for state.step, steps in ((0, (10, 20, 30, 40)), (20, (30, 40))):
        resumed, hooks = state.step, (SuccessInLoop(), MetricsLines(state))
        hooks[0].on_start(state)
        for state.step in steps:
            if state.step == 20 and not resumed:
                for played, successes in ((10, 3), (15, 0)):
                    line = {"step": played, "successes": successes, "episodes": 4, "interval": [0.3, 0.9]}
                    line |= {"successes_at_end": 1, "interval_at_end": [0.1, 0.7]}
                    with open(tmp_path / "evaluations.jsonl", "a") as file:
                        file.write(json.dumps(line) + "\n")
            logged = {}
            for hook in hooks:
                hook.on_log(state, logged)
        lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        played = {line["step"]: (line["success_step"], line["success"]) for line in lines if "success" in line}
        assert played == {20: (10, 0.75), 30: (15, 0.0)} and lines[1]["success_low"] == 0.3
        assert (lines[1]["success_at_end"], lines[1]["success_at_end_high"]) == (0.25, 0.7)


def test_truncated_log_line_is_not_joined_to_the_next(tmp_path):
    """What a full disk or a power cut leaves of attempts.jsonl, or of a rank's rows."""
    start_attempt(tmp_path, 0, 2)
    for name in ("attempts.jsonl", "rows/rank0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with open(tmp_path / name, "a") as file:
            file.write(f'{{"attempt": 0, "step": {"1" * 100_000}')
    assert start_attempt(tmp_path, 5, 2) == 1 and start_attempt(tmp_path, 7, 2) == 2
    assert [line["resumed_from_step"] for line in attempts(tmp_path)] == [0, 5, 7]
    for attempt in (1, 2):
        run = SimpleNamespace(job=SimpleNamespace(output_dir=tmp_path), rows=SimpleNamespace(epochs_of=np.zeros_like))
        state = SimpleNamespace(run=run, worker=Worker(in_process.CPU), attempt=SimpleNamespace(number=attempt))
        state.schedule = SimpleNamespace(step_of=lambda number: 5 + number)
        RowLog(state).on_batch(attempt, dict.fromkeys(("dataset_index", "index", "position"), torch.tensor([3])), {})
    lines = [json.loads(line) for line in (tmp_path / "rows" / "rank0.jsonl").read_text().splitlines()]
    assert [line["attempt"] for line in lines] == [1, 2]


def test_progress_reports_starts_and_restarts_once(tmp_path, capsys):
    """From a plan to its first log line was a minute of silence, which the estimate of the time left then counted."""

    def log(**line):
        line = {"loss": 0.5, "samples_per_s": 20.0, "frames_per_s": 60.0, "decoded_bytes_per_s": 40.0, **line}
        append_line(tmp_path / "metrics.jsonl", json.dumps(line))

    slow = {"step_s": 21.0, "data_wait_s": 20.0}
    with follow_progress(tmp_path, steps=62):
        start_attempt(tmp_path, 0, 2)
        log(step=2, **slow)
    with follow_progress(tmp_path, steps=62):  # what was printed is not printed again
        log(step=4, step_s=2.0, data_wait_s=1.0)
    with follow_progress(tmp_path, steps=62):  # a restart from an earlier step
        start_attempt(tmp_path, 2, 2)
        keep_metrics(tmp_path, 2)
        time.sleep(3 * progress.POLL_S)
        log(step=4, **slow)
    out = capsys.readouterr().out
    assert out.count("step 4/62  loss") == 2
    first, second = out.split("\n", 2)[:2]
    assert first == "started      2 training processes from step 0: building the model and reading the first batch"
    assert second.startswith("step 2/62  loss")


@pytest.mark.parametrize(
    ("done", "positions", "share", "ends"),
    [
        (2, range(8), 0.01, True),  # of the first 16 rows, and 8 % of an epoch
        (2, [3], 0.01, False),  # 6 % of the rows so far, but 1 % of an epoch
        (2, [3, 3, 3], 0.01, False),  # read again after a failure
        (2, [3, *range(20, 90)], 0.01, False),  # what is read ahead is not trained on yet
        (100, range(0, 800, 50), 0.01, True),
        (100, range(0, 800, 50), 0.02, False),
    ],
)
def test_skipped_rows_above_the_limit_end_the_run(tmp_path, done, positions, share, ends):
    trained = {"rows": 8 * done, "rows_per_epoch": 100}
    lines = [{"root": "/data/arm", "episode_index": 7, "positions": [p], "error": "it is truncated"} for p in positions]
    (tmp_path / "skipped.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not ends:
        check_skipped(tmp_path, share, **trained)
        return
    count = len([p for p in positions if p < 8 * done])
    message = (
        rf"dataset /data/arm: {count} of the first {8 * done} rows .*max_skipped=0.01.* 7: it is truncated.*resume"
    )
    with pytest.raises(ValueError, match=message):
        check_skipped(tmp_path, share, **trained)


def test_resume_forgets_skipped_rows_it_reads_again(tmp_path):
    run = in_process.resolved(in_process.make_setting(tmp_path), log_freq=1, **{"dataset.on_error": "skip"})
    run.job.output_dir.mkdir()
    line = {"root": "/data/arm", "episode_index": 7, "positions": [5], "error": "it is truncated"}
    log = run.job.output_dir / "skipped.jsonl"
    log.write_text(json.dumps(line) + "\n")
    in_process.train(run)  # the line is of rows that this attempt reads again
    assert log.read_text() == ""
    shard = in_process.Shard(run, before_batch=lambda: log.write_text(json.dumps(line) + "\n"))
    with pytest.raises(ValueError, match="1 of the first 8 rows "):  # steps of 4 rows: not after the first
        in_process.train(run, shard)
    log.write_text("".join(json.dumps({**line, "positions": rows}) + "\n" for rows in ([3, 5], [6])))
    keep_skipped(run.job.output_dir, 4)
    assert [json.loads(text)["positions"] for text in log.read_text().splitlines()] == [[3]]
    with log.open("a") as file:
        file.write('{"root": "/da')  # its process was killed: the next line must not follow on it
    keep_skipped(run.job.output_dir, 4)
    assert [json.loads(text)["positions"] for text in log.read_text().splitlines()] == [[3]]


def test_rank_0_reads_rows_skipped_by_a_process_of_the_last_attempt(bucket_url):
    folder, reader = as_path(bucket_url), other_process(bucket_url)
    skipped, line = reader / "skipped-node-1.jsonl", {"root": "/data/arm", "error": "it is truncated"}
    earlier = {**line, "episode_index": 7}  # without the positions, which earlier versions did not write
    for number in ({}, {"positions": [3, 5]}):
        append_line(skipped, json.dumps(earlier | number))
    push(skipped)
    pull(folder)
    keep_skipped(folder, 4)
    pull(folder)
    assert skipped_episodes(folder) == [earlier, {**earlier, "positions": [3]}]
    append_line(skipped, json.dumps({**line, "episode_index": 8, "positions": [6]}))
    push(skipped)
    pull(folder)
    assert skipped_episodes(folder)[-1]["positions"] == [6]


def test_spilled_bytes_is_none_if_a_node_does_not_answer(monkeypatch):
    """Until Ray has noticed, it is asked for the bytes that were spilled: nobody is at its port, or nobody answers."""
    state = SimpleNamespace()
    monkeypatch.setattr(internal_api, "get_state_from_address", lambda address: state)
    monkeypatch.setattr(progress.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    monkeypatch.setattr(progress, "SPILLED_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (9, silent.getsockname()[1]):
            node = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
            state.node_table = lambda node=node: [node]
            started = time.monotonic()
            assert RayWorker.spilled_bytes(SimpleNamespace()) is None
            assert time.monotonic() - started < 30  # Ray's own limit is 60 s


def test_training_error_is_raised_if_progress_log_fails(tmp_path, monkeypatch):
    def fails(path):
        raise OSError("stale file handle")

    with pytest.raises(ArithmeticError), follow_progress(tmp_path, steps=2):
        monkeypatch.setattr(progress, "read_lines", fails)
        raise ArithmeticError
