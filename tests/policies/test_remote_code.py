"""Remote code of a policy: refused by default on every known path, run and logged where it is trusted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata

ROOT = Path(__file__).parents[2]
# Exploits that work if trusted and need no package beyond the lock file.
KNOWN_WAYS = {
    *("evo1.vlm_model_name", "gaussian_actor.vision_encoder_name", "pi0_fast.text_tokenizer_name"),
    *("pi0_fast.action_tokenizer_name", "smolvla.vlm_model_name", "xvla.tokenizer_name"),
    *("a step's default", "a step's default, in an export", "a step's option", "a step's option, in an export"),
    *("a tokenizer's name", "a tokenizer's name, in an export", "a tokenizer's files"),
    *("diffusers: a model", "diffusers: a pipeline's class"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote_code")
    return make_base(folder / "base", load_metadata(make_dataset(folder / "dataset", episodes=(3, 3))), chunk_size=5)


@pytest.fixture(scope="module")
def outcomes(base, tmp_path_factory):
    """Run every exploit in a process with a Hub token, trusted and untrusted; return results and log."""
    scratch = tmp_path_factory.mktemp("outcomes")
    environment = {**os.environ, "HF_TOKEN": "hf_secret", "HF_HOME": str(scratch / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.exploits", str(scratch), str(base)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "logged": done.stderr}


def test_remote_code_runs_only_if_trusted(outcomes):
    assert not [way for way, outcome in outcomes["untrusted"].items() if outcome["ran"]]
    assert KNOWN_WAYS | {"a class", "a step of robots", "an adapter's files"} <= outcomes["untrusted"].keys()
    # Each exploit works if trusted.
    assert {way for way, outcome in outcomes["trusted"].items() if outcome["ran"]} >= KNOWN_WAYS


def test_remote_code_error_names_code_and_trust_flag(outcomes):
    # pi0_fast itself hides this error; the plan refuses the type before.
    for way in KNOWN_WAYS - {"pi0_fast.action_tokenizer_name"}:
        text = " ".join(outcomes["untrusted"][way]["errors"])
        assert "code that comes with" in text and "--policy.trust_remote_code true" in text, way


def test_trust_does_not_admit_classes_and_robot_steps(outcomes):
    for way in ("a class", "a class, in an export", "a step of robots", "a step of robots, in an export"):
        assert not outcomes["trusted"][way]["ran"] and outcomes["trusted"][way]["errors"]


def test_trusted_code_is_logged_and_reaches_read_tasks(outcomes):
    """Unpickle a step with a code tokenizer in a process that has never imported the code."""
    assert "running Tokenizer of" in outcomes["logged"] and "tokenizing.py (sha256" in outcomes["logged"]
    assert outcomes["unpickled"] == "Prepare"
