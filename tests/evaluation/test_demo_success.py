"""What the demo says of its policy in the loop."""

from types import SimpleNamespace

from tests.rollouts.test_player import act_config
from vla_finetuning.evaluation.demo_success import LABELS, _select_films, is_demo, success_table
from vla_finetuning.evaluation.intervals import score


def test_the_table_counts_what_was_played_and_says_what_was_not():
    scores = {
        "trained": ([1, 1, 1, 0, None], {}),
        "other_instruction": ([0] * 5, {"went_where_told": 4}),
        "blindfolded": ([1, 1, 0, 0, 0], {"went_to_a_bin": 3}),
    }
    line = {"task": "t", "episode": 0, "success_at_end": 0}

    def lines_of(outcomes):
        for n, success in enumerate(outcomes):
            error = None if success is not None else "died"
            yield {**line, "seed": n, "initial_state": n, "success_once": success, "error": error}

    scores = {
        name: {**score(list(lines_of(outcomes))), **besides, "label": LABELS[name]}
        for name, (outcomes, besides) in scores.items()
    }
    _, trained, other, blindfolded = success_table(scores).splitlines()
    assert "3 of 4, 75.0 % (23.1 to 96.4); at the end 0 of 4" in trained and "; 3 of 5 asked for: 1 ended" in trained
    assert other.startswith("  trained, with the other instruction  0 of 5, 0.0 % (0.0 to 43.4); ")
    assert other.endswith("; 4 went to the bin that they were given")
    assert "(11.8 to 76.9); at the end 0 of 5" in blindfolded and blindfolded.endswith("; 3 went to a bin")


def test_shown_are_a_scene_of_each_instruction_under_every_condition_and_failures():
    def line(condition, seed, success):
        instruction = "red" if seed in (1, 2) else "blue"
        named = {"condition": condition, "seed": seed, "instruction": instruction}
        return {**named, "error": None, "success_once": success}

    lines = [line(name, seed, name == "a" and seed != 4) for seed in (4, 2, 3, 1) for name in ("trained", "untrained")]
    shown = [(found["condition"], found["seed"]) for found in _select_films(lines, ["trained", "untrained"])]
    assert shown == [("trained", 1), ("untrained", 1), ("trained", 3), ("untrained", 3), ("trained", 2), ("trained", 4)]


def test_a_policy_that_cannot_play_ends_without_the_scene():
    demo = SimpleNamespace(preset="demo", is_rehearsal=False)
    config = act_config(chunk_size=6, n_action_steps=1, temporal_ensemble_coeff=0.01)
    assert not is_demo(demo, SimpleNamespace(config=config))
    config.temporal_ensemble_coeff = None
    assert is_demo(demo, SimpleNamespace(config=config))
