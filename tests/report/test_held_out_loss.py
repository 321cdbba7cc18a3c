"""The held-out loss in the report: from lines of the log to charts and a table."""

from tests.pages import Page
from vla_finetuning.report.held_out_loss import held_out_loss

HOSTILE = "<script>alert('task')</script>"


def line(step, eval_loss=None, a=0.0, b=0.0):
    found = {"step": step, "loss": 1 / step}
    if eval_loss is not None:
        found |= {"eval_loss": eval_loss, "eval_loss_by_task": {"reach": a, HOSTILE: b}}
        found |= {"eval_loss_by_time": [a, None, b]}
    return found


def test_what_got_worse_since_the_best_comes_first():
    measured = held_out_loss([line(1), line(2, 0.9, 1.0, 0.8), line(3, 0.4, 0.5, 0.3), line(4), line(5, 0.5, 0.2, 0.8)])
    head, rows = measured["by_task"]
    assert head == ["instruction", "step 2", "step 3", "step 5"]
    assert rows == [[HOSTILE, "0.8", "0.3", "0.8"], ["reach", "1", "0.5", "0.2"]]
    assert [chart["title"][:9] for chart in measured["charts"]] == ["Loss, tra", "Held-out "]
    for chart in measured["charts"]:
        assert not Page(chart["svg"]).all("script")
    assert "from 0.9 to 0.5, lowest 0.4" in measured["charts"][0]["svg"]


def test_a_run_without_evaluations_has_none():
    assert held_out_loss([line(1), line(2)]) is None and held_out_loss([]) is None


def test_of_other_policies_there_is_the_curve_alone():
    measured = held_out_loss([{"step": 1, "loss": 1.0, "eval_loss": 0.5}, {"step": 2, "loss": 1.0, "eval_loss": None}])
    assert len(measured["charts"]) == 1 and measured["by_task"] is None
