"""The page of a run: success before, on the way and after, and where the time went."""

import json

from tests.pages import check_page
from vla_finetuning.files import write_json
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.report import page
from vla_finetuning.rl.learning_page import write_grpo_report


def write(folder, lines):
    write_json(folder / "config.json", {"env_type": "two_bins", "env_options": ["--episode_length=30"]})
    write_json(folder / "run.json", {"steps": 4, "plan": "<the plan>", "policy": {"base": "imitated<script>"}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page_tells_the_story(tmp_path):
    seconds = dict.fromkeys(("step_s", "play_s", "update_s", "inference_s", "waiting_s"), 1.5)
    outcomes = {"episodes": 10, "interval": [0.2, 0.7], "successes_at_end": 1, "interval_at_end": [0.1, 0.2]}
    held_out = {f"held_out_{name}": value for name, value in outcomes.items()}
    lines = [{"step": 0, "held_out_successes": 3, **held_out}]
    lines += [{"step": i, "episodes": 8 * i, "success": 0.1 * i, "kl": 0.01, **seconds} for i in (1, 2, 3, 4)]
    lines[-1] |= {"held_out_successes": 9, **held_out}
    write(tmp_path, lines)
    score = {"episodes": 20, "interval": [0.1, 0.5], "successes_at_end": 4, "interval_at_end": [0.1, 0.2]}
    scores = {
        "before": {"successes": 5, "label": "before", **score},
        "after": {"successes": 19, "label": "after", **score},
    }
    write_json(tmp_path / "evaluation.json", {"closed_loop": scores, "films": []})
    page = write_grpo_report(tmp_path).read_text()
    check_page(page)
    assert "Iteration 4 of 4, 32 episodes." in page and "95.0%" in page and "20.0% to 70.0%" in page
    assert page.count("<svg") == 3 and "<script>" not in page and "&lt;the plan&gt;" in page
    assert "1.50" in page


def test_a_run_that_has_only_begun_has_a_page_too(tmp_path):
    write(tmp_path, [])
    assert "Nothing has been logged yet" in write_grpo_report(tmp_path).read_text()


def test_the_page_of_vla_is_refused_for_a_run_of_grpo(tmp_path, capsys):
    write(tmp_path, [{"step": 0}])
    write_json(tmp_path / "config.json", GrpoConfig().to_json())
    assert page.main([str(tmp_path)]) == 2
    assert f"`python -m vla_finetuning.rl.learning_page {tmp_path}` writes its page" in capsys.readouterr().err
    assert page.main([str(tmp_path)], write=write_grpo_report) == 0 and (tmp_path / "report.html").is_file()
