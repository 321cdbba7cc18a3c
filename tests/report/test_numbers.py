"""Every number and curve of a run's report against a plain computation from its files."""

import json

import numpy as np
import pytest

from tests.pages import shown_on
from vla_finetuning.files import write_json
from vla_finetuning.report import page

RNG = np.random.default_rng(3)
STEPS = [3, 10, 17, 20, 31, 47]
TASKS, ROBOTS = ["push", "pull", "lift"], {"arm": 2, "gantry": 3}
WORKERS, FPS, CHUNK = 2, 10, 4
EVALUATED = {10: 0.5, 17: 0.2, 31: 0.4, 47: 0.45}  # held-out loss
BY_TASK = {31: [0.9, 0.1, 0.5], 47: [1.0, 0.8, 0.3]}  # the second task got worse, the first is the worst
SUCCESS = [(10, 5, 20, 0), (31, 9, 18, 2)]  # step, successes, episodes, errors


def some(*shape, low=0.1, high=9.0):
    return RNG.uniform(low, high, shape).round(4).tolist()


def metrics_lines():
    lines = []
    for step in STEPS:
        line = {"step": step, "epoch": some(), "samples": 16 * step, "lr": some(high=0.2), "loss": some()}
        line |= {"grad_norm": some(), "samples_per_s": some(), "step_s": some(low=2), "data_wait_s": some(high=2)}
        line |= {"mfu": None if step == 17 else some(high=0.9), "peak_memory_bytes": step << 28}
        line |= {"spilled_bytes": step << 27, "loss_by_robot": {"arm": some(), "gantry": None if step == 3 else some()}}
        if step in EVALUATED:
            line |= {"eval_loss": EVALUATED[step], "eval_loss_by_time": [None, *some(9)]}
            line |= {"eval_loss_by_task": dict(zip(TASKS, BY_TASK.get(step, [0.7, 0.6, 0.5]), strict=True))}
            line |= {"eval_loss_by_robot": {"arm": some(), "gantry": some()}, "eval_skipped": int(step == 17)}
        lines.append(line)
    return lines


def errors_of(size):
    def error():
        return {"mse": some(), "mae": some(size)}

    tasks = {task: {"frames": 5 + i, "mean_action": error(), "policy": error()} for i, task in enumerate(TASKS)}
    place = {"dataset_index": 0, "episode_index": 4, "frame_index": 15, "task": "push"}
    chunks = {"recorded": some(CHUNK, size), "predicted": some(CHUNK, size)}
    example = {**place, **chunks, "is_pad": [False] * (CHUNK - 1) + [True]}
    trained = {"frames": 18, "mean_action": error(), "policy": error(), "other_instruction": error()}
    trained |= {"by_task": tasks, "examples": [example]}
    return {"trained": trained, "untrained": {"policy": error()}}


LINES = metrics_lines()
EVALUATION = {"robots": {robot: errors_of(size) for robot, size in ROBOTS.items()}}
EVALUATION["closed_loop"] = {
    "arm/trained": {"label": "trained", "successes": 7, "episodes": 9, "interval": [0.45, 0.94], "errors": 1},
    "arm/blindfolded": {"label": "blind", "successes": 2, "episodes": 8, "interval": [0.07, 0.59], "went_to_a_bin": 5},
}
for _score in EVALUATION["closed_loop"].values():
    _score |= {"successes_at_end": _score["successes"] - 1, "interval_at_end": [0.03, 0.8]}


def g(value, digits=4):
    return f"{value:.{digits}g}"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the template values, the figures by label, and the text of the page."""
    folder = tmp_path_factory.mktemp("numbers")
    scaling = {"num_workers": WORKERS, "use_gpu": True}
    config = {"batch_size": 4, "grad_accum": 2, "scaling": scaling, "steps": 60}
    write_json(folder / "config.json", config)
    robots = {
        name: {"action_names": [f"{name}_{i}_rad" for i in range(n)], "actions_per_s": FPS}
        for name, n in ROBOTS.items()
    }
    write_json(folder / "run.json", {"steps": 60, "robots": robots})
    write_json(folder / "evaluation.json", EVALUATION)
    over_steps = [
        {"step": step, "successes": n, "episodes": m, "errors": errors, "interval": [n / 40, (n + 8) / 20]}
        | {"successes_at_end": n - 1, "interval_at_end": [n / 80, n / 10]}
        | {"by_task": [{"label": task, "successes": n - i, "episodes": m // 2} for i, task in enumerate(TASKS[:k])]}
        for k, (step, n, m, errors) in enumerate(SUCCESS, 1)
    ]
    attempts = [{"attempt": n, "resumed_from_step": step, "world_size": 2} for n, step in ((1, 0), (2, 17))]
    for name, lines in (("metrics", LINES), ("evaluations", over_steps[::-1]), ("attempts", attempts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 60')
    return shown_on(page, lambda: page.render_report(folder, []))


def totals():
    """Return seconds in steps and waiting; each line has means since the line before."""
    seconds = waited = before = 0
    for line in LINES:
        seconds += (line["step"] - before) * line["step_s"]
        waited += (line["step"] - before) * line["data_wait_s"]
        before = line["step"]
    return seconds, waited


def test_key_figures_match_log(report):
    shown, _, text = report
    seconds, waited = totals()
    rate = LINES[-1]["samples"] / seconds
    errors = {robot: EVALUATION["robots"][robot]["trained"] for robot in ROBOTS}
    assert shown["key_figures"] == [
        ("of 60 steps", "47"),
        ("loss", g(LINES[-1]["loss"])),
        *(
            (f"of the mean action's error, {robot}", f"{e['policy']['mse'] / e['mean_action']['mse']:.2f} ×")
            for robot, e in errors.items()
        ),
        ("success in the loop, arm, 1 not played to the end", "78%"),
        ("success in the loop at the end, arm, 1 not played to the end", "67%"),
        ("samples / s", g(rate, 3)),
        ("waiting for data", f"{100 * waited / seconds:.0f}%"),
    ]
    assert all(f"{name} {value}" in text for name, value in shown["key_figures"])
    assert dict(shown["facts"]) == {
        "Time": f"{round(seconds) // 60} min {round(seconds) % 60:02d} s in training steps, {16 * 47} samples",
    }


def points(key, name=None, factor=1.0):
    """(step, value) of the lines that have the key; NaN where it has no value of a name."""
    known = [(line["step"], line[key] if name is None else line[key].get(name)) for line in LINES if line.get(key)]
    return [[step, np.nan if value is None else factor * value] for step, value in known]


# Of each chart over steps, by its key: the curves, by their names.
CHARTS = {
    **{key: {key: points(key)} for key in ("epoch", "samples", "lr", "grad_norm", "samples_per_s", "step_s", "mfu")},
    "loss": {"loss": points("loss"), "eval_loss": [list(point) for point in EVALUATED.items()]},
    "data_wait_s": {"data_wait_s": points("data_wait_s")},
    "peak_memory_bytes": {"peak_memory_bytes": points("peak_memory_bytes", factor=2**-30)},
    "spilled_bytes": {"spilled_bytes": points("spilled_bytes", factor=2**-30)},
    "loss_by_robot": {
        **{robot: points("loss_by_robot", robot) for robot in ROBOTS},
        **{f"eval_{robot}": points("eval_loss_by_robot", robot) for robot in ROBOTS},
    },
    "eval_loss_by_task": {task: points("eval_loss_by_task", task) for task in TASKS},
    "eval_skipped": {"eval_skipped": [[step, int(step == 17)] for step in EVALUATED]},
}


def test_every_log_key_has_chart(report):
    shown, drawn, _ = report
    beside = {"step", "eval_loss", "eval_loss_by_robot"}  # what all are drawn over, and curves beside the loss
    keys = list(dict.fromkeys(key for line in LINES for key in line if key not in beside))
    assert [chart["title"] for chart in shown["charts"]] == keys
    assert CHARTS.keys() | {"eval_loss_by_time"} == set(keys)
    for key, expected in CHARTS.items():
        ((label, (axes,)),) = (
            (label, axes) for label, axes in drawn.items() if label.startswith(f"{key} over steps: ")
        )
        lines, marks = axes.lines[: len(expected)], axes.lines[len(expected) :]
        for line, (name, values) in zip(lines, expected.items(), strict=True):
            assert line.get_label() == name
            np.testing.assert_allclose(line.get_xydata(), values, rtol=1e-12)
            finite = [value for _, value in values if np.isfinite(value)]
            assert f"from {g(finite[0])} to {g(finite[-1])}, lowest {g(min(finite))}" in label
        assert [mark.get_xdata()[0] for mark in marks] == [17]  # where the run went on


def test_list_metric_is_drawn_at_first_and_last_step(report):
    _, drawn, _ = report
    ((axes,),) = (
        axes for label, axes in drawn.items() if label.startswith("eval_loss_by_time over time: step 10 from ")
    )
    by_time = {line["step"]: line["eval_loss_by_time"] for line in LINES if "eval_loss_by_time" in line}
    assert [line.get_label() for line in axes.lines] == ["step 10", "step 47"] and axes.get_xlabel() == "time"
    for line, step in zip(axes.lines, (10, 47), strict=True):
        np.testing.assert_allclose(line.get_xdata(), np.arange(0.05, 1, 0.1))
        np.testing.assert_allclose(line.get_ydata(), [np.nan, *by_time[step][1:]])


def test_held_out_errors_match_evaluation(report):
    shown, drawn, _ = report
    assert [robot for robot, _ in shown["held_out"]] == list(ROBOTS)
    for robot, section in shown["held_out"]:
        trained, untrained = EVALUATION["robots"][robot]["trained"], EVALUATION["robots"][robot]["untrained"]
        baseline, names = trained["mean_action"]["mse"], [f"{robot}_{i}_rad" for i in range(ROBOTS[robot])]
        mses = {"mean action": baseline, "before training": untrained["policy"]["mse"]}
        mses |= {"trained": trained["policy"]["mse"]}
        mses |= {"trained, with another instruction": trained["other_instruction"]["mse"]}
        by_task = {task: (of["frames"], of["policy"]["mse"]) for task, of in trained["by_task"].items()}
        worst = max(mse for _, mse in by_task.values())
        chunks = section.pop("chunks")
        assert section == {
            "frames": 18,
            "errors": [(name, g(mse), g(mse / baseline, 3)) for name, mse in mses.items()],
            "by_task": [
                (task, frames, g(mse), g(mse / baseline, 3), round(100 * mse / worst))
                for task, (frames, mse) in sorted(by_task.items(), key=lambda item: -item[1][1])
            ],
            "tasks": 3,
            "by_dimension": [
                (f"{name} (rad)", g(trained["policy"]["mae"][i], 3), g(trained["mean_action"]["mae"][i], 3))
                for i, name in enumerate(names)
            ],
        }
        (example,), axes = trained["examples"], drawn[f"Predicted and recorded actions of {', '.join(names)}"]
        assert [chunk["instructions"] for chunk in chunks] == ["“push”"] and len(axes) == len(names)
        for dimension, strip in enumerate(axes):
            for line, key in zip(strip.lines, ("recorded", "predicted"), strict=True):
                np.testing.assert_allclose(line.get_xdata(), np.arange(CHUNK) / FPS)
                values = np.array(example[key])[:, dimension]
                np.testing.assert_array_equal(line.get_ydata(), [*values[:-1], np.nan])
        assert axes[-1].get_xlabel() == "episode 4, frame 15"


def test_closed_loop_tables_match_evaluations(report):
    shown, drawn, _ = report
    section = dict(shown["closed_loop"])
    (axes,) = drawn["Success in the loop over steps: from 25% to 45%, at most 45%"]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[10, 25], [31, 45]])
    (bars,) = axes.collections
    ends = [[[10, 12.5], [10, 65]], [[31, 22.5], [31, 85]]]  # n / 40 and (n + 8) / 20
    np.testing.assert_allclose(bars.get_segments(), ends)
    assert section.pop("chart") and section == {
        "over_steps": [
            ["step 10", "5", "20", "25.0%", "12.5% to 65.0%", "20.0%", "6.2% to 50.0%", ""],
            ["step 31", "9", "18", "50.0%", "22.5% to 85.0%", "44.4%", "11.2% to 90.0%", "2 more ended in an error"],
        ],
        "by_task": {
            "head": ["task", "step 10", "step 31"],
            "rows": [["push", "5 of 10", "9 of 9"], ["pull", "–", "8 of 9"]],
        },
        "scores": [
            ["trained", "7", "9", "77.8%", "45.0% to 94.0%", "66.7%", "3.0% to 80.0%", "1 more ended in an error"],
            ["blind", "2", "8", "25.0%", "7.0% to 59.0%", "12.5%", "3.0% to 80.0%", "5 went to a bin"],
        ],
        "films": [],
    }


def test_page_has_no_untested_numbers(report):
    shown, drawn, _ = report
    compared = {"key_figures", "facts", "charts", "held_out", "closed_loop"}
    untested = {"title", "subtitle", "written", "held_out_expected", "attempts", "skipped", "looks", "plan"}
    untested |= {"config", "values", "has_datasets", "has_held_out"}
    assert shown.keys() == compared | untested and shown["values"] is None
    assert shown["subtitle"] == "Step 47 of 60." and len(drawn) == len(CHARTS) + 1 + len(ROBOTS) + 1
