"""Closed-loop results on a run's page against evaluation.json and evaluations.jsonl."""

import base64
import json

import pytest

from tests.pages import check_page
from vla_finetuning.files import write_json
from vla_finetuning.options.programs import GrpoConfig
from vla_finetuning.report import page
from vla_finetuning.report.page import write_report

HOSTILE = "<script>alert('x')</script>"
ERRORS = {
    "frames": 1,
    **dict.fromkeys(("mean_action", "policy"), {"mse": 1.0, "mae": [1.0]}),
    "other_instruction": None,
}
WEBP = b"RIFF\x1a\x00\x00\x00WEBPVP8L\r\x00\x00\x00/\x00\x00\x00\x10\x07\x10\x11\x11\x88\x88\xfe\x07\x00"


@pytest.fixture
def folder(tmp_path):
    film = {"instruction": HOSTILE, "seed": 1003, "steps": 14, "problem": None}
    score = {"label": "trained", "successes": 57, "episodes": 60, "interval": [0.863, 0.983], "errors": 2}
    score |= {"successes_at_end": 54, "interval_at_end": [0.8, 0.95], "scenes": 30, "went_where_told": 59}
    films = [
        {**film, "title": "trained", "file": "a.webp", "success": True, "texts": ["go", "go", HOSTILE]},
        {**film, "title": "deaf", "file": "../../b.webp", "success": False},
        {**film, "title": "gone", "file": "c.webp", "success": False},
        {**film, "title": "odd", "file": None, "success": False, "problem": "ended in another state"},
    ]
    (tmp_path / "films").mkdir()
    for name in ("a.webp", "b.webp"):
        (tmp_path / "films" / name).write_bytes(WEBP)
    write_json(tmp_path / "evaluation.json", {"trained": ERRORS, "closed_loop": {"trained": score}, "films": films})
    return tmp_path


def test_page_shows_scores_and_films_of_evaluation(folder):
    page = check_page(write_report(folder, []).read_text())
    notes = "59 followed the given instruction; of 30 distinct scenes; 2 more ended in an error"
    assert f"trained 57 60 95.0% 86.3% to 98.3% 90.0% 80.0% to 95.0% {notes}" in page.text
    assert "success in the loop, 2 not played to the end 95%" in page.text
    images = [image for image in page.all("img") if image.get("class") == "film"]
    # Of the files in its own folder: a folder's index names no others.
    assert [base64.b64decode(image["src"].removeprefix("data:image/webp;base64,")) for image in images] == [WEBP, WEBP]
    assert images[0]["alt"] == f"“{HOSTILE}”, seed 1003, 14 steps; the policy wrote “go”, then “{HOSTILE}”"
    assert "wrote" not in images[1]["alt"]
    assert "trained success" in page.text and "deaf no success" in page.text
    assert "c.webp is gone" in page.text and "not shown. ended in another state" in page.text


def test_symlinked_film_is_not_embedded(folder, tmp_path):
    """The target may be private."""
    (folder / "secret").write_bytes(WEBP + b"private")
    (folder / "films/a.webp").unlink()
    (folder / "films/a.webp").symlink_to(folder / "secret")
    page = check_page(write_report(folder, []).read_text())
    assert len([image for image in page.all("img") if image.get("class") == "film"]) == 1
    assert "a.webp is a link" in page.text


def test_grpo_page_shows_held_out_success_by_step(tmp_path):
    write_json(tmp_path / "config.json", GrpoConfig(env_type="two_bins").to_json())
    assert "Nothing has been logged yet" in check_page(write_report(tmp_path).read_text()).text
    write_json(tmp_path / "run.json", {"steps": 3, "plan": HOSTILE, "datasets": []})
    lines = [{"step": 0, "play_s": 1.5}]
    lines += [{"step": step, "loss": 0.5, "success": 0.1 * step, "play_s": 2.5, "kl": None} for step in (1, 2, 3)]
    played = {0: (3, 0.25, 2), 3: (12, 1.0, 9)}
    for step, (wins, least, at_end) in played.items():
        lines[step] |= {"held_out_successes": wins, "held_out_episodes": 12, "held_out_interval": [least, 1.0]}
        lines[step] |= {"held_out_successes_at_end": at_end, "held_out_interval_at_end": [0.0, least]}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    score = {"label": "after learning", "successes": 19, "episodes": 20, "interval": [0.764, 0.991]}
    score |= {"successes_at_end": 10, "interval_at_end": [0.3, 0.7]}
    write_json(tmp_path / "evaluation.json", {"closed_loop": {"after": score}, "films": []})
    assert page.main([str(tmp_path)]) == 0
    shown = check_page((tmp_path / "report.html").read_text())
    rows = [
        f"step {step} {wins} 12 {wins / 12:.1%} {least:.1%} to 100.0% {at_end / 12:.1%} 0.0% to {least:.1%}"
        for step, (wins, least, at_end) in played.items()
    ]
    assert " ".join(rows) in shown.text and "All 3 steps done." in shown.text
    assert "after learning 19 20 95.0% 76.4% to 99.1% 50.0% 30.0% to 70.0%" in shown.text
    assert "success in the loop 95% success in the loop at the end 50%" in shown.text
    labels = [svg["aria-label"] for svg in shown.all("svg")]
    assert "success over steps: from 0.1 to 0.3, lowest 0.1" in labels
    assert not any(label.startswith("held_out_interval") for label in labels)
    assert "Success in the loop over steps: from 25% to 100%, at most 100%" in labels
    assert "kl: not measured in this run." in shown.text and "ataset" not in shown.text.partition("Configuration")[0]
