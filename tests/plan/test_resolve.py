"""Resolved rows, statistics and mixtures of a run, against LeRobot's readers and statistics."""

import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lerobot_datasource import LeRobotDatasource
from tests.datasets import edit_json, make_dataset
from tests.plan.test_names import rename_files
from tests.tiny import make_base
from tests.training import test_as_lerobot as as_lerobot
from vla_finetuning.data.disk_cache import FrameCache, has_capacity
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.options import Selection
from vla_finetuning.data.shards import Sharding
from vla_finetuning.files import write_json
from vla_finetuning.options.command_line import EVALUATE, SERVE, parse_args, parse_evaluate
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.plan import base_policy
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.record import record_run
from vla_finetuning.plan.resolve import resolve
from vla_finetuning.policies.loading import load_policy, make_policy_config
from vla_finetuning.policies.pipelines import make_processors
from vla_finetuning.policies.processors import DeviceHalf, Prepare
from vla_finetuning.policies.registry import FAMILIES, family_of
from vla_finetuning.run.checkpoint import check_resumable, commit, write_pieces


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A dataset and a tiny base policy for it, which sees 56x56."""
    folder = tmp_path_factory.mktemp("run_plan")
    root = make_dataset(folder / "dataset", cameras={"observation.images.top": (48, 64)})
    meta = load_metadata(root)
    base = make_base(folder / "base", meta, chunk_size=8)
    return folder, root, base


def plan(setting, *flags, root=True):
    folder, dataset, base = setting
    options = [f"--policy.path={base}", f"--output_dir={folder / 'out'}", "--batch_size=4", "--steps=5"]
    options += [f"--dataset.root={dataset}"] if root else []
    return resolve(parse_args([*options, *flags]), gpus_found=0)


def policy_images(run, rows):
    """Return the images that reach the policy's vision tower, and the source of the rows."""
    source = run.rows.source(stream=(0, run.rows.last_row))
    (batch,) = source.read_rows(rows, len(rows))
    (camera,) = run.rows.camera_keys
    assert batch[camera].shape[1:] == source.example()[camera].shape[1:]
    pre, _ = make_processors(run.policy.folder, run.policy.config, run.robots[0].stats)
    prepared = Prepare(pre, run.rows.camera_keys, run.policy.config)(batch)
    inputs = {k: torch.from_numpy(v.copy()) for k, v in prepared.items()}
    family_of(run.policy.config).check_batch(inputs, run.policy.config)
    policy = load_policy(run.policy.folder, run.policy.config)
    return policy._preprocess_images(DeviceHalf(pre, run.policy.config)(inputs))[0], source


def test_auto_frame_cache_is_used_if_frames_repeat_and_fit(setting, monkeypatch, tmp_path):
    monkeypatch.setattr("vla_finetuning.plan.row_plan.FRAMES_DIR", str(tmp_path / "frames"))
    repeating, once = "--steps=20", "--steps=13"  # of 54 rows an epoch
    size = 54 * 48 * 64 * 3

    def cached(*flags):
        run = plan(setting, "--dataset.frame_cache=auto", *flags)
        assert run.rows.cached_bytes == size
        return run.rows.reading.frame_cache, describe(run)

    where, text = cached(repeating)
    assert where == FrameCache(str(tmp_path / "frames"), 200.0)
    assert "at most 20 GB per node, and 20 GB more for encoded images" in text
    assert f"decoded once: 0.0 GB of frames are cached in {tmp_path / 'frames'}, on every node" in text
    where, text = cached(once)
    assert where is None and "the run reads each frame once" in text
    monkeypatch.setenv("VLA_CACHE_GB", str(size / 1e9 * 0.99))
    where, text = cached(repeating)
    assert where is None and "the free space of" in text
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert has_capacity(tmp_path / "no/such/folder", 10**6) and not has_capacity(tmp_path, free)
    assert "decoded once" not in describe(plan(setting, repeating))


def test_global_shuffle_requires_cache_of_all_frames(setting, monkeypatch):
    flags = ["--dataset.global_shuffle=true", "--steps=20"]
    with pytest.raises(ValueError, match=r"global_shuffle draws single frames of .* GB, and no frames are cached"):
        plan(setting, *flags)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="and VLA_CACHE_GB=1e-06 of them are cached"):
        patch.setenv("VLA_CACHE_GB", "1e-6")
        assert "GB of frames, VLA_CACHE_GB=1e-06 are cached in " in describe(
            plan(setting, "--dataset.frame_cache=kept")
        )
        plan(setting, *flags, "--dataset.frame_cache=kept")
    run, plain = (plan(setting, *more, "--dataset.frame_cache=kept") for more in (flags, ["--steps=20"]))
    # A run goes on neither with it nor without it if it was started otherwise: its rows would be others.
    for was, now in ((run, plain), (plain, run)):
        with pytest.raises(ValueError, match="later_epochs: was .*, is "):
            check_resumable(replace(was.job.start, step=2, rows=8), now.job.start)


def test_shards_match_nodes_and_survive_resume_with_fewer_workers(setting):
    flags = ["--dataset.shards=2", "--steps=20", "--dataset.frame_cache=kept"]
    assert plan(setting, flags[2]).rows.reading.frame_cache == FrameCache(str(Path("kept").absolute()), 200.0)
    with pytest.raises(ValueError, match="--dataset.shards=2 with --scaling.num_workers=3: .* nodes with equally many"):
        plan(setting, *flags, "--scaling.num_workers=3", "--grad_accum=1")
    run = plan(setting, *flags, "--scaling.num_workers=4", "--grad_accum=1")
    assert run.rows.order.sharding == Sharding(2, 2 * run.rows.block_rows) and run.rows.per_epoch == 54
    description = describe(run)
    assert "are cached in" in description and "on each node those of its shard" in description
    assert run.rows.cached_bytes == 54 // 2 * 48 * 64 * 3
    # Its rows and their order are part of the run: fewer workers take them as they are.
    run.job.output_dir.mkdir(exist_ok=True)
    write_json(run.job.output_dir / CONFIG_NAME, run.config.to_json())
    resumed_run = resumed(run.job.output_dir, "--scaling.num_workers=1", "--grad_accum=4")
    assert resumed_run.rows.identity == run.rows.identity and resumed_run.rows.order.sharding == run.rows.order.sharding
    assert run.rows.identity != plan(setting, *flags[1:], "--scaling.num_workers=4", "--grad_accum=1").rows.identity


def test_frames_fitted_while_decoding_match_policy_resizing(setting, monkeypatch):
    from lerobot.policies.pi05 import modeling_pi05

    rows = [0, 7, 19, 33]
    expected, stored = policy_images(plan(setting), rows)
    small = plan(setting, "--dataset.image_size=[56, 56]")
    assert "56x56" in describe(small)
    # Nothing is left for the policy to resize.
    monkeypatch.setattr(modeling_pi05, "resize_with_pad_torch", None)
    actual, fitted = policy_images(small, rows)
    assert len(actual) == len(expected) == 1
    level = 2 / 255  # of uint8, in the policy's [-1, 1]
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=level)
    assert (actual[0] - expected[0]).abs().mean() < 0.3 * level
    assert not torch.equal(actual[0], expected[0])  # the float path is another one: something was compared
    assert small.rows.rates == {"frames_per_s": 1, "decoded_bytes_per_s": fitted.row_bytes()}
    assert stored.row_bytes() - fitted.row_bytes() == 48 * 64 * 3 - 56 * 56 * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset.image_size=[28, 28]"], r"the policy sees \[56, 56\]; give that"),
        (["--dataset.image_size=[56]"], r"--dataset.image_size=\[56\]"),
        (
            ["--dataset.image_size=[56, 56]", '--policy.normalization_mapping={"VISUAL": "MEAN_STD"}'],
            "normalises images before it resizes them",
        ),
    ],
)
def test_image_sizes_that_change_policy_input_are_refused(setting, flags, message):
    with pytest.raises(ValueError, match=message):
        plan(setting, *flags)


@pytest.fixture(scope="module")
def large(setting):
    return make_dataset(setting[0] / "large", cameras={"observation.images.top": (96, 128)}, episodes=(12,) * 4)


def test_auto_image_size_is_used_if_rows_halve(setting, large):
    run = plan(setting, f"--dataset.root={large}", root=False)
    assert list(run.rows.image_size) == run.config.dataset.image_size == [56, 56]  # also of a resume
    description = describe(run)
    assert "fitted into 56x56 where they are decoded; rows of 0.01 MB" in description
    small = plan(setting)  # 48x64
    assert small.rows.image_size is None and small.config.dataset.image_size == "stored"
    assert "bit for bit" in describe(small)
    stored = plan(setting, f"--dataset.root={large}", "--dataset.image_size=stored", root=False)
    assert stored.rows.image_size is None
    assert stored.rows.rates["decoded_bytes_per_s"] > 2 * run.rows.rates["decoded_bytes_per_s"]
    # LeRobot transforms frames before the policy resizes them.
    transformed = "--dataset.image_transforms.enable"
    assert plan(setting, f"--dataset.root={large}", transformed, root=False).rows.image_size is None
    # Where the policy would see other pixels than after its own resizing, and where it resizes nothing.
    normalising = '--policy.normalization_mapping={"VISUAL": "MEAN_STD"}'
    assert plan(setting, f"--dataset.root={large}", normalising, root=False).rows.image_size is None


def test_cameras_of_different_sizes_mix_if_policy_fits_them(setting, large):
    both = f"--dataset.root={setting[1]},{large}"
    assert plan(setting, both, root=False).rows.image_size == (56, 56)
    with pytest.raises(ValueError, match="differ in"):
        plan(setting, both, "--dataset.image_size=stored", root=False)


def test_policy_that_stretches_images_reads_stored_sizes(tmp_path):
    """EVO1's `image_resolution` is that of squares, and not of frames with black around."""
    cameras = {"observation.images.top": (96, 128)}
    root = make_dataset(tmp_path / "dataset", cameras=cameras, episodes=(4, 8))
    run = as_lerobot.resolved(root, "evo1", tmp_path, **{"dataset.image_size": "auto"})
    assert run.policy.config.image_resolution == (32, 32) and run.rows.image_size is None
    with pytest.raises(ValueError, match="a evo1 policy fits no images into a size"):
        as_lerobot.resolved(root, "evo1", tmp_path, **{"dataset.image_size": "[32, 32]"})


@pytest.fixture(scope="module")
def second(setting):
    return make_dataset(
        setting[0] / "second", cameras={"observation.images.top": (48, 64)}, episodes=(4, 8), seed=1, tasks=("wait",)
    )


VECTORS = ("action", "observation.state")


def mixture_flag(weights):
    return f"--dataset.mixture={json.dumps({str(root): weight for root, weight in weights.items()})}"


def rows_by_root(run):
    return dict(zip((meta.root for meta in run.rows.metas), run.rows.identity["rows_per_source"], strict=True))


@pytest.mark.parametrize("power", [0.5, -1])
def test_mixture_power_weights_by_training_frames(setting, second, tmp_path, power):
    _, root, _ = setting
    rule = {"power": power}
    run = plan(setting, mixture_flag({root: {**rule, "exclude_episodes": [0]}, second: rule}), root=False)
    frames = np.array(run.rows.per_dataset)
    assert frames[1] == 12 and frames[0] == 54 - load_metadata(root).episode_length[0]
    shares = frames ** float(power) / (frames ** float(power)).sum() * frames.sum()
    assert np.abs(np.array(run.rows.identity["rows_per_source"]) - shares).max() < 1
    assert re.search(rf" {Path(root).name} +- +{frames[0]:g} +{frames[0] ** float(power):g} ", describe(run))
    job = replace(run.job, output_dir=tmp_path)
    record_run(job, run.policy, "", {}, run.rows)
    weights = [dataset["weight"] for dataset in json.loads((tmp_path / "run.json").read_text())["datasets"]]
    assert weights == (frames ** float(power)).tolist()  # for the card, in the order of the datasets
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"power: {power}\nmembers:\n  - root: {root}\n    exclude_episodes: [0]\n  - root: {second}\n")
    from_file = plan(setting, f"--dataset.mixture=@{mix}", root=False)
    assert rows_by_root(from_file) == rows_by_root(run)


def test_mixture_weights_rows_and_statistics(setting, second, monkeypatch):
    from lerobot.datasets.compute_stats import aggregate_stats

    folder, root, _ = setting
    monkeypatch.chdir(folder)
    stored_ones = "--dataset.statistics=stored"
    run = plan(setting, mixture_flag({root: 1, "second": 2}), stored_ones, root=False)
    assert run.config.dataset.mixture == {str(root): 1, str(second): 2}  # a resume runs elsewhere
    assert run.rows.per_epoch == 66 and run.rows.identity["rows_per_source"] == [22, 44]
    assert re.search(rf" {second.name} +- +12 +2 +66\.7% ", describe(run))
    source = run.rows.source(stream=(0, run.rows.last_row))
    (batch,) = source.read_rows(range(66), 66)
    assert np.bincount(batch["dataset_index"]).tolist() == [22, 44]
    assert set(batch["task"][batch["dataset_index"] == 1]) == {"wait"}
    # What counts for as much of the statistics as it does of the rows.
    stored = [load_metadata(r).stats for r in (root, second)]
    frames = plan(
        setting, mixture_flag({root: 1, second: 2}), "--dataset.mixture_stats=frames", stored_ones, root=False
    )
    listed = plan(setting, f"--dataset.root={root},{second}", stored_ones, root=False)
    for counts, variant in (([22, 44], run), ([54, 12], listed), ([54, 12], frames)):
        weighted = [{k: {**s[k], "count": np.array([n])} for k in VECTORS} for s, n in zip(stored, counts, strict=True)]
        expected = aggregate_stats(weighted)
        for key in VECTORS:
            for name in ("q01", "q99", "mean", "std"):
                np.testing.assert_allclose(variant.robots[0].stats[key][name], expected[key][name], err_msg=name)
    assert plan(setting, mixture_flag({root: 1, second: 1}), root=False).rows.identity != run.rows.identity


def test_duplicate_and_incompatible_datasets_are_refused(setting, tmp_path, monkeypatch):
    root = setting[1]
    monkeypatch.chdir(setting[0])
    wider = make_dataset(tmp_path / "wider", cameras={"observation.images.top": (48, 64)}, state_dim=6)
    for flag, message in (
        (mixture_flag({root: 1, "dataset": 2}), "--dataset.mixture names a dataset twice"),
        (f"--dataset.root={root},dataset", "--dataset.root names a dataset twice"),
        (f"--dataset.root={root},{wider}", "cannot be read together: they differ in .*observation.state"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(setting, flag, root=False)


@pytest.fixture(scope="module")
def other_names(second):
    """Return the second dataset with another name for its camera and state."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    names = {"observation.images.top": "observation.images.head", "observation.state": "observation.joints"}
    root = rename_files(shutil.copytree(second, second.with_name("other_names")), names)
    assert len(LeRobotDataset("local/other", root=root, video_backend="pyav")[3]["observation.joints"]) == 4
    return root


def test_renamed_dataset_in_mixture_yields_same_rows(setting, second, other_names):
    root = setting[1]
    names = {"observation.images.head": "observation.images.top", "observation.joints": "observation.state"}
    with pytest.raises(ValueError, match="the second lacks .*observation.state") as error:
        plan(setting, mixture_flag({root: 1, other_names: 2}), root=False)
    assert str(root) in str(error.value) and str(other_names) in str(error.value)
    suggested = json.loads(str(error.value).split("--rename_map='")[1].removesuffix("'"))
    assert suggested == names  # what it says is what does

    rows = []
    for member, flags in ((second, []), (other_names, [f"--rename_map={json.dumps(suggested)}"])):
        run = plan(setting, mixture_flag({root: 1, member: 2}), "--dataset.statistics=stored", *flags, root=False)
        source = run.rows.source(stream=(0, run.rows.last_row))
        pre, _ = make_processors(run.policy.folder, run.policy.config, run.robots[0].stats)
        prepare = Prepare(pre, run.rows.camera_keys, run.policy.config)
        rows.append(prepare(next(iter(source.read_rows(range(20), 20)))))
        assert run.rows.camera_keys == ("observation.images.top",)
        assert not run.robots[0].rename_map  # an export has the first dataset's names
    assert rows[0].keys() == rows[1].keys() and set(rows[0]["dataset_index"]) == {0, 1}
    for key, values in rows[0].items():
        np.testing.assert_array_equal(rows[1][key], values, err_msg=key)


def changed(root, copy, change, *, order=None):
    """Copy a dataset with changed info.json and stats.json, and with actions in another order."""
    copy = shutil.copytree(root, copy)
    for path in (copy / "meta/info.json", copy / "meta/stats.json"):
        edit_json(path, partial(change, path.stem))
    for path in (copy / "data").rglob("*.parquet") if order else ():
        table = pq.read_table(path)
        values = np.array(table["action"].to_pylist(), np.float32)[:, order]
        at, field = table.schema.get_field_index("action"), table.schema.field("action")
        pq.write_table(table.set_column(at, field, pa.array(values.tolist(), field.type)), path)
    return copy


def reordered(names):
    def change(file, content):
        if file == "info":
            content["features"]["action"]["names"] = names
        else:
            stats = content["action"]
            stats |= {name: [value[i] for i in (2, 0, 1)] for name, value in stats.items() if name != "count"}

    return change


def test_dimensions_follow_order_of_first_dataset(setting, second, tmp_path):
    root = setting[1]
    shuffled = changed(second, tmp_path / "shuffled", reordered(["motor_2", "motor_0", "motor_1"]), order=[2, 0, 1])
    renamed = changed(second, tmp_path / "other", reordered(["c", "a", "b"]), order=[2, 0, 1])
    with pytest.raises(
        ValueError, match=r"dimensions of 'action' differently: \['motor_0'.*\['c', 'a', 'b'\]"
    ) as error:
        plan(setting, f"--dataset.root={root},{renamed}", root=False)
    suggested = json.loads(str(error.value).split("--dataset.dimension_map='")[1].split("'")[0])
    assert suggested == {"action": {"c": "motor_0", "a": "motor_1", "b": "motor_2"}}  # if they were in this order
    names = json.dumps({"action": {"c": "motor_2", "a": "motor_0", "b": "motor_1"}})
    with pytest.raises(ValueError, match=r"dimension_map names \['actions'\]"):
        plan(setting, f"--dataset.root={root},{renamed}", '--dataset.dimension_map={"actions": {}}', root=False)

    runs = [
        plan(setting, f"--dataset.root={root},{dataset}", "--dataset.statistics=stored", *flags, root=False)
        for dataset, flags in ((second, []), (shuffled, []), (renamed, [f"--dataset.dimension_map={names}"]))
    ]
    assert ["action: dimensions reordered" in describe(run) for run in runs] == [False, True, True]
    rows = [next(iter(run.rows.source(stream=(0, 66)).read_rows(range(66), 66))) for run in runs]
    for run, actual in zip(runs, rows, strict=True):
        np.testing.assert_array_equal(actual["action"], rows[0]["action"])
        for name, value in runs[0].robots[0].stats["action"].items():
            np.testing.assert_allclose(run.robots[0].stats["action"][name], value, err_msg=name)


def test_datasets_in_different_units_are_refused_unless_allowed(setting, second, tmp_path):
    def degrees(file, content):
        if file == "stats":
            for name in ("min", "max", "mean", "std", "q01", "q99"):
                content["action"][name] = [100 * value for value in content["action"][name]]

    both = f"--dataset.root={setting[1]},{changed(second, tmp_path / 'degrees', degrees)}"
    message = r"different units: 'motor_\d' of 'action' ranges from -?\d\.\d+ to \d\.\d+ in the first and from -?\d+"
    with pytest.raises(ValueError, match=message):
        plan(setting, both, root=False)
    flags = ["--dataset.mixed_ranges=true", "--dataset.statistics=stored"]
    assert plan(setting, both, *flags, root=False).robots[0].stats["action"]["q99"].max() > 10


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        # LeRobot would normalise all four dimensions with the one number.
        (lambda stats: stats.update(q99=stats["q99"][:1]), r"'q99' of 'observation.state' has shape \(1,\)"),
        (lambda stats: stats.update(q01=stats["q99"], q99=stats["q01"]), "q01 of 'observation.state' is above q99"),
    ],
)
def test_invalid_stored_statistics_are_refused(setting, tmp_path, damage, message):
    copy = shutil.copytree(setting[1], tmp_path / "copy")
    edit_json(copy / "meta/stats.json", lambda stats: damage(stats["observation.state"]))
    with pytest.raises(ValueError, match=f"dataset {copy}: .*{message}"):
        plan(setting, f"--dataset.root={copy}", root=False)


def test_tilde_paths_are_expanded(setting, monkeypatch):
    folder, root, base = setting
    monkeypatch.setenv("HOME", str(folder))
    run = plan(
        setting, f"--dataset.root=~/{root.name}", f"--policy.path=~/{base.name}", "--output_dir=~/out", root=False
    )
    assert (run.rows.metas[0].root, run.policy.folder, run.job.output_dir) == (str(root), base, folder / "out")
    assert run.config.policy_path == str(base) and run.config.output_dir == str(folder / "out")


@pytest.fixture
def started(setting, tmp_path):
    """Return the folder of a run with a checkpoint, and its base."""
    folder, dataset, base = setting
    base = Path(shutil.copytree(base, tmp_path / "base"))
    run = plan((tmp_path, dataset, base))
    run.job.output_dir.mkdir()
    write_json(run.job.output_dir / CONFIG_NAME, run.config.to_json())
    step = run.job.checkpoints_dir / "step_00000002"
    commit(step, replace(run.job.start, step=2, rows=8), write_pieces(step, {}), 0)
    return run.job.output_dir, base


def resumed(output_dir, *flags):
    return resolve(parse_args(["--resume", f"--output_dir={output_dir}", *flags]), gpus_found=0)


@pytest.mark.parametrize("file", ["config.json", "tokenizer/new.json"])
def test_resume_with_changed_base_is_refused_unopened(started, monkeypatch, file):
    output_dir, base = started
    assert resumed(output_dir).policy.base["files"].keys() >= {"config.json", "policy_preprocessor.json"}
    (base / file).parent.mkdir(exist_ok=True)
    (base / file).write_bytes((base / file).read_bytes() + b" " if (base / file).exists() else b"{}")
    monkeypatch.setattr(base_policy, "policy_config_of", None)  # where the first of its files would be opened
    with pytest.raises(ValueError, match="the base policy is not the one the run was started from"):
        resumed(output_dir)


@pytest.mark.parametrize("file", ["model.safetensors", "policy_preprocessor.json"])
def test_base_changed_after_plan_is_refused_at_start(started, file):
    output_dir, base = started
    policy, path = resumed(output_dir).policy, base / file
    policy.start()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # the same size and shapes
    path.write_bytes(data)
    named = "the weights" if file == "model.safetensors" else file
    with pytest.raises(ValueError, match=f"has changed since this run was planned: {named} changed"):
        policy.start()


def test_node_with_partial_hub_snapshot_fetches_rest(started, tmp_path, monkeypatch):
    output_dir, base = started
    policy, commit = resumed(output_dir).policy, "a" * 40
    (tmp_path / "snapshot").mkdir()
    shutil.copy(base / "config.json", tmp_path / "snapshot")
    monkeypatch.setattr("vla_finetuning.policies.spec.fetch_pretrained", lambda *names: (base, names))
    of_hub = replace(policy, folder=tmp_path / "snapshot", base={**policy.base, "path": "me/arm", "revision": commit})
    assert of_hub.folder_here() == base and policy.folder_here() == policy.folder
    of_hub.start()


def test_remote_code_requires_flag_at_each_start(setting, started, monkeypatch):
    known = replace(FAMILIES["pi0_fast"], as_lerobot=True)
    monkeypatch.setitem(FAMILIES, "pi0_fast", known)
    folder, dataset, _ = setting
    flags = ["--policy.type=pi0_fast", f"--dataset.root={dataset}", f"--output_dir={folder / 'out'}", "--batch_size=4"]
    flags += ["--train.mode=full"]
    refusal = "'pi0_fast' runs code that comes with lerobot/fast-action-tokenizer: .*--policy.trust_remote_code true"
    with pytest.raises(ValueError, match=refusal):
        resolve(parse_args(flags), gpus_found=0)
    with pytest.raises(OSError, match="the tokenizer of the 'pi0_fast' policy"):  # further: there is no Hub here
        resolve(parse_args([*flags, "--policy.trust_remote_code", "true"]), gpus_found=0)
    # A run's folder cannot ask for it.
    edit_json(started[0] / CONFIG_NAME, lambda config: config.update(policy_trust_remote_code=True))
    assert not resumed(started[0]).config.policy_trust_remote_code
    assert resumed(started[0], "--policy.trust_remote_code=true").config.policy_trust_remote_code


def test_policy_options_that_conflict_with_training_are_refused(setting):
    with pytest.raises(ValueError, match="--policy.dtype=bfloat16.*weights that train must be float32"):
        plan(setting, "--policy.dtype=bfloat16")
    message = "--policy.train_expert_only has no effect on a 'tiny_pi05' here; use --train.mode expert"
    with pytest.raises(ValueError, match=message):
        plan(setting, "--policy.train_expert_only=true")
    flags = ["--policy.path=/p", "--env.type=two_bins", "--output_dir=/o", "--policy.device=cuda"]
    with pytest.raises(ValueError, match="--policy.device has no effect .*; use --use_gpu$"):
        base_policy.check_policy_options(parse_evaluate(flags), make_policy_config("act"))
    assert "use_gpu" in EVALUATE.flags and "use_gpu" in SERVE.flags


def rehearsal(folder, episodes, tasks, *flags):
    root = make_dataset(folder / "small", episodes=episodes, tasks=tasks, cameras={"observation.images.top": (48, 64)})
    return resolve(parse_args(["--preset=demo", f"--dataset.root={root}", f"--output_dir={folder / 'o'}", *flags]), 0)


@pytest.fixture
def demo_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_finetuning.plan.demo.DEMO_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("demo_cache")
def test_rehearsal_adapts_batch_and_split_to_few_episodes(tmp_path):
    run = rehearsal(tmp_path, (9, 8, 7), ("go left", "go right"))
    assert [len(run.rows.train_episodes[0]), len(run.rows.eval_episodes[0])] == [2, 1]
    assert run.config.global_batch_size <= run.rows.per_epoch
    plan = describe(run)
    assert f"{tmp_path / 'small'}: 1 of 3 episodes held out, of the largest task; no task has 5" in plan
    assert f"--batch_size is {run.config.batch_size} instead of the preset's 32" in plan
    argv = ["--preset=demo", f"--dataset.root={tmp_path / 'small'}", f"--output_dir={tmp_path / 'o'}"]
    with pytest.raises(ValueError, match="--eval_steps=50: .* holds out no episode to compute a loss on"):
        resolve(parse_args([*argv, "--dataset.episodes=0", "--eval_steps=50", "--save_freq=50"]), 0)
    with pytest.raises(ValueError, match="is more than the .* training frames"):  # what the user chose stays
        resolve(replace(run.config, batch_size=64), 0)


@pytest.mark.usefixtures("demo_cache")
def test_rehearsal_with_one_dataset_holding_out_nothing(tmp_path):
    cameras = {"observation.images.top": (48, 64)}
    other = make_dataset(tmp_path / "other", episodes=(6,), tasks=("go left",), cameras=cameras)
    run = rehearsal(tmp_path, (9, 8, 7), ("go left", "go right"), f"--dataset.root={tmp_path / 'small'},{other}")
    assert [len(held_out) for held_out in run.rows.eval_episodes] in ([0, 1], [1, 0])
    source, rows = run.rows.held_out(check_files=True), run.rows.held_out_rows(0)
    (read,) = source.read_rows(rows.positions.tolist(), len(rows.positions))
    with pytest.raises(ValueError, match="none chosen"):  # a weight asks for rows of each
        LeRobotDatasource(run.rows.metas, Selection(episodes=run.rows.eval_episodes, weights=[1, 1]))
    assert len(rows.positions) == 7
    assert set(read["dataset_index"]) == {[len(held_out) for held_out in run.rows.eval_episodes].index(1)}


def test_plan_names_tasks_without_training_episodes(setting):
    description = describe(plan(setting, "--dataset.episodes=0,1,2", "--dataset.eval_split=0.1"))
    assert "no row has the task 'go to the blue bin': all of its episodes are held out or too short" in description
    assert "no row has the task" not in describe(plan(setting, "--dataset.eval_split=0.1"))


def test_episodes_are_excluded_by_file_task_and_dataset(setting, tmp_path, monkeypatch):
    folder, dataset, _ = setting
    (tmp_path / "bad.json").write_text("[0, 4]")
    run = plan(setting, f"--dataset.exclude_episodes=@{tmp_path}/bad.json", "--dataset.tasks=*red*")
    assert run.rows.train_episodes[0].tolist() == [2] and run.config.dataset.exclude_episodes == [0, 4]
    description = describe(run)
    assert "1 of 6 episodes are used: 2 are left out by --dataset.exclude_episodes; 3 have no task that" in description
    make_dataset(tmp_path / "other", cameras={"observation.images.top": (48, 64)})
    monkeypatch.chdir(tmp_path)
    two = [f"--dataset.root={dataset},other", '--dataset.exclude_episodes={"other": [1, 2]}']
    run = plan(setting, *two, f'--dataset.episodes={{"{dataset}": [5]}}', root=False)
    assert [e.tolist() for e in run.rows.train_episodes] == [[5], [0, 3, 4, 5]]
    with pytest.raises(ValueError, match="--dataset.episodes with several datasets must name"):
        plan(setting, two[0], "--dataset.episodes=1", root=False)
