"""Mixtures of different robots against runs of a single robot and LeRobot."""

import copy
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import yaml
from lerobot.configs.policies import PreTrainedConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

import vla
from diagnostics import check_rows, show_dataset
from tests import in_process, planted
from tests.datasets import edit_json, make_dataset
from tests.planted import Fault
from tests.tiny_backbones import KINDS
from util import DeviceMetrics
from vla_finetuning.columns import ACTION_DIMS, IS_PRESENT, ROBOT
from vla_finetuning.evaluation.open_loop import evaluate_run
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.mixture import members, read_mixture
from vla_finetuning.plan.datasets import find_datasets
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.matching import policy_data
from vla_finetuning.plan.record import record_run
from vla_finetuning.plan.resolve import resolve, with_stats
from vla_finetuning.policies.saving import save_pretrained
from vla_finetuning.policies.tiny_pi05 import TinyPI05Policy, make_tiny_base
from vla_finetuning.run import push
from vla_finetuning.run.folder import attempts
from vla_finetuning.training.checkpoint_writer import CheckpointWriter
from vla_finetuning.training.export import export, exported_checkpoint, in_own_names
from vla_finetuning.training.feed import Collate, drop_absent_cameras
from vla_finetuning.training.held_out import HeldOutLoss
from vla_finetuning.training.model import build_model, make_prepare
from vla_finetuning.training.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
TOP, WRIST, BASE = (f"observation.images.{name}" for name in ("top", "wrist", "base"))
SIZES = {"width": 32, "depth": 2, "mlp_dim": 32, "head_dim": 8, "vision_width": 32, "vision_mlp_dim": 32}
MIXTURE = {
    "members": [
        {"root": "gantry", "weight": 2, "robot": "gantry", "rename_map": {TOP: BASE}},
        {"root": "arm", "robot": "arm", "rename_map": {TOP: BASE}},
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of two datasets of different robots and a tiny policy for both."""
    folder = tmp_path_factory.mktemp("robots")
    make_dataset(folder / "gantry", episodes=(9, 14, 11, 8), fps=10)
    cameras = {TOP: (60, 80)}
    make_dataset(folder / "arm", episodes=(22, 17, 12, 14), cameras=cameras, fps=20, state_dim=6, action_dim=5, seed=3)
    write(folder, MIXTURE)
    config = parse_args([*FLAGS, f"--dataset.mixture=@{folder / 'mix.yaml'}", "--policy.path=x"])
    _, datasets = find_datasets(config)
    data = policy_data(config, datasets, [meta.episode_index for meta in datasets.metas])
    make_tiny_base(folder / "base", **data, stats=None, chunk_size=6, **SIZES)
    return folder


FLAGS = [
    "--output_dir=out",
    "--batch_size=4",
    "--steps=12",
    "--train.mode=full",
    "--scaling.use_gpu=false",
    "--dataset.image_size=[56, 56]",
]
ALONE = {"gantry": ["--dataset.missing_cameras=error"], "arm": ["--dataset.missing_cameras=mask"]}


def write(folder, mixture, name="mix.yaml"):
    (folder / name).write_text(yaml.safe_dump(mixture))
    return f"--dataset.mixture=@{folder / name}"


def mixed(folder, *flags, mixture=None):
    where = f"--dataset.mixture=@{folder / 'mix.yaml'}" if mixture is None else write(folder, mixture, "other.yaml")
    return resolve(parse_args([*FLAGS, f"--policy.path={folder / 'base'}", where, *flags]), gpus_found=0)


def alone(folder, name, *flags):
    rename = f'--rename_map={{"{TOP}": "{BASE}"}}'
    options = [f"--policy.path={folder / 'base'}", f"--dataset.root={folder / name}", rename, *ALONE[name], *flags]
    return resolve(parse_args([*FLAGS, *options]), gpus_found=0)


def read(run, positions):
    """Rows of a run at positions of its stream, as they are read and as they are prepared."""
    (rows,) = run.rows.source().read_rows(list(positions), len(positions))
    return rows, make_prepare(run.policy, run.rows)(rows)


def tensors(columns, *, drop_absent=True):
    """Tensors of prepared columns; `drop_absent`: without the cameras that no row has."""

    def to_tensors(batch):
        return {key: torch.from_numpy(np.array(value)) for key, value in batch.items() if value.dtype != object}

    return Collate([drop_absent_cameras] if drop_absent else [], to_tensors)(columns)


def rows_alone(run, indices):
    """Rows of a run of one dataset, by their `index`."""
    per_epoch = run.rows.per_epoch
    (every,) = run.rows.source((0, per_epoch)).read_rows(range(per_epoch), per_epoch)
    place = {int(index): at for at, index in enumerate(every["index"])}
    return {key: values[[place[int(index)] for index in indices]] for key, values in every.items()}


def loss_of(run):
    """The run's loss with all weights random: LeRobot starts some layers at zero, where a wrong gradient hides."""
    loss, _ = build_model(run.policy, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.05)
    return loss


def draws(rows, config):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn((rows, config.chunk_size, config.max_action_dim), generator=generator)
    return noise, torch.rand(rows, generator=generator) * 0.9 + 0.05


@pytest.fixture(scope="module")
def both(folder):
    """Return (run, rows, columns, by_robot): rows of both robots mixed, and of each robot alone."""
    run = mixed(folder)
    rows, columns = read(run, range(24))
    by_robot = {}
    for number, name in enumerate(("arm", "gantry")):
        single = alone(folder, name)
        places = np.flatnonzero(rows["dataset_index"] == number)
        chosen = rows_alone(single, rows["index"][places])
        by_robot[name] = single, places, chosen, make_prepare(single.policy, single.rows)(chosen)
    assert all(len(places) > 2 for _, places, _, _ in by_robot.values())
    return run, rows, columns, by_robot


def assert_same_inputs(mixed_columns, prepared):
    """Compare policy inputs of equal rows, ignoring the padding of vectors."""
    for key, values in prepared.items():
        if key in ("dataset_index", "position"):
            continue
        mixed_values = mixed_columns[key]
        if key in ("action", "observation.state"):
            assert not mixed_values[..., values.shape[-1] :].any()
            mixed_values = mixed_values[..., : values.shape[-1]]
        np.testing.assert_array_equal(mixed_values, values, err_msg=key)


def test_mixed_rows_match_single_robot_inputs(both):
    run, rows, columns, by_robot = both
    assert columns["action"].shape == (24, 6, 5)
    for _, places, _, prepared in by_robot.values():
        assert_same_inputs({key: values[places] for key, values in columns.items()}, prepared)
        assert (columns[ACTION_DIMS][places] == (np.arange(5) < prepared["action"].shape[-1])).all()
    wrist = columns[WRIST + IS_PRESENT]
    np.testing.assert_array_equal(wrist, rows["dataset_index"] == 1)
    assert not columns[WRIST][~wrist].any() and columns[WRIST][wrist].any()
    assert columns[BASE + IS_PRESENT].all()


def test_relative_actions_use_statistics_of_each_robot(folder, tmp_path):
    """Compare with a single run, with plain arithmetic, and with the exported pipelines."""
    flags = ("--policy.use_relative_actions=true", '--policy.relative_exclude_joints=["motor_1"]')
    flags += ("--dataset.statistics=lerobot", f"--output_dir={tmp_path / 'run'}")  # which gets the statistics
    run = mixed(folder, *flags)
    text = describe(run)
    assert "arm: predicts 4 of 5 dim" in text and "gantry: predicts 2 of 3 dimensions of an action relative" in text
    run = with_stats(run)
    rows, columns = read(run, range(24))
    for number, name in enumerate(("arm", "gantry")):
        single, places = with_stats(alone(folder, name, *flags)), np.flatnonzero(rows["dataset_index"] == number)
        chosen = rows_alone(single, rows["index"][places])
        prepared, width = make_prepare(single.policy, single.rows)(chosen), chosen["action"].shape[-1]
        np.testing.assert_array_equal(columns["action"][places][..., :width], prepared["action"])
        stats = run.policy.robots[number].stats["action"]
        relative = chosen["action"] - chosen["observation.state"][:, None, :width] * (np.arange(width) != 1)
        scaled = 2 * (relative - stats["q01"]) / (stats["q99"] - stats["q01"]) - 1
        np.testing.assert_allclose(prepared["action"], scaled, rtol=1e-3, atol=1e-3)

        spec = run.policy.select_robot(run.robots[number])
        pipelines, exported, _ = in_own_names(spec)
        save_pretrained(spec.start(), *pipelines, tmp_path / name, exported)
        saved = PreTrainedConfig.from_pretrained(tmp_path / name, cli_overrides=["--device=cpu"])
        pre, post = make_pre_post_processors(saved, pretrained_path=str(tmp_path / name))
        batch = {key: torch.from_numpy(chosen[key]) for key in ("action", "observation.state")}
        images = {camera: torch.rand(len(places), 3, 8, 8) for camera in (TOP, WRIST)[: number + 1]}
        absolute = post(pre({**batch, **images, "task": list(chosen["task"])})["action"])
        torch.testing.assert_close(absolute, batch["action"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rates", [{"arm": 20, "gantry": 10}, {"arm": 10, "gantry": 10}])
def test_chunks_match_lerobot_at_robot_rate_or_stride(folder, rates):
    mixture = {"members": [{**member, "fps": rates[member["robot"]]} for member in MIXTURE["members"]]}
    rows, _ = read(mixed(folder, mixture=mixture), range(24))
    for number, (name, fps) in enumerate(rates.items()):
        deltas = {"action": [step / fps for step in range(6)]}
        dataset = LeRobotDataset(f"x/{name}", folder / name, delta_timestamps=deltas, video_backend="pyav")
        for at in np.flatnonzero(rows["dataset_index"] == number)[:4]:
            row = dataset[int(rows["index"][at])]
            width = row["action"].shape[-1]
            np.testing.assert_array_equal(rows["action"][at, :, :width], row["action"].numpy())
            np.testing.assert_array_equal(rows["action_is_pad"][at], row["action_is_pad"].numpy())


def test_plan_and_report_account_for_stride(folder, tmp_path):
    mixture = {"members": [{**MIXTURE["members"][1], "fps": 10}]}
    run = mixed(folder, "--dataset.missing_cameras=mask", f"--output_dir={tmp_path}", mixture=mixture)
    (rows,) = run.rows.source((0, run.rows.per_epoch)).read_rows(range(run.rows.per_epoch), run.rows.per_epoch)
    lengths = [run.rows.metas[0].episode_length[number] for number in run.rows.train_episodes[0]]
    chunk, short, episodes, share = run.rows.padding()
    assert (chunk, short, episodes) == (6, sum(length < 11 for length in lengths), len(lengths))
    assert share == pytest.approx(rows["action_is_pad"].mean())
    early = replace(run.rows.features, delta_timestamps={"action": [step / 20 for step in range(-2, 3)]})
    before = replace(run.rows, features=early)  # as of a diffusion policy
    (rows,) = before.source((0, run.rows.per_epoch)).read_rows(range(run.rows.per_epoch), run.rows.per_epoch)
    assert before.padding()[::3] == (5, pytest.approx(rows["action_is_pad"].mean()))
    record_run(run.job, run.policy, "", {}, run.rows)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["robots"][""]["actions_per_s"] == 10 and facts["datasets"][0]["fps"] == 20
    assert run.robots[0].files["robot.json"].items() >= {"fps": 10, "frames_per_action": 2}.items()


@pytest.mark.parametrize("statistics", ["exact", "lerobot"])
def test_relative_statistics_match_numpy_over_strided_chunks(folder, tmp_path, statistics):
    """Reorder dimensions as well."""
    flags = ("--policy.use_relative_actions=true", f"--dataset.statistics={statistics}")
    flags += ("--dataset.missing_cameras=mask", f"--output_dir={tmp_path / 'run'}")
    names = {
        "action": [f"motor_{i}" for i in (2, 0, 1, 4, 3)],
        "state": [f"joint_{i}" for i in (5, 3, 4, 1, 2, 0)],
    }
    run = with_stats(mixed(folder, *flags, mixture={"members": [{**MIXTURE["members"][1], **names, "fps": 10}]}))
    (rows,) = run.rows.source((0, run.rows.per_epoch)).read_rows(range(run.rows.per_epoch), run.rows.per_epoch)
    unpadded = ~rows["action_is_pad"].any(axis=1)
    assert 0 < unpadded.sum() < len(unpadded)
    chunks = (rows["action"] - rows["observation.state"][:, None, :5])[unpadded].reshape(-1, 5)
    stats = run.robots[0].stats["action"]
    for name, expected in (("min", chunks.min(0)), ("max", chunks.max(0)), ("mean", chunks.mean(0))):
        np.testing.assert_allclose(stats[name], expected, rtol=1e-4, atol=1e-5)
    q99 = np.quantile(chunks, 0.99, axis=0, method="higher")
    np.testing.assert_allclose(stats["q99"], q99, atol=0.001 * np.ptp(chunks))


def test_mixed_loss_and_gradient_match_single_robots(both):
    run, rows, columns, by_robot = both
    loss, config = loss_of(run), run.policy.config
    noise, time = draws(24, config)
    together = loss(tensors(columns), noise, time, per_row=True)
    loss.metrics, loss.robots = DeviceMetrics(torch.device("cpu")), ("arm", "gantry")  # those of members, sorted
    loss(tensors(columns), noise, time).backward()
    sums = loss.metrics.sums("loss_by_robot")
    for number, name in enumerate(("arm", "gantry")):
        places = by_robot[name][1]
        expected = torch.stack([together[places].sum(), torch.tensor(float(len(places)))])
        torch.testing.assert_close(sums[:, number], expected.detach())
    gradients = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
    summed = {}
    for single_run, places, _, prepared in by_robot.values():
        single = loss_of(single_run)
        values = single(tensors(prepared), noise[places], time[places], per_row=True)
        torch.testing.assert_close(together[places], values, rtol=2e-5, atol=2e-6)
        (values.sum() / 24).backward()
        for name, parameter in single.named_parameters():
            if parameter.grad is not None:
                summed[name] = summed.get(name, 0) + parameter.grad
    assert summed.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in summed.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, summed[name], rtol=1e-3, atol=1e-5 * largest, msg=name)


@pytest.fixture(scope="module")
def of_one_size(tmp_path_factory):
    """Return datasets with cameras of one size, as SmolVLA needs them."""
    folder, size = tmp_path_factory.mktemp("one_size"), (48, 64)
    make_dataset(folder / "gantry", episodes=(9, 14), fps=10, cameras={TOP: size, WRIST: size})
    make_dataset(folder / "arm", episodes=(22, 17), cameras={TOP: size}, fps=20, state_dim=6, action_dim=5, seed=3)
    return folder


def assert_exports_predict(exported, policy_class):
    """Load the policy of each robot with LeRobot alone, and predict a chunk."""
    for name, state, action, cameras in (("arm", 6, 5, [TOP]), ("gantry", 4, 3, [TOP, WRIST])):
        policy = policy_class.from_pretrained(str(exported / name))
        pre, post = make_pre_post_processors(policy.config, pretrained_path=str(exported / name))
        images = {camera: torch.rand(1, 3, 48, 64) for camera in cameras}
        batch = pre({**images, "observation.state": torch.zeros(1, state), "task": ["go to the red bin"]})
        assert post(policy.predict_action_chunk(batch)).shape == (1, policy.config.chunk_size, action)


@pytest.mark.parametrize("kind", ["pi0", "smolvla"])
def test_other_policy_types_train_and_export_per_robot(of_one_size, tmp_path, kind):
    tiny = KINDS[kind]
    options = {f"policy.{name}": value for name, value in {**tiny.options, **tiny.folders(tmp_path)}.items()} | tiny.run
    flags = [f"--policy.type={kind}", f"--output_dir={tmp_path / 'run'}", "--dataset.missing_cameras=mask", "--steps=3"]
    flags += ["--batch_size=4", "--log_freq=1", "--train.mode=full", "--scaling.use_gpu=false"]
    flags += [f"--{name}={value}" for name, value in options.items()]

    def plan(*where):
        return resolve(parse_args([*flags, *where]), gpus_found=0)

    with tiny.here():
        run = plan(write(of_one_size, MIXTURE))
        rows, columns = read(run, range(16))
        noise, time = draws(16, run.policy.config)
        together = loss_of(run)(tensors(columns), noise, time, per_row=True)
        for number, name in enumerate(("arm", "gantry")):
            single = plan(f"--dataset.root={of_one_size / name}", f'--rename_map={{"{TOP}": "{BASE}"}}')
            places = np.flatnonzero(rows["dataset_index"] == number)
            prepared = make_prepare(single.policy, single.rows)(rows_alone(single, rows["index"][places]))
            assert_same_inputs({key: values[places] for key, values in columns.items()}, prepared)
            apart = loss_of(single)(tensors(prepared), noise[places], time[places], per_row=True)
            torch.testing.assert_close(together[places], apart, rtol=2e-5, atol=2e-6)

        in_process.train(run, worker=in_process.alone(run), make_checkpoints=CheckpointWriter)
        export(run.policy, exported_checkpoint(run.job, best=False), run.job.output_dir)
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert all(lines[-1]["loss_by_robot"][name] > 0 for name in ("arm", "gantry"))
        assert_exports_predict(tmp_path / "run" / "pretrained_model", get_policy_class(kind))


def test_notebook_cells_run_for_one_of_two_robots(folder, tmp_path, capsys):
    flags = ("--dataset.eval_split=0.3", "--dataset.robot_in_prompt=true", f"--output_dir={tmp_path}")
    run = with_stats(mixed(folder, *flags))
    for robot in run.policy.robots:
        pipelines, config, _ = in_own_names(run.policy.select_robot(robot))
        save_pretrained(run.policy.start(), *pipelines, tmp_path / "pretrained_model" / robot.name, config)
    evaluate_run(run, frames=4)
    cells = {cell.id: cell.source for cell in nbformat.read(ROOT / "README.ipynb", as_version=4).cells}
    shown = []
    names = {"run": run, "output_dir": str(tmp_path), "display": shown.append}
    exec(re.sub("^%.*$", "", cells["setup"], flags=re.MULTILINE), names)
    names["display"] = shown.append
    for name in ("errors", "chunks", "load", "acting"):
        exec(cells[name], names)
    assert names["robot"] == "arm" and "relative to (a)" in capsys.readouterr().out and len(shown) == 2
    assert names["trained"].config.output_features["action"].shape == (5,)
    assert names["actions"].shape == names["recorded"].shape and names["actions"].shape[1] == 5
    assert TOP in names["seen"][0] and BASE not in names["seen"][0] and names["seen"][0]["task"].startswith("arm: ")


def test_camera_absent_from_micro_batch_is_dropped(both):
    run, _, columns, by_robot = both
    arm = {key: values[by_robot["arm"][1]] for key, values in columns.items()}
    assert WRIST not in tensors(arm) and BASE in tensors(arm)
    padded = tensors(arm, drop_absent=False)
    assert WRIST in padded
    loss, (noise, time) = loss_of(run), draws(len(padded["action"]), run.policy.config)
    with torch.no_grad():
        torch.testing.assert_close(loss(tensors(arm), noise, time), loss(padded, noise, time), rtol=2e-5, atol=1e-6)


def test_lerobot_pad_loss_matches_lerobot_forward(folder, both):
    run = mixed(folder, "--train.pad_loss=lerobot")
    _, columns = read(run, range(8))
    loss, (noise, time) = loss_of(run), draws(8, run.policy.config)
    batch = tensors(columns, drop_absent=False)
    assert ACTION_DIMS not in batch
    batch = {key: value for key, value in batch.items() if key != WRIST and not key.endswith(IS_PRESENT)}
    policy = run.policy.start()
    policy.load_state_dict(loss.policy.state_dict(), strict=False)
    policy.model.sample_noise = lambda *_: noise
    policy.model.sample_time = lambda *_: time
    expected, _ = policy.forward(loss.images(batch))
    torch.testing.assert_close(loss(batch, noise, time), expected, rtol=2e-5, atol=1e-6)


def test_member_order_does_not_change_rows(folder):
    runs = [mixed(folder, mixture={"members": order}) for order in (MIXTURE["members"], MIXTURE["members"][::-1])]
    first, second = (run.rows for run in runs)
    assert first.identity == second.identity
    renamed = [{**member, "robot": f"{member['robot']}2"} for member in MIXTURE["members"]]
    assert mixed(folder, mixture={"members": renamed}).rows.identity != first.identity
    assert [meta.root for meta in first.metas] == [meta.root for meta in second.metas]
    for a, b in zip(read(runs[0], range(12))[1].values(), read(runs[1], range(12))[1].values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_mixture_of_one_matches_single_dataset(folder):
    single, plain = mixed(folder, mixture={"members": [MIXTURE["members"][0]]}), alone(folder, "gantry")
    assert single.rows.identity == plain.rows.identity and len(single.robots) == 1
    assert single.robots[0].rename_map == plain.robots[0].rename_map
    actual, expected = read(single, range(20))[1], read(plain, range(20))[1]
    assert actual.keys() == expected.keys()
    assert not [key for key in actual if key in (ACTION_DIMS, ROBOT) or key.endswith(IS_PRESENT)]
    for key, values in expected.items():
        np.testing.assert_array_equal(actual[key], values, err_msg=key)


def test_camera_order_is_fixed_for_policy_without_input_features(folder, tmp_path):
    shutil.copytree(folder / "base", tmp_path / "base")
    edit_json(tmp_path / "base/config.json", lambda config: config.update(input_features={}))
    gantry, arm = MIXTURE["members"]
    run = mixed(
        folder, f"--policy.path={tmp_path / 'base'}", mixture={"members": [gantry, {**arm, "rename_map": {TOP: WRIST}}]}
    )
    assert list(run.policy.config.image_features) == [WRIST, BASE]
    assert [list(robot.config.image_features) for robot in run.policy.robots] == [[WRIST], [WRIST, BASE]]
    assert [robot.cameras for robot in run.policy.robots] == [(WRIST,), (BASE, WRIST)]


def test_robot_in_prompt_lengthens_prompt(folder):
    tokens = {}
    for flag in ("false", "true"):
        run = mixed(folder, f"--dataset.robot_in_prompt={flag}")
        tokens[flag] = read(run, range(8))[1]["observation.language.attention_mask"].sum(axis=1)
    assert (tokens["true"] > tokens["false"]).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("members:\n  - root: a\n    wieght: 2\n", "member 1 .root 'a'.: 'wieght' is no option .*did you mean weight?"),
        ("members:\n  - root: a\n    weight: -1\n", "the weight of .*/a is -1"),
        ("members:\n  - root: a\n  - root: a\n", "member 2 .*: root .*/a is listed twice"),
        ("members:\n  - weight: 1\n", "root is None"),
        ("power: x\nmembers:\n  - root: a\n", "power is 'x', expected a number"),
        ("members:\n  - root: a\n    power: 5\n", "power is 5.0, expected a number between -4 and 4"),
        ("members:\n  - root: a\n    weight: 2:30\n", "weight is '2:30', expected a number"),
        ("members:\n  - root: a\n    episodes: {0: 3}\n", "episodes is {'0': '3'}, expected numbers"),
        ("members:\n  - root: a\n    robot: ../x\n", "robot is '../x'"),
        ("members:\n  - root: a\n    root: b\n", "line 3: 'root' is given twice"),
        ("members:\n  - root: a\n    members: b\n", "'members' is no option of a member"),
        ("weights: 1\nmembers:\n  - root: a\n", "'weights': expected members"),
        ("members: []\n", "expected members"),
        ("- a\n", "expected members"),
        ("members: &x\n  - root: a\n    tasks: *x\n", "line 3: a reference"),
        ("members: " + "[" * 50_000, "not YAML"),
        (
            "members:\n  - root: a\n    rename_map: !!python/object/apply:os.system [ls]\n",
            r"rename_map is \['ls'\], expected JSON",
        ),
        ("members:\n  - root: s3://key:secret@bucket/a\n", "credentials"),
    ],
)
def test_invalid_mixture_file_is_refused_by_member(tmp_path, text, message):
    (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_mixture(str(tmp_path / "mix.yaml"))


def test_mixture_file_takes_ranges_of_flags(tmp_path):
    ranges = "    episodes: [3, 10:13]\n    exclude_episodes: 7\n    fps: 010\n"  # of which YAML makes 613 and 8
    none = "    exclude_episodes: []\n    camera_keys: null\n    state:\n    action: ~\n    weight: 0.5\n"
    text = f"members:\n  - root: b\n    episodes: 0:3,7\n    tasks: [pick*]\n{none}  - root: a\n{ranges}"
    (tmp_path / "mix.yaml").write_text(text)
    a, b = members(read_mixture(str(tmp_path / "mix.yaml")))
    assert (a.episodes, a.exclude_episodes, a.fps) == ([3, 10, 11, 12], [7], 10)
    assert (a.root, b.root) == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert (b.episodes, b.exclude_episodes, b.tasks, b.weight) == ([0, 1, 2, 7], [], ["pick*"], 0.5)
    assert (b.camera_keys, b.state, b.action) == (None, None, None)


def test_incompatible_members_are_refused(folder):
    gantry, arm = MIXTURE["members"]
    for mixture, message in (
        ([gantry, {"root": "arm"}], "names no robot"),
        ([gantry, {**arm, "robot": "gantry"}], "are of one robot, and have 20 and 10 actions per second"),
        ([gantry, {**arm, "fps": 15}], "has 20 frames per second, and the mixture asks for 15"),
        ([{**gantry, "state": ["joint_0"]}, arm], "list each of them once"),
        ([{**gantry, "rename_map": {"observation.images.x": BASE}}, arm], "no feature|features are|rename_map"),
    ):
        with pytest.raises(ValueError, match=message):
            mixed(folder, mixture={"members": mixture})
    with pytest.raises(ValueError, match="robot_in_prompt=true: .* has one by name; leave it out"):
        mixed(folder, "--dataset.robot_in_prompt=true", mixture={"members": [gantry]})


def test_datasets_of_one_robot_share_camera_keys(folder):
    gantry = MIXTURE["members"][0]
    shutil.copytree(folder / "gantry", folder / "gantry2")
    copied = {**copy.deepcopy(gantry), "root": "gantry2"}  # else YAML has a reference
    with pytest.raises(ValueError, match=r"gantry2: camera_keys \['observation.images.top'\].* the same camera_keys"):
        mixed(folder, mixture={"members": [gantry, {**copied, "camera_keys": [TOP]}]})
    both = [{**member, "camera_keys": [TOP]} for member in (gantry, copied)]
    run = mixed(folder, "--dataset.missing_cameras=mask", mixture={"members": both})
    assert run.rows.camera_keys == (BASE,) and run.robots[0].own_names == {BASE: TOP}
    both = [{**member, "rename_map": {TOP: WRIST, WRIST: BASE}} for member in both]
    run = mixed(folder, "--dataset.missing_cameras=mask", mixture={"members": both})
    assert run.robots[0].own_names == {WRIST: TOP}  # or an export would see by a camera that was masked in training


def test_drop_n_last_frames_is_scaled_with_stride(folder):
    options = [f"--policy.{name}={value}" for name, value in KINDS["diffusion"].options.items()]
    where = write(folder, {"members": [{"root": "arm", "fps": 10}]}, "other.yaml")
    flags = [*FLAGS[:3], "--train.mode=full", "--scaling.use_gpu=false", "--policy.type=diffusion", where, *options]
    with pytest.raises(ValueError, match="leaves out the last 7 frames .* 2 frames apart .*drop_n_last_frames=14"):
        resolve(parse_args(flags), gpus_found=0)
    run = resolve(parse_args([*flags, "--dataset.drop_n_last_frames=14"]), gpus_found=0)
    assert run.rows.dropped == 14


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_held_out_batches_include_all_cameras(folder, compiled):
    """Batches of one robot would otherwise be recompiled for their set of cameras."""
    run = mixed(folder, "--dataset.eval_split=0.3", "--eval_steps=2")
    spec = replace(run.policy, train=replace(run.policy.train, compile=compiled))
    run = replace(run, policy=spec, job=replace(run.job, batch_size=4))
    with in_process.tasks_here():
        held_out = HeldOutLoss(run, Worker(torch.device("cpu")))
        cameras = [sorted(key for key in batch if key in (BASE, WRIST)) for batch in held_out._host_batches()]
    assert len(cameras) > 2
    assert all(keys == [BASE, WRIST] for keys in cameras) == compiled


def test_member_action_names_set_dimension_order(folder):
    gantry, arm = MIXTURE["members"]
    names = [f"motor_{i}" for i in (2, 0, 1)]
    run = mixed(folder, mixture={"members": [{**gantry, "action": names}, arm]})
    rows, columns = read(run, range(16))
    plain_rows, plain = read(mixed(folder), range(16))
    places = rows["dataset_index"] == 1
    np.testing.assert_array_equal(rows["action"][places][..., :3], plain_rows["action"][places][..., [2, 0, 1]])
    np.testing.assert_allclose(columns["action"][places][..., :3], plain["action"][places][..., [2, 0, 1]], atol=1e-6)
    assert run.rows.metas[1].features["action"].names == tuple(names)


@pytest.mark.ray
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_run_exports_policy_for_each_robot(folder, ray_cluster, monkeypatch):
    """Check row counts by weight, and load the exports with LeRobot alone."""
    output = folder / "run"
    (folder / "gantry" / "meta" / "environment.json").write_text('{"drawn": {"type": "a simulator"}}')
    argv = [
        *[*FLAGS, f"--policy.path={folder / 'base'}", f"--dataset.mixture=@{folder / 'mix.yaml'}"],
        *["--dataset.eval_split=0.3", "--eval_steps=6", "--log_freq=3", "--save_freq=4", "--run.record_rows=true"],
        *[f"--output_dir={output}", "--scaling.num_workers=2", "--scaling.cpus_per_worker=0.5"],
        *["--dataset.frame_cache", str(folder / "frames"), "--dataset.robot_in_prompt=true"],
    ]
    monkeypatch.setattr(vla, "make_trainer", partial(planted.make_trainer, faults=(Fault("kill", step=6),)))
    assert vla.main(argv) == 0
    assert check_rows.main([str(output)]) == 0
    assert [line["resumed_from_step"] for line in attempts(output)] == [0, 4]

    evaluation = json.loads((output / "evaluation.json").read_text())["robots"]
    assert evaluation.keys() == {"arm", "gantry"}
    assert len(evaluation["arm"]["trained"]["policy"]["mae"]) == 5
    measured = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][-1]
    assert measured["eval_loss_by_robot"].keys() == measured["loss_by_robot"].keys() == {"arm", "gantry"}
    exported = output / "pretrained_model"
    arm, gantry = exported / "arm", exported / "gantry"
    assert (arm / "model.safetensors").samefile(gantry / "model.safetensors")
    assert_exports_predict(exported, TinyPI05Policy)
    page = (output / "report.html").read_text()
    assert "loss_by_robot over steps" in page and "<h3>arm</h3>" in page
    assert "for the robot `arm`" in push.model_card(output, "me/both-arm", "arm")
    assert push.exported_robots(output / "pretrained_model") == ["arm", "gantry"]
    robot_file = json.loads((arm / "robot.json").read_text())
    assert (robot_file["robot"], robot_file["instructions_begin_with"]) == ("arm", "arm: ")
    assert "robot.json" in push.exported_files(arm)[0]
    assert json.loads((gantry / "environment.json").read_text()) == {"drawn": {"type": "a simulator"}}
    assert not (arm / "environment.json").exists()


def test_show_dataset_finds_misfits_among_chosen_cameras_only(tmp_path, capsys):
    make_dataset(tmp_path / "both", episodes=(5, 4))
    make_dataset(tmp_path / "one", episodes=(5, 4), cameras={TOP: (48, 64)})
    chosen = [{"root": name, "camera_keys": [TOP]} for name in ("both", "one")]
    write(tmp_path, {"members": chosen})
    assert show_dataset.main([f"@{tmp_path / 'mix.yaml'}"]) == 0
    assert "no misfits" in capsys.readouterr().out
    write(tmp_path, {"members": [{"root": "both"}, {"root": "one"}]})
    assert show_dataset.main([f"@{tmp_path / 'mix.yaml'}"]) == 0
    assert "1 misfit" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        show_dataset.main([f"@{tmp_path / 'mix.yaml'}", "--skip_idle=1", "--recap.labels=labels.parquet"])
    assert "--skip_idle, --recap.labels: of a mixture only" in capsys.readouterr().err
