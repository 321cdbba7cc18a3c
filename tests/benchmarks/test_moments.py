"""What is made of the episodes that policies with both kinds of moments played."""

import json

from benchmarks import moments


def found(seed, fp32, bf16):
    kinds = {"fp32": fp32, "bf16": bf16}
    return {"seed": seed, **{kind: {"successes": [c == "1" for c in won], "loss": 0.5} for kind, won in kinds.items()}}


def test_episodes_are_paired_over_all_seeds():
    compared = moments.paired([found(1, "1101", "1001"), found(2, "0000", "0001")])
    assert (compared.episodes, compared.both, compared.only_a, compared.only_b) == (8, 2, 1, 1)
    whole = moments.summary([found(1, "1101", "1001"), found(2, "0000", "0001")])
    assert [whole[kind]["successes"] for kind in moments.KINDS] == [3, 3] and whole["difference"]["estimate"] == 0
    assert whole["verdict"].startswith("cannot tell")


def test_it_goes_on_with_the_seeds_that_are_left(tmp_path, monkeypatch, capsys):
    path, asked = tmp_path / "found.json", []

    def of_seed(seed, steps, episodes):
        asked.append(seed)
        return found(seed, "11", "10")

    monkeypatch.setattr(moments, "of_seed", of_seed)
    for seeds in ("1", "1,2"):
        assert moments.main([f"--seeds={seeds}", "--episodes=2", f"--json={path}"]) == 0
    assert asked == [1, 2] and [of["seed"] for of in json.loads(path.read_text())["seeds"]] == [1, 2]
    assert "fp32    4 of 4" in capsys.readouterr().out
    assert moments.main(["--seeds=3", "--episodes=5", f"--json={path}"]) == 2
    assert "choose another file" in capsys.readouterr().err
