"""What is made of the episodes that policies played, one trained as ever and one with options changed."""

import json

from benchmarks import changed_step

CHANGE = ["--change", "train.moments=bf16"]


def found(seed, plain, changed):
    kinds = {"plain": plain, "changed": changed}
    return {"seed": seed, **{kind: {"successes": [c == "1" for c in won], "loss": 0.5} for kind, won in kinds.items()}}


def test_episodes_are_paired_over_all_seeds():
    compared = changed_step.paired([found(1, "1101", "1001"), found(2, "0000", "0001")])
    assert (compared.episodes, compared.both, compared.only_a, compared.only_b) == (8, 2, 1, 1)
    whole = changed_step.summary([found(1, "1101", "1001"), found(2, "0000", "0001")])
    assert [whole[kind]["successes"] for kind in changed_step.KINDS] == [3, 3] and whole["difference"]["estimate"] == 0
    assert whole["verdict"].startswith("cannot tell")


def test_it_goes_on_with_the_seeds_that_are_left(tmp_path, monkeypatch, capsys):
    path, asked = tmp_path / "found.json", []

    def of_seed(seed, options):
        asked.append(seed)
        return found(seed, "11", "10")

    monkeypatch.setattr(changed_step, "of_seed", of_seed)
    for seeds in ("1", "1,2"):
        assert changed_step.main([*CHANGE, f"--seeds={seeds}", "--episodes=2", f"--json={path}"]) == 0
    assert asked == [1, 2] and [of["seed"] for of in json.loads(path.read_text())["seeds"]] == [1, 2]
    assert "plain   4 of 4" in capsys.readouterr().out
    assert changed_step.main([*CHANGE, "--seeds=3", "--episodes=5", f"--json={path}"]) == 2
    assert "choose another file" in capsys.readouterr().err
