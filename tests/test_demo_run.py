"""The demo as `make demo` runs it, and the proof that it learned."""

import json

import pytest

import run_plan
import vla
from tests.datasets import make_dataset


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_plan, "CACHE_DIR", tmp_path_factory.mktemp("cache"))
        yield


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_demo_learns_to_see_and_to_listen(cache, ray_cluster, tmp_path, capsys):
    assert vla.main(["--preset", "demo", f"--output_dir={tmp_path / 'demo'}"]) == 0
    errors = json.loads((tmp_path / "demo" / "evaluation.json").read_text())
    mean, untrained = errors["trained"]["mean_action"]["mse"], errors["untrained"]["policy"]["mse"]
    trained, other = errors["trained"]["policy"]["mse"], errors["trained"]["other_instruction"]["mse"]
    assert trained < 0.5 * mean
    assert trained < 0.5 * untrained
    # Half of the mean action's error is what a policy can reach that is blind or deaf (demo.py).
    assert other > 2 * trained and other > 0.5 * mean
    out = capsys.readouterr().out
    assert "told another instruction (c)" in out and f"{trained:.4g}" in out
    assert "samples/s" in out and "waiting for data" in out  # a line per log step, as this is no terminal


def test_anybodys_dataset_gets_a_tiny_base(cache, tmp_path, capsys):
    root = make_dataset(tmp_path / "mine", state_dim=6, action_dim=5, cameras={"observation.images.left": (40, 64)})
    command = ["--preset", "demo", f"--dataset.root={root}", f"--output_dir={tmp_path / 'run'}", "--batch_size=8"]
    assert vla.main([*command, "--dry_run"]) == 0
    plan = capsys.readouterr().out
    assert "observation.images.left" in plan and "tiny_pi05" in plan
    assert not (tmp_path / "run").exists()
