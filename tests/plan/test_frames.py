"""Frames chosen by --dataset.skip_idle and --dataset.episode_weights, counted row by row."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diagnostics import check_rows
from tests.datasets import all_rows, edit_rows, make_dataset
from tests.in_process import CPU
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.plan.describe import describe
from vla_finetuning.plan.resolve import resolve, with_stats
from vla_finetuning.run.attempts import start_attempt
from vla_finetuning.run.checkpoint import check_resumable, commit, write_pieces
from vla_finetuning.run.progress import recorded_rows
from vla_finetuning.training.callbacks import RowLog
from vla_finetuning.training.worker import Worker

CAMERA = {"observation.images.top": (48, 64)}
# Of five episodes; nothing moves in these frames, nor in any of the last episode.
EPISODES, HELD = (20, 12, 16, 11, 14), ((0, 4, 13), (2, 0, 7), (2, 9, 15), (4, 0, 13))
LEFT = {0: [*range(4), *range(13, 20)], 1: list(range(12)), 2: [7, 8], 3: list(range(11))}
START = np.cumsum([0, *EPISODES])
CHUNK = 8


def hold(values, episode, frame):
    for number, first, last in HELD:
        idle = (episode == number) & (frame >= first) & (frame <= last)
        values[idle] = values[(episode == number) & (frame == first)]


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run_frames")
    tasks = ("pick", "place")
    for name, seed in (("dataset", 0), ("other", 1)):
        root = make_dataset(folder / name, episodes=EPISODES, cameras=CAMERA, tasks=tasks, seed=seed)
        for column in ("observation.state", "action"):
            edit_rows(root, column, hold)
    base = make_base(folder / "base", load_metadata(folder / "dataset"), chunk_size=CHUNK)
    (folder / "weights.json").write_text('{"0": 0.5, "1": 2.5, "3": 0}')
    return folder, base


def run_of(setting, *flags, out="out"):
    folder, base = setting
    options = [f"--policy.path={base}", f"--output_dir={folder / out}", "--batch_size=4", "--steps=20"]
    if not any(flag.startswith("--dataset.mixture") for flag in flags):
        options.append(f"--dataset.root={folder / 'dataset'}")
    return resolve(parse_args([*options, *flags]), gpus_found=0)


def rows_of(run, epoch):
    """Count (dataset, episode, frame) of an epoch."""
    plan = run.rows.source(stream=(0, run.rows.last_row)).plan
    ends = [0, *run.rows.epoch_ends] if run.rows.epoch_ends else run.rows.per_epoch * np.arange(epoch + 2)
    counts = Counter()
    for window in plan.slices(int(ends[epoch]), int(ends[epoch + 1])):
        part, index = window.rows()
        dataset = plan.episodes.dataset_index[window.episode[part]]
        number = np.searchsorted(START, index, side="right") - 1
        counts.update(zip(dataset.tolist(), number.tolist(), (index - START[number]).tolist(), strict=True))
    return counts


def once(left, dataset=0, dropped=0):
    return Counter(
        (dataset, episode, frame)
        for episode, frames in left.items()
        for frame in frames
        if frame < EPISODES[episode] - dropped
    )


def test_skip_idle_combines_with_other_row_options(setting):
    skip = "--dataset.skip_idle=0.5"
    run = run_of(setting, skip)
    assert rows_of(run, 0) == rows_of(run, 1) == once(LEFT)
    assert run.rows.per_epoch == 36 and run.rows.train_episodes[0].tolist() == [0, 1, 2, 3] and not run.rows.epoch_ends
    assert any("1 episodes are left out whole by --dataset.skip_idle" in note for note in run.notes)
    run = run_of(
        setting, skip, "--dataset.drop_n_last_frames=3", "--dataset.exclude_episodes=3", "--dataset.tasks=pick"
    )
    assert rows_of(run, 0) == once({0: LEFT[0], 2: LEFT[2]}, dropped=3)
    assert run.rows.per_epoch == len(LEFT[0]) - 3 + len(LEFT[2])
    # Held out are the last two of 0, 2, 4; the last of 1, 3.
    run = run_of(setting, skip, "--dataset.eval_split=0.4")
    assert rows_of(run, 0) == once({k: LEFT[k] for k in (0, 1)})
    assert run.rows.held_out().plan.rows_per_epoch == 16 + 11 + 14  # held out are all of their frames
    folder = setting[0]
    mixture = json.dumps({str(folder / "dataset"): 1, str(folder / "other"): 3})
    mixed = run_of(setting, skip, f"--dataset.mixture={mixture}")
    assert mixed.rows.identity["rows_per_source"] == [18, 54] and mixed.rows.per_epoch == 72
    two = rows_of(mixed, 0) + rows_of(mixed, 1)
    assert two == once(LEFT) + Counter({key: 3 for key in once(LEFT, dataset=1)})
    notes = run_of(setting, "--dataset.drop_n_last_frames=12").notes
    assert "2 training episodes have no rows: the last 12 frames of each are not trained on" in notes[0]
    plain = run_of(setting)
    assert not plain.rows.described and plain.rows.per_epoch == sum(EPISODES)


def test_skip_idle_rows_match_lerobot_action_chunks(setting):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    run = run_of(setting, "--dataset.skip_idle=0.5", "--dataset.image_size=stored")
    source = run.rows.source(stream=(0, run.rows.last_row))
    dataset = LeRobotDataset(
        "test", root=setting[0] / "dataset", video_backend="pyav",
        delta_timestamps={"action": [i / 10 for i in range(CHUNK)]},
    )  # fmt: skip
    (rows,) = source.read_rows(range(run.rows.per_epoch), run.rows.per_epoch)
    assert sorted(rows["index"].tolist()) == sorted(START[e] + frame for e, f in LEFT.items() for frame in f)
    for at, index in enumerate(rows["index"].tolist()):
        expected = dataset[index]
        assert np.array_equal(rows["action"][at], expected["action"].numpy())
        assert np.array_equal(rows["action_is_pad"][at], expected["action_is_pad"].numpy())
        if index in (3, 40, 48):
            image = expected["observation.images.top"].movedim(0, -1)
            assert np.array_equal(rows["observation.images.top"][at], (image * 255).round().numpy().astype(np.uint8))


def test_exact_statistics_exclude_idle_frames(setting):
    exact = ("--dataset.skip_idle=0.5", "--dataset.statistics=exact", "--dataset.drop_n_last_frames=3")
    left = np.concatenate([START[episode] + np.array(frames) for episode, frames in LEFT.items()])
    rows = [all_rows(setting[0] / name, ["action"])["action"][left] for name in ("dataset", "other")]
    run = run_of(setting, *exact)
    assert "over all frames of the training episodes that --dataset.skip_idle leaves" in describe(run)
    quantiles = with_stats(run).robots[0].stats["action"]
    for name, q in (("q01", 0.01), ("q99", 0.99)):
        np.testing.assert_array_equal(quantiles[name], np.quantile(rows[0], q, axis=0, method="inverted_cdf"))
    mixture = json.dumps({str(setting[0] / "dataset"): 1, str(setting[0] / "other"): 3})
    mixed = run_of(setting, *exact, f"--dataset.mixture={mixture}")
    quantiles = with_stats(mixed).robots[0].stats["action"]
    weights = np.repeat(np.array(mixed.rows.identity["rows_per_source"]) / len(left), len(left))
    both = np.concatenate(rows)
    for name, q in (("q01", 0.01), ("q99", 0.99)):
        expected = [np.quantile(column, q, weights=weights, method="inverted_cdf") for column in both.T]
        np.testing.assert_array_equal(quantiles[name], expected)


def test_episode_weights_set_row_counts_per_epoch(setting):
    weights = f"--dataset.episode_weights=@{setting[0] / 'weights.json'}"
    run = run_of(setting, weights, "--steps=200")
    assert run.config.dataset.episode_weights == weights.partition("=")[2]
    assert run.rows.train_episodes[0].tolist() == [0, 1, 2, 4] and run.rows.per_epoch == 10 + 30 + 16 + 14
    total = Counter()
    for epoch in range(10):
        total += rows_of(run, epoch)
        for episode, weight in ((0, 0.5), (1, 2.5), (2, 1), (4, 1)):
            counts = {total[0, episode, frame] for frame in range(EPISODES[episode])}
            assert len(counts) == 1 and abs(counts.pop() - (epoch + 1) * weight) < 1
    assert {episode for _, episode, _ in total} == {0, 1, 2, 4}
    positions = np.arange(run.rows.last_row)
    starts = np.flatnonzero(np.diff(run.rows.epochs_of(positions))) + 1
    assert starts.tolist() == list(run.rows.epoch_ends[: len(starts)])
    both = run_of(setting, weights, "--dataset.skip_idle=0.5", "--steps=200")
    total = sum((rows_of(both, epoch) for epoch in range(2)), Counter())
    assert total == Counter({(0, e, f): times for e, times in ((0, 1), (1, 5), (2, 2)) for f in LEFT[e]})
    plan = describe(both)
    for line in ("1 of weight 0.5, 2 of weight 1, 1 of weight 2.5", "rows on average"):
        assert line in plan, plan
    assert "1 have weight 0 by --dataset.episode_weights" in plan


def test_resume_with_changed_episode_weights_is_refused(setting, tmp_path):
    path = tmp_path / "weights.csv"
    path.write_text("episode_index,weight\n0,2\n")
    flags = ("--dataset.skip_idle=0.5", f"--dataset.episode_weights=@{path}")
    start = run_of(setting, *flags).job.start
    path.write_text("episode_index,weight\n0,2\n1,0.5\n")
    changed = run_of(setting, *flags).job.start
    check_resumable(changed, changed)
    with pytest.raises(ValueError, match="the data is not what the run was started with .*episode_weights: was"):
        check_resumable(start, changed)


def test_skip_idle_without_remaining_frames_is_refused(setting):
    with pytest.raises(ValueError, match="nothing moves for longer than .*nothing is left; raise it"):
        run_of(setting, "--dataset.skip_idle=0.5", "--dataset.episodes=4")


@pytest.fixture
def recorded(setting, tmp_path):
    """Record the rows of a run as if it had trained `steps` steps."""

    def record(*flags, steps):
        run = run_of(setting, "--run.record_rows=true", f"--steps={steps}", *flags, out=tmp_path / "run")
        run.job.output_dir.mkdir()
        (run.job.output_dir / CONFIG_NAME).write_text(json.dumps(run.config.to_json()))
        plan = run.rows.source(stream=(0, run.rows.last_row)).plan
        attempt = SimpleNamespace(number=start_attempt(run.job.output_dir, 0, 1))
        schedule = SimpleNamespace(step_of=lambda number: number)
        log = RowLog(SimpleNamespace(run=run, worker=Worker(CPU), attempt=attempt, schedule=schedule))
        for step in range(steps):
            positions = np.arange(4 * step, 4 * step + 4)
            rows = [window.rows() + (window.episode,) for window in plan.slices(positions[0], positions[-1] + 1)]
            dataset = np.concatenate([plan.episodes.dataset_index[episode[part]] for part, _, episode in rows])
            index = np.concatenate([index for _, index, _ in rows])
            columns = {"position": positions, "dataset_index": dataset, "index": index}
            log.on_batch(step, {key: torch.from_numpy(column) for key, column in columns.items()}, {})
        folder = run.job.checkpoints_dir / f"step_{steps:08d}"
        commit(folder, replace(run.job.start, step=steps, rows=4 * steps), write_pieces(folder, {}), 0)
        return run

    return record


def test_check_rows_finds_lost_doubled_and_unchosen_rows(setting, recorded, capsys):
    weights = f"--dataset.episode_weights=@{setting[0] / 'weights.json'}"
    run = recorded(weights, "--dataset.skip_idle=0.5", steps=60)
    epochs = check_rows.check_rows(run)
    assert all(epoch.ok for epoch in epochs) and all(epoch.whole for epoch in epochs[:-1]) and not epochs[-1].whole
    assert len(epochs) >= 3 and sum(epoch.trained for epoch in epochs) == 240
    # A row of the first epoch is lost, and another one, of those that come in it, once more in its place.
    path = run.job.output_dir / "rows" / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    gone, doubled = lines[0]["rows"][0], lines[1]["rows"][-1]
    lines[0]["rows"][0] = doubled
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert check_rows.main([str(run.job.output_dir)]) == 1
    first = capsys.readouterr().out.splitlines()[1]
    assert f"1 missing, e.g. (dataset_index, index) [({gone[0]}, {gone[1]})]" in first
    assert f"1 doubled, e.g. (dataset_index, index) [({doubled[0]}, {doubled[1]})]" in first
    # And two that are not among those chosen: one idles, and the other's episode weighs nothing.
    lines[0]["rows"][:2] = [[0, 8], [0, 50]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check_rows.main([str(run.job.output_dir), "--policy.trust_remote_code=true"]) == 1
    assert "2 not among those chosen" in capsys.readouterr().out
    assert check_rows.main([str(run.job.output_dir / "none")]) == 2
    assert "none: no run with rows/ is there" in capsys.readouterr().err
    # A last line that a crash has cut off does not count, nor do those that a later attempt trains anew.
    path.write_text(path.read_text() + '{"attempt": 0, "ep')
    start_attempt(run.job.output_dir, 2, 1)
    assert {line["step"] for line in recorded_rows(run.job.output_dir)} == {1, 2}
