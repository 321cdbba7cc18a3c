"""Which demo episodes are filmed, and which policies the demo evaluates."""

from types import SimpleNamespace

from tests.rollouts.test_player import act_config
from vla_finetuning.evaluation.demo_success import _select_films, is_demo


def test_films_cover_instructions_conditions_and_failures():
    def line(condition, seed, success):
        instruction = "red" if seed in (1, 2) else "blue"
        fields = {"condition": condition, "seed": seed, "instruction": instruction}
        return {**fields, "error": None, "success_once": success}

    lines = [line(name, seed, name == "a" and seed != 4) for seed in (4, 2, 3, 1) for name in ("trained", "untrained")]
    films = _select_films([(line, None) for line in lines])
    expected = [("trained", 1), ("untrained", 1), ("trained", 3), ("untrained", 3), ("trained", 2), ("trained", 4)]
    assert [(line["condition"], line["seed"]) for line, _ in films] == expected


def test_temporal_ensembling_skips_demo_evaluation():
    demo = SimpleNamespace(preset="demo", is_rehearsal=False)
    config = act_config(chunk_size=6, n_action_steps=1, temporal_ensemble_coeff=0.01)
    assert not is_demo(demo, SimpleNamespace(config=config))
    config.temporal_ensemble_coeff = None
    assert is_demo(demo, SimpleNamespace(config=config))
