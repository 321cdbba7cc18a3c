"""The demo, as the notebook runs it, and the proof that it learned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.pages import check_page
from tests.robot.gantry import Gantry, GantryConfig
from tests.serving.servers import PORTS, InProcess, served
from vla_finetuning.envs.two_bins_scene import CAMERAS, EPISODE_LENGTH
from vla_finetuning.evaluation.demo_success import LABELS
from vla_finetuning.options.command_line import parse_serve
from vla_finetuning.options.schedule import DEMO_STEPS
from vla_finetuning.serving.server import resolve_service

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def demo(tmp_path_factory, no_ray_cluster):
    """README.ipynb from top to bottom by papermill, with all the steps of `make demo`: a folder with what it left."""
    folder = tmp_path_factory.mktemp("demo")
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "OUTPUT_DIR": str(folder),
        "VLA_CACHE": str(folder / "cache"),
    }
    environment["MAX_TRAIN_STEPS"] = str(DEMO_STEPS)
    script = ROOT / "ci" / "smoke_notebook.sh"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.ray
@pytest.mark.demo
@pytest.mark.timeout(900)
def test_demo_policy_uses_images_and_instructions(demo):
    errors = json.loads((demo / "run" / "evaluation.json").read_text())
    mean, untrained = errors["trained"]["mean_action"]["mse"], errors["untrained"]["policy"]["mse"]
    trained, other = errors["trained"]["policy"]["mse"], errors["trained"]["other_instruction"]["mse"]
    assert trained < 0.5 * mean
    assert trained < 0.5 * untrained
    # Half of the mean action's error is what a policy can reach that is blind or deaf (demo.py).
    assert other > 2 * trained and other > 0.5 * mean


@pytest.mark.ray
@pytest.mark.demo
def test_demo_success_rates_in_simulation(demo):
    scores = json.loads((demo / "run" / "evaluation.json").read_text())["closed_loop"]
    assert {name: score["episodes"] for name, score in scores.items()} == dict.fromkeys(LABELS, 60)
    assert scores["trained"]["successes"] >= 57 and scores["untrained"]["successes"] <= 3
    assert scores["trained"]["successes_at_end"] >= 56
    assert scores["other_instruction"]["successes"] <= 3 and scores["other_instruction"]["went_where_told"] >= 57
    assert scores["blindfolded"]["successes"] <= 40  # at best it guesses one of two
    assert scores["blindfolded"]["successes"] <= scores["blindfolded"]["went_to_a_bin"]
    # The report has the table, and a scene of each instruction under every condition.
    page = check_page((demo / "run" / "report.html").read_text())
    for score in scores.values():
        assert f"{score['label']} {score['successes']} {score['episodes']} " in page.text
    assert sum(image["src"].startswith("data:image/webp") for image in page.all("img")) >= 2 * len(LABELS)
    assert "not shown" not in page.text


@pytest.mark.ray
@pytest.mark.demo
def test_notebook_shows_progress_and_errors(demo):
    cells = nbformat.read(demo / "README.ipynb", as_version=4).cells
    printed = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))
    trained = json.loads((demo / "run" / "evaluation.json").read_text())["trained"]["policy"]["mse"]
    assert "trained, with another instruction (c)" in printed and f"{trained:.4g}" in printed
    # A line per log step, as a notebook is no terminal.
    assert "step 900/900" in printed and "samples/s" in printed and "waiting for data" in printed
    assert (demo / "run" / "pretrained_model" / "model.safetensors").is_file()


@pytest.mark.ray
@pytest.mark.demo
def test_lerobot_robot_client_succeeds_as_evaluate(demo, tmp_path, monkeypatch):
    """The client leaves out the first action of later chunks, and draws the noise of a step, not of a decision."""
    monkeypatch.chdir(tmp_path)  # robot_client makes a folder for logs
    from lerobot.async_inference.robot_client import async_client

    policy, scenes = demo / "run" / "pretrained_model", range(1000, 1012)
    flags = [f"--policy.path={policy}", "--use_gpu=false"]
    play = ["--env.type=two_bins", f"--seed={scenes[0]}", f"--eval.n_episodes={len(scenes)}", "--eval.videos=0"]
    command = [sys.executable, str(ROOT / "evaluate.py"), *flags, *play, f"--output_dir={tmp_path / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "out" / "episodes.jsonl").read_text().splitlines())
    evaluated = {line["seed"]: line["success_once"] for line in lines}

    camera = {"type": "opencv", "index_or_path": 0, "width": 640, "height": 480, "fps": 30}
    cameras = dict.fromkeys(CAMERAS, camera)
    client = ["client", "--robot.type=gantry", f"--robot.cameras={json.dumps(cameras)}", "--policy_type=tiny_pi05"]
    client += ["--actions_per_chunk=10", "--fps=30", "--chunk_size_threshold=0", "--aggregate_fn_name=latest_only"]
    service, commanded = resolve_service(parse_serve([*flags, *PORTS])), {}
    monkeypatch.setattr(Gantry, "ACTIONS", EPISODE_LENGTH)
    with served(service, InProcess(service)) as addresses:
        for scene in scenes:
            monkeypatch.setattr(Gantry, "SCENE", scene)
            instruction, where = Gantry(GantryConfig()).instruction, f"--server_address=127.0.0.1:{addresses.grpc}"
            name = f"--pretrained_name_or_path=any?session={scene}"
            monkeypatch.setattr(sys, "argv", [*client, where, name, f"--task={instruction}"])
            with pytest.raises(KeyboardInterrupt):
                async_client()
            commanded[scene] = Gantry.connected.succeeded
    assert commanded == evaluated == dict.fromkeys(scenes, True)
