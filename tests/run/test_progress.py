"""The log of a run, without Ray: what a line holds and how it is told."""

import json
from types import SimpleNamespace

from vla_finetuning.run import progress
from vla_finetuning.run.progress import MetricsLog, follow_progress


def test_rates_are_counted_per_sample_and_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "spilled_bytes", lambda: 0)
    per_sample = {"mfu": None, "frames_per_s": 3, "decoded_bytes_per_s": 2_000_000}
    config = SimpleNamespace(global_batch_size=8)
    run = SimpleNamespace(output_dir=tmp_path, config=config, rows_per_epoch=100, tokens_per_sample=5)
    log = MetricsLog(run, 0, per_sample)
    metrics = {"loss": 0.5, "samples_per_s": 20.0, "step_s": 0.4, "data_wait_s": 0.1}
    with follow_progress(tmp_path, steps=4):
        log.write(2, 1e-3, metrics)
    (line,) = [json.loads(text) for text in log.path.read_text().splitlines()]
    assert line["frames_per_s"] == 60 and line["decoded_bytes_per_s"] == 40_000_000 and line["mfu"] is None
    assert line["samples"] == 16 and line["epoch"] == 0.16
    assert "20.0 samples/s (60 frames, 40.0 MB), 25% waiting for data" in capsys.readouterr().out
