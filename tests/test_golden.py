"""The comparison of golden runs: a planted difference is found and named. Nothing is run."""

import copy
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.golden.__main__ import show
from tests.golden.records import compare, record


@pytest.fixture
def folder(tmp_path):
    """What a run leaves."""
    lines = [{"step": step, "loss": 0.1 + step, "grad_norm": float("nan"), "step_s": 0.5} for step in (2, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rank0.jsonl").write_text('{"step": 1, "rows": [[0, 3]]}\n{"step": 2, "rows": [[0, 1]]}\n')
    checkpoint = tmp_path / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"progress": {"step": 4, "rows": 8, "loss": 0.3, "eval_loss": null}}')
    for name in ("checkpoints/step_00000004/trainable", "trained"):
        save_file(
            {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2)}, tmp_path / f"{name}.safetensors"
        )
    return tmp_path


@pytest.fixture
def before(folder):
    return record(folder)


def difference(before, after, *ignored):
    equal, message = compare(before, after, ignored)
    assert not equal
    return message


def test_golden_comparison_ignores_times(folder, before):
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace('"step_s": 0.5', '"step_s": 0.7'))
    equal, message = compare(json.loads(json.dumps(before)), record(folder))
    assert equal and message == "equal: 2 lines of metrics, 1 checkpoints, 4 tensors, 2 lines of rows"


def test_golden_comparison_reports_last_bit_of_a_loss(before):
    after = copy.deepcopy(before)
    loss = after["metrics"][1]["loss"]
    after["metrics"][1]["loss"] = float(np.nextafter(loss, 9))
    message = difference(before, after)
    assert "step 4: loss 4.1 before, 4.1000000000000005 now" in message
    assert compare(before, after, ["loss"])[0]


def test_golden_comparison_reports_missing_and_new_metrics(before):
    after = copy.deepcopy(before)
    after["metrics"][0]["l1_loss"] = 1.0
    equal, message = compare(before, after)
    assert equal and message.endswith("; new in metrics: l1_loss")
    assert "step 2: l1_loss 1.0 before, absent now" in difference(after, before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("a", np.float32([[0, 1, 2], [3, 4, np.nextafter(np.float32(5), 9)]])), ("b", np.ones((1, 2)))],
    ids=["bit", "shape"],
)
def test_golden_comparison_reports_changed_tensors(folder, before, name, value):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2), name: value}
    save_file(tensors, folder / "trained.safetensors")
    message = difference(before, record(folder))
    assert f"tensors, trained.safetensors, {name}: " in message and "more" not in message


def test_golden_comparison_reports_changed_row_logs(folder, before):
    log = folder / "rows" / "rank0.jsonl"
    log.write_text(log.read_text().replace("[0, 1]", "[0, 2]"))
    assert "rows, rank0.jsonl, entry 2: " in difference(before, record(folder))
    log.unlink()
    assert "rows, rank0.jsonl: there before, absent now" in difference(before, record(folder))


def test_golden_comparison_reports_missing_lines_and_checkpoints(folder, before):
    log, state = folder / "metrics.jsonl", next(folder.glob("checkpoints/*/state.json"))
    log.write_text(log.read_text().splitlines()[0] + "\n")
    assert "metrics, step 4: a line before, none now" in difference(before, record(folder))
    state.write_text(state.read_text().replace('"rows": 8', '"rows": 9'))
    log.write_text("".join(json.dumps(line) + "\n" for line in before["metrics"]))
    assert "saves, entry 1, rows: 8 before, 9 now" in difference(before, record(folder))


def test_golden_comparison_fails_on_any_difference(before, capsys):
    after = copy.deepcopy(before)
    after["saves"] = []
    named = ["first", "second", "third", "fourth"]
    assert show(dict.fromkeys(named[:3], before) | {"fourth": None}, dict.fromkeys(named, before), named, []) == 0
    records = {"first": before, "second": after, "third": {"error": "ValueError: no"}, "fourth": before}
    assert show(dict.fromkeys(named, before), records, named, []) == 1
    lines = capsys.readouterr().out.splitlines()[4:]
    assert [line.split()[1] for line in lines] == ["equal:", "DIFFERENT:", "FAILED", "equal:"]
    assert "ValueError: no" in lines[2]
