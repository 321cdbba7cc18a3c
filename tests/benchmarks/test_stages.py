"""Benchmarks of whole runs: each program once, failures as they are, and what several seeds make together."""

import argparse

import pytest

from benchmarks import recap, stages
from benchmarks.stages import Failed, Stages, score, together
from vla_finetuning.evaluation.intervals import wilson
from vla_finetuning.files import read_json


def test_a_stage_runs_once_and_what_failed_runs_again(tmp_path, capsys):
    given, done = [], tmp_path / "one" / "result"

    def program(flags):
        given.append(flags)
        if len(given) == 1:
            return 3
        done.write_text("done")
        return 0

    own = Stages(tmp_path / "one", "seed 5:")
    with pytest.raises(Failed, match="3"):
        own.call("first", program, {"steps": 2}, done=done)
    assert own.seconds == {}
    for _ in range(2):
        own.call("first", program, {"steps": 2, "output_dir": "x"}, done=done)
    assert given == [["--steps=2"], ["--steps=2", "--output_dir=x"]]
    assert own.seconds.keys() == {"first"} and capsys.readouterr().out.count("seed 5: first") == 2


def test_scores_of_seeds_are_one_of_all_episodes():
    lines = [{"success_once": n % 3 == 0, "error": None} for n in range(10)] + [{"success_once": True, "error": "died"}]
    one = score(lines)
    assert one == {"successes": 4, "episodes": 10, "interval": wilson(4, 10)}
    other = {"successes": 30, "episodes": 30, "interval": wilson(30, 30)}
    assert together([one, other]) == {"successes": 34, "episodes": 40, "interval": wilson(34, 40)}
    found = recap.found([{"seed": 7, "success": {"imitation": one}}, {"seed": 8, "success": {"imitation": other}}])
    text = recap.table(found).splitlines()
    assert [line.split()[4] for line in text[1:]] == ["7", "8", "all"] and "34 of 40" in text[3]


@pytest.mark.parametrize("status", [0, 4])
def test_a_result_is_written_when_all_stages_ran(tmp_path, monkeypatch, status):
    monkeypatch.setattr(stages.cluster, "connect", lambda: None)
    options = argparse.Namespace(json=tmp_path / "result.json", folder=tmp_path, seeds="1", second=True, alone=False)

    def work():
        if status:
            raise Failed(status)
        return {"runs": [1]}

    assert stages.run(options, work, lambda found: f"{found}") == status
    assert options.json.exists() == (status == 0)
    if status == 0:
        written = read_json(options.json)
        assert written["command"].endswith(" --seeds 1 --second") and written["settings"]["seeds"] == "1"
        assert written["runs"] == [1] and written["environment"]["cores"]
