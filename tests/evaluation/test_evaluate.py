"""`evaluate.py` from flags to files: output, refusals, resume, comparison, recording."""

import contextlib
import io
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors

import evaluate
import tests.arm  # noqa: F401 (an environment)
from tests.buckets import Bucket, forget, runs_bucket
from tests.pages import check_page
from tests.rollouts.test_player import STATS, act_config, make_base, masked, observed  # noqa: F401 (a fixture)
from tests.serving.servers import make_service
from vla_finetuning.buckets import mirror
from vla_finetuning.buckets.mirror import as_path
from vla_finetuning.envs.protocol import select_rows
from vla_finetuning.envs.two_bins_scene import INSTRUCTIONS
from vla_finetuning.evaluation import trial
from vla_finetuning.evaluation.episodes import EvaluationFolder, read_actions, read_evaluation
from vla_finetuning.files import read_json, write_json
from vla_finetuning.options.command_line import parse_evaluate
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.rollouts.episodes import OUTCOME
from vla_finetuning.rollouts.player import Player
from vla_finetuning.run import lease
from vla_finetuning.run.folder import claim_folder

SUBTASK, SELECT = "--policy.subtask=true", "--eval.controller=select_action"
FLAGS = ["--env.type=two_bins", "--env.episode_length=12", "--eval.n_episodes=6", "--eval.env_actors=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save an ACT with random weights, as LeRobot saves it."""
    config = act_config(chunk_size=6, n_action_steps=6)
    folder = tmp_path_factory.mktemp("evaluate") / "act"
    save_pretrained(ACTPolicy(config), *make_pre_post_processors(config, dataset_stats=STATS), folder)
    return folder


def actions_of(folder):
    """Map each seed to its executed actions."""
    return {key[3]: actions for key, actions in read_actions(folder).items()}


def resolve(policy, out, *flags):
    return trial.resolve_trial(parse_evaluate([f"--policy.path={policy}", f"--output_dir={out}", *FLAGS, *flags]))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def flags(folder):
    flags = [f"--policy.path={folder}", "--policy.n_action_steps=4", "--eval.videos=2", *FLAGS]
    return [*flags, "--eval.exact", "--eval.batch_size=3"]


@pytest.fixture(scope="module")
def evaluated(ray_cluster, flags, tmp_path_factory):
    """Evaluate six episodes; return the folder and the output."""
    out = tmp_path_factory.mktemp("evaluated") / "out"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(trial, "PROGRESS_EVERY_S", 0.0)
        assert evaluate.main([*flags, f"--output_dir={out}"]) == 0
    return out, printed.getvalue()


@pytest.mark.ray
def test_evaluation_writes_scores_and_report(evaluated):
    folder, out = evaluated
    lines = lines_of(folder)
    assert f"Success      {sum(line['success_once'] for line in lines)} of 6, " in out and str(folder) in out
    assert sorted(line["seed"] for line in lines) == list(range(1000, 1006))
    assert all(line["steps"] == 12 and line["decisions"] == 3 for line in lines)
    assert "5 of 6 episodes, 0 of 5 succeeded, " in out and " s left" in out
    page = check_page((folder / "report.html").read_text())
    assert "0 of 6 episodes succeeded (0.0%), and 0.0% of the episodes at their end." in page.text
    assert "all episodes 0 6 0.0% 0.0% to 39.0%" in page.text and "go to the red bin" in page.text
    pictures = [image for image in page.all("img") if image["src"].startswith("data:image/webp")]
    assert len(pictures) == 2 and all(", 12 steps" in image["alt"] for image in pictures)


@pytest.mark.ray
@pytest.mark.gate
def test_latencies_are_evaluated_and_compared(evaluated, flags, tmp_path, capsys):
    late = tmp_path / "late"
    flags = [*flags, "--eval.n_episodes=3", "--eval.latency_s=0,0.1,0.11", f"--output_dir={late}"]
    assert evaluate.main(flags) == 0
    out = capsys.readouterr().out
    assert all(f"0 of 3, 0.0 % (0.0 to 56.1); latency {name} s" in out for name in ("0", "0.1", "0.11"))
    assert sorted((line["latency_s"], line["seed"]) for line in lines_of(late)) == [
        (latency_s, seed) for latency_s in (0, 0.1, 0.11) for seed in (1000, 1001, 1002)
    ]
    assert len({line["initial_state"] for line in lines_of(late)}) == 3
    page = check_page((late / "report.html").read_text())
    assert "0.11 s, all episodes 0 3" in page.text and "latency / ms" in page.text
    executed = {(key[0], key[3]): actions for key, actions in read_actions(late).items()}
    at_once = actions_of(evaluated[0])
    for seed in (1000, 1001, 1002):
        assert (executed["latency 0 s", seed] == at_once[seed]).all()
        assert not (executed["latency 0.1 s", seed] == executed["latency 0.11 s", seed]).all()
    assert evaluate.main(["--compare", str(late), str(late)]) == 0
    assert capsys.readouterr().out.count("At a latency 0.11 s") == 1
    assert evaluate.main(["--compare", str(late), str(evaluated[0])]) == 2
    assert "played at other latencies: give both the same --eval.latency_s" in capsys.readouterr().err


def test_second_evaluation_in_the_same_folder_is_refused(flags, tmp_path, bucket_url, capsys, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    for out in (str(tmp_path / "a"), bucket_url):
        with claim_folder(as_path(out)):
            assert evaluate.main([*flags, f"--output_dir={out}"]) == 2
        assert f"{out}: a run is going on there" in capsys.readouterr().err


@pytest.mark.ray
def test_killed_evaluation_resumes_and_two_are_compared(evaluated, flags, tmp_path, capsys, monkeypatch):
    """Killed after two episodes: the others play, then the failed one again."""
    a, b, films_made, played = tmp_path / "a", tmp_path / "b", [], []
    shutil.copytree(evaluated[0], a)
    lines, actions = lines_of(a), actions_of(a)
    completed = [{**line, "steps": -1} for line in lines[:2]]
    (a / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in completed) + '{"cond')

    def play(pending, *_, on_end, **__):
        played.append({episode.seed for episode in pending})
        for line in lines:
            if line["seed"] in played[-1] and (line is not lines[-1] or len(played) > 1):
                on_end(line, actions[line["seed"]])
        if len(played) == 1:
            on_end({**lines[-1], **dict.fromkeys(OUTCOME), "error": "its process died"}, None)

    with monkeypatch.context() as patch:
        patch.setattr(trial, "play", play)
        assert evaluate.main([*flags, f"--output_dir={a}"]) == 1
        out = capsys.readouterr().out
        assert "6 asked for: 1 ended in an error" in out and f"seed {lines[-1]['seed']}: its process died" in out
        assert evaluate.main(["--compare", str(a), str(a)]) == 1
        left_out = "1 of 6 episodes asked for are left out: 1 ended in an error with A, 1 with B"
        assert left_out in capsys.readouterr().out
        assert evaluate.main([*flags, f"--output_dir={a}"]) == 0
        assert played == [{line["seed"] for line in lines[2:]}, {lines[-1]["seed"]}]
        assert lines_of(a) == [*completed, *lines[2:]]
        patch.setattr(trial, "play", None)  # nothing is left to play
        patch.setattr(trial, "make_films", None)  # nor to be shown
        assert evaluate.main([*flags, f"--output_dir={a}"]) == 0
        patch.setattr(trial, "make_films", lambda _, __, chosen: [{"title": title} for title, *_ in chosen])
        resolved = trial.resolve_trial(parse_evaluate([*flags, f"--output_dir={a}", "--eval.videos=3"]))
        trial.run_trial(resolved, lambda folder, about, scores, films: films_made.extend(films))
        assert len(films_made) == 3
    assert evaluate.main([*flags, f"--output_dir={a}", "--seed=7"]) == 1
    assert "holds another evaluation: it differs in episodes, seed" in capsys.readouterr().err

    shutil.copytree(a, b)
    assert evaluate.main(["--compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "of 6 distinct scenes that both played" in out and "Verdict  cannot tell" in out and str(b) in out
    # Options that do not change initial states may change success.
    about = json.loads((b / "evaluated.json").read_text())
    about["environment"]["options"] = ["--episode_length=300"]
    write_json(b / "evaluated.json", about)
    assert evaluate.main(["--compare", str(a), str(b)]) == 2
    assert "--episode_length=12 and --type=two_bins --episode_length=300: give the same" in capsys.readouterr().err


# ---- as a dataset ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(evaluated, flags):
    """Record a dataset of the episodes already played."""
    folder = evaluated[0].parent / "recorded"
    record = [*flags, f"--output_dir={evaluated[0]}", f"--eval.record_dataset={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "play", None)
        assert evaluate.main(record) == 0
    return folder, record


@pytest.mark.ray
def test_recorded_dataset_has_episodes_in_list_order(evaluated, recorded):
    """tests/rl/test_recording.py compares each frame with gymnasium."""
    dataset, actions = LeRobotDataset("x/recorded", root=recorded[0], video_backend="pyav"), actions_of(evaluated[0])
    assert dataset.meta.total_episodes == 6 and len(dataset) == 6 * 12
    assert dataset.meta.features["action"]["names"] == ["x_cm", "y_cm", "z_cm"]
    for row, line in zip(range(0, 72, 12), read_evaluation(evaluated[0])[1], strict=True):
        np.testing.assert_array_equal(dataset[row]["action"], actions[line["seed"]][0].astype(np.float32))
        assert dataset[row]["task"] == line["instruction"]


@pytest.mark.ray
def test_recording_again_is_a_no_op_and_never_overwrites_another(recorded, tmp_path, capsys):
    folder, record = recorded
    before = (folder / "meta" / "info.json").stat().st_mtime_ns
    assert evaluate.main(record) == 0
    assert (folder / "meta" / "info.json").stat().st_mtime_ns == before
    for changed in ("--seed=5", "--eval.n_episodes=7"):
        assert evaluate.main([*record, changed, f"--output_dir={tmp_path / 'other'}"]) == 2
        assert "exists and is not empty" in capsys.readouterr().err
    about = read_json(folder / "meta" / "environment.json")
    assert about["evaluation"]["environment"]["type"] == "two_bins" and about["evaluation"]["errors"] == 0
    other = shutil.copytree(folder, tmp_path / "fewer")
    del about["evaluation"]["errors"]  # as earlier versions wrote it
    write_json(other / "meta" / "environment.json", about)
    assert evaluate.main([*record, f"--eval.record_dataset={other}"]) == 0
    # An episode was an error when the dataset was written, and has succeeded since.
    about["evaluation"]["errors"] = 1
    write_json(other / "meta" / "environment.json", about)
    assert evaluate.main([*record, f"--eval.record_dataset={other}"]) == 1
    assert "fewer exists and is not empty, and not of exactly these episodes" in capsys.readouterr().err


@pytest.mark.ray
def test_episodes_without_actions_cannot_be_recorded(evaluated, flags, tmp_path, capsys):
    plain = shutil.copytree(evaluated[0], tmp_path / "plain", ignore=shutil.ignore_patterns("actions*"))
    assert evaluate.main([*flags, f"--output_dir={plain}", f"--eval.record_dataset={tmp_path / 'late'}"]) == 1
    assert "has no actions of 6 episodes" in capsys.readouterr().err
    assert evaluate.main([*flags, f"--output_dir={plain}", "--eval.videos=3"]) == 0
    assert "Films        " in (out := capsys.readouterr().out) and "were played with --eval.videos 0" in out


def test_failed_episodes_cannot_be_recorded(tmp_path, monkeypatch):
    failed = SimpleNamespace(dataset=tmp_path / "new", output_dir=tmp_path, about={})
    monkeypatch.setattr(trial, "read_evaluation", lambda _: ({}, [{"error": "ValueError: no camera"}] * 3))
    with pytest.raises(ValueError, match="each of 3 episodes ended in an error; nothing is written"):
        trial.record_trial(failed)


# ---- without playing ------------------------------------------------------------------------------------------------


def test_latency_with_real_time_chunking_shortens_first_chunk(tmp_path):
    base = make_base(tmp_path / "base", list(INSTRUCTIONS.values()))
    flags = "--policy.n_action_steps=4", "--eval.controller=rtc", "--eval.latency_s=0.1"
    resolved = resolve(base, tmp_path / "out", *flags)
    assert (resolved.about["policy"]["controller"], resolved.about["policy"]["latency_s"]) == ("rtc", [0.1])
    assert trial.describe_controller(resolved.source)[0].startswith("Controller   rtc: each chunk was guided")
    (condition,) = resolved.conditions.values()
    assert condition.delay == 1
    # The first of 4 actions is skipped: it is over when the chunk arrives.
    player, observation = resolved.source.load(1), select_rows(observed(), [0])
    task = list(INSTRUCTIONS.values())[:1]
    (first,) = player.act(observation, task, [(7, "two_bins", 0, 0)], 1)
    (second,) = player.act(observation, task, [(7, "two_bins", 0, 1)], 1, [first.rest])
    assert (len(first.actions), len(second.actions)) == (3, 4)


def test_policy_with_masked_cameras_is_accepted(masked, tmp_path):  # noqa: F811
    assert len(resolve(masked, tmp_path / "out").source.config.image_features) == 3
    for name, message in (
        ("hand", r"'action' has the shape \(3,\).*\(5,\): it was trained for another robot"),
        ("hnad", "arm does not show .*images.hnad; it shows .*images.hand"),
    ):
        renamed = f'--rename_map={{"observation.images.{name}": "observation.images.wrist"}}'
        with pytest.raises(ValueError, match=message):
            resolve(masked, tmp_path / "out", "--env.type=arm", renamed)


@pytest.mark.ray
@pytest.mark.slow
def test_bucket_evaluation_equals_local_one_after_a_kill(ray_cluster, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path))
    plain, remote = tmp_path / "plain", "s3://runs/there"
    with runs_bucket() as faults:
        forget()
        policy, run = "s3://runs/run/pretrained_model", Bucket("s3://runs/run")
        for file in (file for file in folder.rglob("*") if file.is_file()):
            run.write(f"pretrained_model/{file.relative_to(folder)}", file.read_bytes())
        flags = [*FLAGS, "--eval.n_episodes=4", "--eval.videos=1", "--eval.exact"]
        assert evaluate.main([f"--policy.path={folder}", *flags, f"--output_dir={plain}"]) == 0
        about, lines = read_evaluation(plain)
        # Killed after two episodes.
        of_bucket = {**about, "policy": {**about["policy"], "path": policy}}
        Bucket(remote).write("evaluated.json", json.dumps(of_bucket).encode())
        Bucket(remote).write("episodes.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines[:2]).encode())
        faults.requests.clear()
        flags = [f"--policy.path={policy}", *flags, "--eval.videos=3"]  # one of them was played here
        assert evaluate.main([*flags, f"--output_dir={remote}"]) == 0
        # An episode's line is written after its actions.
        puts = [r.path.split("/")[3] for r in faults.requests if r.method == "PUT" and r.path.endswith(".jsonl")]
        assert puts[-2:] == ["actions.jsonl", "episodes.jsonl"]
        EvaluationFolder(as_path("s3://runs/begun"), {"policy": {}}, [])  # and its process is killed
        assert Bucket("s3://runs/begun").read("evaluated.json")
        forget()
        assert read_evaluation(as_path(remote))[1] == lines
        played, expected = actions_of(as_path(remote)), actions_of(plain)
        assert played.keys() == {1002, 1003} and all((played[n] == expected[n]).all() for n in played)
        assert len(check_page(Bucket(remote).read("report.html").decode()).all("img")) == 1
        capsys.readouterr()
        assert evaluate.main(["--compare", remote, str(plain)]) == 0
        out = capsys.readouterr().out
        assert "of 4 distinct scenes that both played" in out and remote in out

        run.write("checkpoints/step_00000004/state.json", b"{}")
        for changed, message in (
            ("--policy.path=s3://runs/run/checkpoints/step_00000004", "is a checkpoint: give its run's pretrained_mod"),
            ("--policy.path=s3://runs/nothing", "s3://runs/nothing is no pretrained LeRobot policy"),
            ("--output_dir=s3://other/a", "there is no s3://other; make it first, or check its name"),
        ):
            assert evaluate.main([*flags, f"--output_dir={remote}", changed]) == 2
            assert message in capsys.readouterr().err


def test_invalid_options_are_refused_before_playing(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "cluster", None)
    good = [f"--policy.path={folder}", *FLAGS, f"--output_dir={tmp_path / 'out'}"]
    halved = shutil.copytree(folder, tmp_path / "halved")
    write_json(halved / "robot.json", {"fps": 5.0, "frames_per_action": 2})
    for flags, message in (
        (good[1:], "which policy? give --policy.path"),
        ([good[0], good[-1]], "give --env.type two_bins"),
        (good[:-1], "give --output_dir"),
        ([*good, "--env.type=nowhere"], "expected one of"),
        ([*good, "--env.lenght=3"], "its options are"),
        ([*good, "--env.fps=-3"], "--env.fps=-3: expected at least 1"),
        ([*good, "--env.episode_length=-1"], "--env.episode_length=-1: expected at least 1"),
        ([*good, "--policy.path=/nowhere"], "/nowhere is no folder and no Hub id"),
        ([*good, "--policy.chunksize=3"], "no option of ACTConfig; did you mean --policy.chunk_size?"),
        ([*good, f"--policy.path={halved}"], "halved: the policy's actions are 2 frames apart, 5 per second"),
        ([*good, "--env.type=libero"], "needs what is not installed (No module named 'libero'"),
        ([*good, "--env.type=pusht"], "pip install gym-pusht"),
        ([*good, "--env.type=isaaclab_arena"], "would run code from the Hub"),
        ([*good, "--env.type=somebody/envs@main:env.py"], "would run code from the Hub"),
        ([*good, "--output_dir=hf://a/b"], "--output_dir=hf://a/b: expected a path, s3://BUCKET/FOLDER, gs://"),
        ([*good, "--eval.record_dataset=s3://runs/played"], "datasets are written to a disk; give a path"),
        ([*good, f"--eval.record_dataset={tmp_path}"], f"={tmp_path} would hold the --output_dir {tmp_path / 'out'}"),
        ([*good, "--output_dir=~/a/b", "--eval.record_dataset=~/a/c/.."], "would hold the --output_dir ~/a/b"),
        ([*good, f"--eval.record_dataset={halved}/robot.json/a"], "--eval.record_dataset="),
        ([*good, "--policy.advantage=positive"], "cannot reach it: leave out --policy.advantage"),
        ([*good, "--eval.latency_s=0.1,x"], "--eval.latency_s=0.1,x: expected numbers, as 0,0.1, at least 0"),
        ([*good, "--eval.latency_s=0.1,0.1000000001"], "--eval.latency_s=0.1,0.1: give each one once"),
        ([*good, "--eval.latency_s=0.1", SELECT], "[0.1] with --eval.controller=select_action: a loop over select_act"),
        ([*good, "--eval.controller=rtc"], "LeRobot has no real-time chunking for this policy, of type 'act'"),
        (["--compare", str(tmp_path)], "two folders"),
        (["--compare", str(tmp_path), str(tmp_path)], "holds no evaluation"),
    ):
        assert evaluate.main(flags) == 2, flags
        assert message in capsys.readouterr().err, flags
    assert not (tmp_path / "out").exists()


def test_controller_is_described_for_relative_actions(folder, tmp_path):
    """The controller matters for relative actions only."""
    relative = make_base(tmp_path / "base", list(INSTRUCTIONS.values()))
    for name in ("config", "policy_preprocessor", "policy_postprocessor"):
        saved = json.loads((relative / f"{name}.json").read_text())
        for options in [saved, *(step["config"] for step in saved.get("steps", ()))]:
            options |= {key: True for key in ("enabled", "use_relative_actions") if key in options}
        write_json(relative / f"{name}.json", saved)

    out = tmp_path / "out"
    by_steps = resolve(relative, out, SELECT)
    assert by_steps.source.controller == "select_action" and by_steps.config.eval.policy_actors == 1
    assert by_steps.about["policy"]["controller"] == "select_action"
    (line,) = trial.describe_controller(by_steps.source)
    assert "added to the current state, as by lerobot-eval" in line
    (line,) = trial.describe_controller(resolve(relative, out).source)
    assert "lerobot-rollout --inference.type=rtc and PolicyServer" in line and "--eval.controller=select_action" in line
    for other in (resolve(relative, out), resolve(folder, out, SELECT)):
        assert other.source.controller == "chunk" and "controller" not in other.about["policy"]
    assert not trial.describe_controller(resolve(folder, out).source)
    with pytest.raises(ValueError, match="--eval.policy_actors=2: with --eval.controller=select_action one process"):
        resolve(relative, out, SELECT, "--eval.policy_actors=2")
    with pytest.raises(ValueError, match="--eval.exact with --eval.controller=select_action"):
        resolve(relative, out, SELECT, "--eval.exact")


def test_subtask_text_requires_training_with_it(folder, tmp_path, monkeypatch):
    base, out = make_base(tmp_path / "base", list(INSTRUCTIONS.values())), tmp_path / "out"
    other = shutil.copytree(folder, tmp_path / "act")
    write_json(other / "robot.json", {"writes": "subtask"})  # which an ACT cannot
    for start, *arguments in ((resolve, base, out), (resolve, other, out), (make_service, base)):
        with pytest.raises(ValueError, match="has not learned to write texts.*--train.text_targets"):
            start(*arguments, SUBTASK)
    write_json(base / "robot.json", {"writes": "subtask"})
    evaluation = resolve(base, out, SUBTASK)
    assert evaluation.about["policy"]["subtask"] is True
    (served,) = make_service(base, SUBTASK).sources.values()
    monkeypatch.setattr(Player, "_write", lambda self, batch: ["a"])
    for source in (evaluation.source, replace(served, env=evaluation.env)):
        (acted,) = source.load(1).act(select_rows(observed(), [0]), ["go"], [(7, "two_bins", 0, 0)])
        assert acted.text == "a"


def test_films_show_failures_first_and_every_task():
    lines = [
        {"task": task, "seed": seed, "error": None, "success_once": seed % 2 == 0}
        for task in ("a", "b", "c") for seed in range(4)
    ]  # fmt: skip
    lines[3] |= {"error": "its process died", "success_once": None}
    selected = [(line["task"], line["seed"]) for line in trial.select_films(lines, 4)]
    assert selected == [("a", 1), ("b", 1), ("c", 1), ("b", 3), ("a", 0), ("b", 0)]
    assert trial.select_films(lines, 0) == []


def test_robot_is_selected_by_environment(folder, tmp_path):
    both = tmp_path / "pretrained_model"
    for name in ("arm", "gantry"):
        shutil.copytree(folder, both / name)
    config = json.loads((both / "arm" / "config.json").read_text())
    config["output_features"]["action"]["shape"] = [5]
    (both / "arm" / "config.json").write_text(json.dumps(config))
    (both / "gantry" / "robot.json").write_text('{"robot": "gantry", "instructions_begin_with": "gantry: "}')

    source = resolve(both, tmp_path).source
    assert source.folder == both / "gantry" and source.opening == "gantry: "
    shutil.copytree(folder, both / "other")
    with pytest.raises(ValueError, match="robots arm, gantry, other: it fits gantry, other; give the folder"):
        resolve(both, tmp_path)
    for name in ("gantry", "other"):
        shutil.rmtree(both / name)
    with pytest.raises(ValueError, match="arm: the policy's 'action' has the shape .5,."):
        resolve(both, tmp_path)


@pytest.mark.parametrize(
    ("type", "options", "differ"),
    [
        ("metaworld", ["--task=a"], False),
        ("two_bins", ["--fps=5"], True),
        ("aloha", ["--task=a"], True),
        ("gym", ["--task=my/Reach-v1"], True),
        ("own", ["--discover_packages_path=mine", "--task=a"], True),
    ],
)
def test_different_environments_are_not_compared(monkeypatch, tmp_path, type, options, differ):
    def read(folder):
        other = options if folder.name == "b" else [o for o in options if o.startswith("--discover")]
        return {"environment": {"type": type, "options": other}}, []

    monkeypatch.setattr(trial, "read_evaluation", read)
    with pytest.raises(ValueError, match="the environments differ") if differ else nullcontext():
        trial.compare_folders(tmp_path / "a", tmp_path / "b")
