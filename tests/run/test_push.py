"""Pushing the trained policy, against a stand-in of the Hub on loopback and with huggingface_hub's own client."""

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import vla
from tests.buckets import Bucket, runs_bucket
from tests.hub import READ_ONLY, TOKEN, PushHub
from tests.loopback import serving
from tests.policies.test_loading import STATS
from tests.tiny import make_config, make_policy
from vla_finetuning import program
from vla_finetuning.files import append_line, write_json
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.environment import ENVIRONMENT_NAME
from vla_finetuning.options.programs import Config, GrpoConfig
from vla_finetuning.plan.preflight import Examined
from vla_finetuning.plan.resolve import Run
from vla_finetuning.policies.pipelines import make_processors
from vla_finetuning.policies.processors import TOKENIZER_FOLDER
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.run import folder as run_folder
from vla_finetuning.run import push
from vla_finetuning.training import plan

REPO = "me/pick"
HOSTILE = "arm | <script>alert(1)</script> `x`"


@pytest.fixture
def server(monkeypatch):
    """The Hub, with a token that may write; the client's constants are read at import, so they are set here."""
    server = PushHub()
    with serving(server):
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Large files by LFS over HTTP, not by the Hub's own chunk protocol, which needs servers behind the Hub.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def finished(tmp_path):
    """The folder of a finished run, as far as pushing reads it."""
    folder = tmp_path / "secret_place" / "run7"
    (folder / "pretrained_model").mkdir(parents=True)
    config = Config(steps=40, policy_repo_id=REPO, policy_path="/home/me/secret_place/base")
    config.dataset.root, config.output_dir, config.lr = "s3://secret-bucket/a/bins", str(folder), 2.5e-5
    error = {"mse": 0.5, "mae": [0.1]}
    dataset = {"root": config.dataset.root, "name": config.dataset.root, "episodes": 7, "frames": 54, "fps": 10}
    files = {
        "config.json": config.to_json(),
        "run.json": {
            "datasets": [{**dataset, "robot_type": HOSTILE, "train_episodes": 5, "eval_episodes": 2, "weight": 2.5}],
            "policy": {
                **{"type": "pi05", "base": "/home/me/secret_place/base", "revision": None},
                **{"parameters": 12345, "trainable": 678},
            },
            "versions": {"code": "0123abc-dirty", "torch": "2.11.0"},
        },
        "evaluation.json": {
            "trained": {
                **{"frames": 31, "mean_action": {**error, "mse": 2.0}, "policy": error},
                "other_instruction": None,
            },
            "untrained": {"policy": {**error, "mse": 3.0}},
        },
        "pretrained_model/config.json": {"type": "pi05", "tags": ["bins"], "license": None},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    line = {"step": 40, "epoch": 1.25, "loss": 0.0625, "lr": 1e-6, "samples": 320}
    (folder / "metrics.jsonl").write_text(json.dumps({**line, "step": 20}) + "\n" + json.dumps(line) + "\n")
    (folder / "pretrained_model" / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


def test_push_uploads_the_export_with_a_model_card(server, finished):
    assert push.check_push(REPO, True) == f"{server.endpoint}/{REPO}" and server.private[REPO] is True
    assert push.push_policy(finished, REPO).endswith("/commit/" + "c" * 40)
    policy = finished / "pretrained_model"
    assert server.files[REPO] == {path.name: path.read_bytes() for path in policy.iterdir()}
    assert set(server.files[REPO]) == {"README.md", "config.json", "model.safetensors"}

    text = server.files[REPO]["README.md"].decode()
    assert yaml.safe_load(text.split("---")[1]) == {
        **{"library_name": "lerobot", "pipeline_tag": "robotics"},
        "tags": ["bins", "lerobot", "pi05", "robotics"],
    }
    for part in (
        "fine-tuned from `base`",
        "12,345 parameters 678 were trained",
        "`bins`",
        "7 episodes, 54 frames at 10 fps",
        "5 episodes, 2 held out; weight 2.5",
        "over 31 held-out frames",
        "| mean action | 2 | 1.000 |\n| before training | 3 | 1.500 |\n| trained | 0.5 | 0.250 |\n",
        "40 optimizer steps, 320 samples, 1.25 epochs",
        "0.0625",
        "`0123abc-dirty`",
        '"lr": 2.5e-05',
        'get_policy_class("pi05").from_pretrained("me/pick")',
    ):
        assert part in text, part
    # No private folders and buckets; names of others are escaped.
    assert "secret" not in text and "`arm / <script>alert(1)</script> 'x'`" in text
    assert TOKEN not in text


def test_card_lists_success_once_and_at_end(finished):
    assert "Success in the loop" not in push.model_card(finished, REPO)
    config = json.loads((finished / "config.json").read_text())
    write_json(finished / "config.json", {**config, "env_type": "two_bins"})
    score = {"successes": 7, "episodes": 8, "interval": [0.5, 0.9]}
    score |= {"successes_at_end": 3, "interval_at_end": [0.1, 0.6]}
    for step in (20, 40):
        append_line(finished / "evaluations.jsonl", json.dumps({"step": step, **score, "successes": step // 8}))
    evaluation = json.loads((finished / "evaluation.json").read_text())
    write_json(finished / "evaluation.json", {**evaluation, "closed_loop": {"trained": {"label": "<b>", **score}}})
    rows = [row for row in push.model_card(finished, REPO).splitlines() if "10.0 to 60.0 %" in row]
    ends = "50.0 to 90.0 % | 3 of 8 | 10.0 to 60.0 % |"
    assert "At a latency of 0 s: the environment stood still" in push.model_card(finished, REPO)
    assert rows == [f"| `<b>` | 7 of 8 | {ends}", f"| `step 40, two_bins` | 5 of 8 | {ends}"]


def test_card_describes_the_exported_step(finished):
    config = json.loads((finished / "config.json").read_text())
    write_json(finished / "config.json", {**config, "env_type": "two_bins"})
    score = {"interval": [0.1, 0.6], "successes_at_end": 3, "interval_at_end": [0.1, 0.6]}
    for step in (30, 40):
        line = {"step": step, "successes": step // 10, "episodes": 8, **score}
        append_line(finished / "evaluations.jsonl", json.dumps(line))
    write_json(finished / "pretrained_model" / "robot.json", {"step": 30})
    card = push.model_card(finished, REPO)
    assert "30 optimizer steps (logged to step 20), 320 samples" in card
    assert "`step 30, two_bins` | 3 of 8" in card and "step 40" not in card


def test_push_uploads_exported_files_only(server, finished, caplog):
    server.private[REPO] = True
    policy = finished / "pretrained_model"
    for name in ("extra.json", ".env", "notes/todo.md", "tokenizer/tokenizer.json", "tokenizer/deep/vocab.json"):
        (policy / name).parent.mkdir(exist_ok=True)
        (policy / name).write_text("{}")
    (policy / "tokenizer" / "code.py").touch()
    os.mkfifo(policy / "policy_preprocessor.json")
    push.push_policy(finished, REPO)
    assert set(server.files[REPO]) == {"README.md", "config.json", "model.safetensors", "tokenizer/tokenizer.json"}
    left_out = ".env, extra.json, notes, policy_preprocessor.json, tokenizer/code.py, tokenizer/deep"
    assert f"{policy}: not pushed, because no export writes it: {left_out}\n" in caplog.text


def test_push_includes_every_exported_file(tmp_path):
    """Including the tokenizer's files as transformers writes them, and the simulator's options."""
    policy, config = make_policy(2), make_config(2)
    folder = tmp_path / "pretrained_model"
    save_pretrained(policy, *make_processors(None, config, STATS), folder)
    vocabulary = {"<pad>": 0, "pick": 1}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary)), pad_token="<pad>")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
    (folder / ENVIRONMENT_NAME).write_text("{}")
    files, others = push.exported_files(folder)
    assert others == [] and set(files) == {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {"model.safetensors", "tokenizer/tokenizer.json", "policy_postprocessor.json"} < set(files)
    assert len([name for name in files if name.endswith(".safetensors")]) > 1


@pytest.mark.filterwarnings("ignore:.*to a meta parameter")
def test_code_of_the_card_loads_policy_on_lerobots_device(finished, monkeypatch):
    """`meta` stands in for an accelerator: what is exported names no device, and LeRobot takes the best one."""
    folder = finished / "pretrained_model"
    save_pretrained(make_policy(2), *make_processors(None, make_config(2), STATS), folder)
    code = push.model_card(finished, str(folder)).split("```python\n")[1].split("```")[0]
    monkeypatch.setattr("lerobot.configs.policies.auto_select_torch_device", lambda: torch.device("meta"))
    names = {}
    exec(code, names)
    observation = {"observation.state": torch.zeros(4), "observation.images.0": torch.zeros(3, 28, 28), "task": "go"}
    tensors = [value for value in names["preprocessor"](observation).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 4 and names["policy"].config.device == "meta"
    assert {tensor.device.type for tensor in [*tensors, *names["policy"].parameters()]} == {"meta"}


@pytest.mark.parametrize(
    "name", ["extra.json", "README.md", "config.json", "tokenizer/vocab.json", "tokenizer", "more", "."]
)
def test_push_refuses_symlinks_and_leaves_their_target(server, finished, tmp_path, name):
    """Otherwise a writer of the folder could publish or overwrite private files of the user."""
    server.private[REPO] = True
    policy, secret = finished / "pretrained_model", tmp_path / "secret"
    (policy / "tokenizer").mkdir()
    path = policy / name
    if name in ("tokenizer", "more", "."):  # a folder
        shutil.copytree(policy, secret)
        shutil.rmtree(path, ignore_errors=True)
    else:
        secret.write_text((policy / "config.json").read_text())
        path.unlink(missing_ok=True)
    before = {p: p.read_bytes() for p in [secret, *secret.rglob("*")] if p.is_file()}
    path.symlink_to(secret)
    with pytest.raises(ValueError, match=f"^{path} is a link"):
        push.push_policy(finished, REPO)
    assert REPO not in server.files and path.is_symlink()
    assert {p: p.read_bytes() for p in [secret, *secret.rglob("*")] if p.is_file()} == before


def test_card_replaces_symlink_created_meanwhile(server, finished, tmp_path, monkeypatch):
    server.private[REPO] = True
    secret, card = tmp_path / "secret", finished / "pretrained_model" / "README.md"
    secret.write_text("mine")
    make_card = push.model_card

    def slow(*args):
        card.symlink_to(secret)
        return make_card(*args)

    monkeypatch.setattr(push, "model_card", slow)
    push.push_policy(finished, REPO)
    assert secret.read_text() == "mine" and not card.is_symlink()
    assert server.files[REPO]["README.md"] == card.read_bytes()


def test_card_names_commits_of_hub_repositories(finished):
    config, run = (json.loads((finished / name).read_text()) for name in ("config.json", "run.json"))
    config["dataset"] |= {"root": None, "repo_id": "lab/bins", "revision": "d" * 40}
    run["policy"] |= {"base": "lerobot/pi05_base", "revision": "e" * 40}
    (finished / "config.json").write_text(json.dumps(config))
    (finished / "run.json").write_text(json.dumps(run))
    (finished / "evaluation.json").unlink()
    card = ModelCard(push.model_card(finished, REPO))
    assert card.data.base_model == "lerobot/pi05_base" and card.data.datasets == ["lab/bins"]
    assert f"`lerobot/pi05_base` at commit `{'e' * 40}`" in card.text
    assert f"`lab/bins` at commit `{'d' * 40}`" in card.text
    assert "\nNot measured.\n" in card.text

    (finished / "config.json").write_text(json.dumps({**config, "policy_path": None, "policy_type": "pi05"}))
    assert "A `pi05` policy, trained from random weights." in push.model_card(finished, REPO)


def test_card_omits_private_paths(finished):
    config = json.loads((finished / "config.json").read_text())
    config["recap"] = {**config.get("recap", {}), "labels": "s3://acme-secret/labels.parquet"}
    config["dataset"] |= {
        "episode_weights": "@/home/alice/weights.csv",
        "episodes": {"s3://acme-secret/robot": [0, 1], "gs://acme-secret/other": [2]},
        "exclude_episodes": [3, 4],
    }
    config |= {"env_options": ["--env.assets=/mnt/acme"], "steps": 1234}
    (finished / "config.json").write_text(json.dumps(config))
    card = push.model_card(finished, REPO)
    assert not [word for word in ("acme", "alice", "price", "271.25", "/home", "/mnt") if word in card]
    assert '"steps": 1234' in card and '"exclude_episodes": [' in card


def test_push_dry_run_creates_no_repository(server):
    assert "me/new, which does not exist yet" in push.check_push("me/new", True, make=False)
    assert "me/new" not in server.private


@pytest.mark.parametrize(
    ("token", "repo_id", "private", "message"),
    [
        ("hf_wrong", REPO, None, r"refused access \(401\)"),
        (READ_ONLY, "me/old", None, "the token of me may not write to it"),
        (TOKEN, "somebody/arm", None, "the token of me may not write to it"),
        (READ_ONLY, REPO, None, r"refused access \(403\)"),
        (TOKEN, "me/old", True, "exists and is public, but --policy.private=true"),
        (TOKEN, "not a name", None, "not a repository name"),
        (None, REPO, None, "me/pick: no token to push with; set HF_TOKEN"),
    ],
)
def test_push_to_unwritable_repository_is_refused(server, monkeypatch, token, repo_id, private, message):
    server.private["me/old"] = False
    monkeypatch.delenv("HF_TOKEN")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError, match=message) as error:
        push.check_push(repo_id, private)
    assert REPO not in server.private and (token is None or token not in str(error.value))


def test_push_without_network_raises_os_error(server, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="model me/pick: the Hub cannot be reached; check the network"):
        push.check_push(REPO, None)


def test_failed_push_can_be_repeated_with_the_named_command(server, finished, capsys):
    server.private[REPO] = False
    server.fails["/commit/"] = 500
    assert push.push(finished, REPO) == 4
    error = capsys.readouterr().err
    assert f"`python -m vla_finetuning.run.push {finished}` tries again" in error and "(500)" in error
    assert TOKEN not in error and (finished / "pretrained_model/model.safetensors").is_file()

    assert push.main([str(finished)]) == 1
    assert "(500)" in capsys.readouterr().err
    server.fails.clear()
    assert push.main([str(finished)]) == 0
    assert f"{server.endpoint}/{REPO}/commit/" in capsys.readouterr().out
    assert push.main([str(finished), "--repo_id=me/other", "--private"]) == 0
    assert server.private["me/other"] is True and set(server.files["me/other"]) == set(server.files[REPO])


def test_push_uses_a_repository_per_robot(server, finished, capsys):
    exported = finished / "pretrained_model"
    for name in ("arm", "gantry"):
        (exported / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (exported / name / file).write_bytes((exported / file).read_bytes())
        (exported / name / "robot.json").write_text(json.dumps({"robot": name}))
    for file in ("config.json", "model.safetensors"):
        (exported / file).unlink()
    assert push.main([str(finished)]) == 0
    assert server.files.keys() == {f"{REPO}-arm", f"{REPO}-gantry"}
    for name in ("arm", "gantry"):
        pushed = server.files[f"{REPO}-{name}"]
        assert pushed == {path.name: path.read_bytes() for path in (exported / name).iterdir()}
        assert json.loads(pushed["robot.json"]) == {"robot": name}
        assert f"for the robot `{name}`" in pushed["README.md"].decode()
    assert push.main([str(finished), "--robot=arm", "--repo_id=me/one"]) == 0
    assert server.files["me/one"].keys() == server.files[f"{REPO}-arm"].keys() and len(server.files) == 3
    capsys.readouterr()
    assert push.main([str(finished), "--robot=amr"]) == 1
    assert "no robot 'amr' among those that were trained: arm, gantry" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("pretrained_model/model.safetensors", None, "lacks model.safetensors: a policy without weights is not pushed"),
        ("pretrained_model/config.json", None, "no trained policy is there"),
        ("config.json", json.dumps(GrpoConfig().to_json()), "`hf upload USER/NAME {}/pretrained_model`"),
    ],
    ids=["without weights", "not over", "without a dataset"],
)
def test_incomplete_run_is_refused_before_a_repository_is_created(server, finished, capsys, file, text, message):
    (finished / file).unlink()
    if text is not None:
        (finished / file).write_text(text)
    assert push.main([str(finished), f"--repo_id={REPO}"]) == 1
    assert message.format(finished) in capsys.readouterr().err and REPO not in server.private


def test_push_robot_flag_is_refused_for_a_single_policy(finished, capsys):
    assert push.main([str(finished), "--robot=arm"]) == 1
    assert f"--robot arm: {finished} has one policy" in capsys.readouterr().err


def test_run_does_not_start_if_its_push_would_fail(server, finished, monkeypatch, tmp_path, capsys):
    """Before Ray starts and before the run's folder is created, so that the same command can be repeated."""
    out = tmp_path / "out"
    argv = ["--dataset.root=/d", "--policy.path=/p", f"--output_dir={out}", "--policy.repo_id=somebody/arm"]

    config = parse_args(argv)
    resolved = Run(
        config=config,
        job=SimpleNamespace(output_dir=out, use_gpu=False, start=None, steps=1, disk_bytes=0),
        policy=SimpleNamespace(robots=[SimpleNamespace(name="")]),
        rows=None,
    )
    monkeypatch.setattr(program, "examine", lambda config: Examined(config))
    monkeypatch.setattr(run_folder, "_check_state", lambda *_: None)
    monkeypatch.setattr(vla, "resolve", lambda config, datasets: resolved)
    monkeypatch.setattr(vla, "Evaluator", lambda *_: None)
    monkeypatch.setattr(plan, "describe", lambda run: "the plan")
    monkeypatch.setattr(plan, "look_at_rows", lambda run: [])
    monkeypatch.setattr(plan, "check_memory", lambda run: 0)
    assert vla.main(argv) == 2
    assert "error: model somebody/arm: the token of me may not write to it" in capsys.readouterr().err
    assert not out.exists()


def test_push_flags_equal_lerobots():
    argv = ["--dataset.root=/d", "--policy.path=/p", "--output_dir=/o"]
    assert parse_args(argv).hub_repo_id is None
    config = parse_args([*argv, f"--policy.repo_id={REPO}", "--policy.private=true", "--policy.push_to_hub=true"])
    assert (config.hub_repo_id, config.policy_private, config.policy_options) == (REPO, True, [])
    assert parse_args([*argv, "--policy.push_to_hub", f"--policy.repo_id={REPO}"]).hub_repo_id == REPO
    assert parse_args([*argv, "--policy.push_to_hub=false", f"--policy.repo_id={REPO}"]).hub_repo_id is None
    with pytest.raises(ValueError, match="to which repository"):
        parse_args([*argv, "--policy.push_to_hub"])
    assert replace(config, push_to_hub=None).hub_repo_id == REPO


def test_push_from_a_bucket(server, finished):
    with runs_bucket():
        url = "s3://runs/secret_place/run7"
        for path in finished.rglob("*"):
            if path.is_file():
                Bucket(url).write(str(path.relative_to(finished)), path.read_bytes())
        assert push.main([url]) == 0
    text = server.files[REPO]["README.md"].decode()
    assert server.files[REPO]["model.safetensors"] == b"weights" * 1000
    assert "40 optimizer steps, 320 samples" in text and "secret" not in text
