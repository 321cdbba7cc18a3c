"""Compare every number and curve of a page of grpo.py with a plain computation, from made-up files of a run's folder.

A chart, a table or a sentence with a number without a computation here fails the test.
"""

import base64
import json

import numpy as np
import pytest

from tests.pages import shown_on
from vla_finetuning.files import write_json
from vla_finetuning.rl import learning_page

RNG = np.random.default_rng(4)
HELD_OUT = {0: (3, 12), 2: (0, 12), 4: (7, 11), 7: (12, 12)}  # by iteration: successes of so many episodes
ITERATIONS = range(1, 8)
UNKNOWN = {"kl": 5, "clipped": 5, "grad_norm": 5, "explained_variance": 1}  # an iteration that lacks it
RESUMED = [4, 6]
SCORES = {  # before and after: successes, episodes, interval, errors
    "before": (61, 1_200, (0.2, 0.41), 0),
    "after": (1_100, 1_198, (0.55, 0.93), 2),
}
HEAD = ["successes", "episodes", "success", "interval", "at the end", "interval"]
FILMS = {"before": (7, 41), "after": (7, 1)}  # seed, steps

# What is said of a chart: its axis, whether that begins at zero, and the curves by their names: key and factor.
CHARTS = {
    "Success": ("episodes / %", True, {"held out": ("held_out", 100), "while exploring": ("success", 100)}),
    "Groups with different returns": ("groups / %", True, {"": ("mixed_groups", 100)}),
    "Divergence of an iteration’s updates": ("KL", True, {"": ("kl", 1)}),
    # As `Totals` has it, of the steps that the clip cut.
    "Steps that the clip left without a gradient": ("steps / %", True, {"": ("clipped", 100)}),
    "Variance of the returns that the critic explains": ("share", False, {"": ("explained_variance", 1)}),
    "Gradient norm before clipping, mean": ("gradient norm", True, {"": ("grad_norm", 1)}),
    "Time of an iteration": (
        "s",
        True,
        {"inference": ("inference_s", 1), "updates": ("update_s", 1), "waiting": ("waiting_s", 1)},
    ),
}
SECONDS = {
    "an iteration": "step_s",
    "episodes": "play_s",
    "probabilities before the updates": "score_s",
    "updates": "update_s",
    "held-out episodes": "held_out_s",
    "inference": "inference_s",
    "waiting": "waiting_s",
    "simulation": "simulation_s",
    "rendering": "rendering_s",
}
SHARES = ("success", "mixed_groups", "clipped", "explained_variance")


def line_of(iteration):
    """Make up a line of metrics.jsonl; that before the first iteration has times and held-out episodes alone."""
    line = {"step": iteration, **{key: RNG.uniform(1, 40) for key in SECONDS.values()}}
    if iteration:
        line |= {key: RNG.uniform() for key in SHARES} | {"kl": RNG.uniform(0, 1e-2), "grad_norm": RNG.uniform(1, 9)}
        line |= {"explained_variance": RNG.uniform(-1, 1), "episodes": 1_024 * iteration, "return": RNG.uniform()}
        line |= {key: None for key, unknown in UNKNOWN.items() if unknown == iteration}
    if iteration in HELD_OUT:
        line |= dict(zip(("held_out_successes", "held_out_episodes"), HELD_OUT[iteration], strict=True))
        line |= {"held_out_interval": [0.1 * iteration, 0.9], "held_out_successes_at_end": HELD_OUT[iteration][0] // 2}
        line |= {"held_out_interval_at_end": [0.05, 0.1 * iteration], "held_out_scenes": 2}
    return line


LINES = [line_of(iteration) for iteration in (0, *ITERATIONS)]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return what the page shows (`shown_on`)."""
    folder = tmp_path_factory.mktemp("numbers")
    write_json(folder / "config.json", {"env_type": "two_bins", "env_options": ["--fps=10"], "seed": 3})
    write_json(folder / "run.json", {"steps": 9, "plan": "the plan", "policy": {"base": "imitated"}})
    (folder / "films").mkdir()
    (folder / "films" / "before.webp").write_bytes(b"moving")
    closed_loop = {
        name: {"label": f"{name} learning", "successes": n, "episodes": m, "interval": interval}
        | {"successes_at_end": n // 2, "interval_at_end": [low / 2 for low in interval]}
        | ({"errors": errors} if errors else {})
        for name, (n, m, interval, errors) in SCORES.items()
    }
    films = [
        {"title": name, "file": f"{name}.webp", "problem": None, "instruction": "go", "seed": seed, "steps": steps}
        | {"success": name == "after"}
        for name, (seed, steps) in FILMS.items()
    ]
    write_json(folder / "evaluation.json", {"closed_loop": closed_loop, "films": films})
    starts = [{"attempt": n, "resumed_from_step": step} for n, step in enumerate((0, *RESUMED))]
    for name, lines in (("metrics", LINES), ("attempts", starts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return shown_on(learning_page, lambda: learning_page.write_grpo_report(folder).read_text())


def percent(share):
    return f"{100 * share:.1f}%"


def check_table(text, head, rows):
    """Check that a reader sees the head and the rows, one after the other."""
    assert " ".join(cell for row in (head, *rows) for cell in row if cell) in text


def test_success(report):
    shown, _, text = report
    rows = [
        [f"{name} learning", f"{n:,}", f"{m:,}", percent(n / m), f"{percent(low)} to {percent(high)}"]
        + [percent(n // 2 / m), f"{percent(low / 2)} to {percent(high / 2)}"]
        + [f"{errors} more ended in an error" if errors else ""]
        for name, (n, m, (low, high), errors) in SCORES.items()
    ]
    films = dict(shown["closed_loop"])
    uris = [film.pop("uri") for film in films["films"]]
    assert uris == ["data:image/webp;base64," + base64.b64encode(b"moving").decode(), None]
    assert [film.pop("problem").endswith("after.webp is gone") for film in films["films"]] == [False, True]
    assert films == {
        **{"scores": rows, "over_steps": [], "by_task": None, "chart": None},
        "films": [
            {"title": "before", "success": False, "text": "“go”, seed 7, 41 steps"},
            {"title": "after", "success": True, "text": "“go”, seed 7, 1 step"},
        ],
    }
    check_table(text, ["policy", *HEAD], rows)
    assert "before no success “go”, seed 7, 41 steps" in text and "after, “go”, seed 7, 1 step: not shown." in text


def test_held_out_episodes(report):
    shown, _, text = report
    rows = [
        [str(iteration), str(wins), str(n), percent(wins / n), f"{percent(0.1 * iteration)} to 90.0%"]
        + [percent(wins // 2 / n), f"5.0% to {percent(0.1 * iteration)}", "of 2 distinct scenes"]
        for iteration, (wins, n) in HELD_OUT.items()
    ]
    assert shown["held_out"] == rows
    check_table(text, ["iteration", *HEAD], rows)


def curve(key, factor):
    """Return the iterations of which it is known, and its values."""
    if key == "held_out":
        return list(HELD_OUT), [factor * wins / n for wins, n in HELD_OUT.values()]
    known = [line for line in LINES if line.get(key) is not None]
    return [line["step"] for line in known], [factor * line[key] for line in known]


def test_curves(report):
    shown, drawn, text = report
    assert [chart["title"] for chart in shown["charts"]] == list(CHARTS) and len(drawn) == len(CHARTS)
    for (title, (axis, from_zero, curves)), (label, (axes,)) in zip(CHARTS.items(), drawn.items(), strict=True):
        lines, marks, said = axes.lines[: len(curves)], axes.lines[len(curves) :], []
        for line, (name, of) in zip(lines, curves.items(), strict=True):
            iterations, values = curve(*of)
            assert line.get_xdata().tolist() == iterations
            assert line.get_label() == name or not name
            np.testing.assert_allclose(line.get_ydata(), values, rtol=1e-12)
            said.append(f"{name or title}: {values[0]:.3g} to {values[-1]:.3g}")
        assert label == f"{title} over iterations. {'; '.join(said)}, {axis}"
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("iteration", axis)
        assert (axes.get_ylim()[0] == 0) == from_zero
        assert [mark.get_xdata()[0] for mark in marks] == RESUMED  # where the run went on
        legend = axes.get_legend()
        assert [entry.get_text() for entry in legend.get_texts()] == list(curves) if len(curves) > 1 else not legend
        assert title in text
    assert "Dashed lines mark where the run went on after a failure." in text


def test_times(report):
    """Take means over iterations, without what comes before the first; `Times.gather` takes them over workers."""
    shown, _, text = report
    rows = [[name, f"{sum(line[key] for line in LINES[1:]) / 7:.2f}"] for name, key in SECONDS.items()]
    assert shown["seconds"] == rows
    check_table(text, ["seconds"], rows)
    assert "Simulation and rendering are the sums over all processes; the others are means over the workers." in text


def test_nothing_else_on_the_page_is_a_number_of_the_run(report):
    shown, _, text = report
    compared = {"closed_loop", "held_out", "charts", "seconds", "subtitle", "attempts"}
    assert shown.keys() == compared | {"title", "written", "facts", "plan", "config"}
    assert shown["subtitle"] == "Iteration 7 of 9, 7,168 episodes." and shown["subtitle"] in text
    assert shown["facts"] == [("Policy", "imitated"), ("Environment", "two_bins --fps=10")]
    assert [one["resumed_from_step"] for one in shown["attempts"]] == [0, *RESUMED]
