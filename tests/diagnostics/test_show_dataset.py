"""`show_dataset`: faults planted in a dataset of LeRobot's writer, and LeRobot's rows."""

import io
import json
import shutil
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from PIL import Image

from diagnostics import show_dataset
from diagnostics.show_dataset import main
from tests.datasets import all_rows, describe_truly, edit_json, edit_rows, make_dataset, remove_episodes
from tests.pages import check_page
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.files import write_json
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.programs import Config
from vla_finetuning.plan.labels import write_labels
from vla_finetuning.policies.action_tokens import ActionTokenizer
from vla_finetuning.report import dataset_look
from vla_finetuning.report.augmented_frames import EPOCHS_SHOWN, augmented
from vla_finetuning.report.dataset_look import look_at, ranges_of, sample_episodes
from vla_finetuning.report.episode_scores import MEDIANS, score_episodes
from vla_finetuning.report.page import look_at_datasets
from vla_finetuning.training.chunks import describe_tokens_of

EPISODES = (12, 9, 12, 10)
VIDEO, IMAGES = "observation.images.top", "observation.images.side"
SIZE = (32, 48)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    return make_dataset(folder / "data", episodes=EPISODES, cameras={VIDEO: SIZE}, image_cameras={IMAGES: SIZE})


@pytest.fixture
def copy(clean, tmp_path):
    return shutil.copytree(clean, tmp_path / "copy")


@pytest.fixture
def shown(tmp_path, capsys):
    """Return what the program prints of a dataset, as lines, and its page."""

    def shown(root, *flags):
        capsys.readouterr()
        assert main([str(root), f"--output={tmp_path / 'page.html'}", *flags]) == 0
        return capsys.readouterr().out.splitlines(), check_page((tmp_path / "page.html").read_text())

    return shown


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": "frame.png"}


def lose_quantiles(root):
    edit_json(root / "meta" / "stats.json", lambda stats: [stats["action"].pop(name) for name in ("q01", "q99")])


def hold_a_joint(root):
    edit_rows(root, "observation.state", lambda state, episode, frame: state[:, 2].fill(0.5))


def knock_an_action(root):
    def change(action, episode, frame):
        action[(episode == 1) & (frame == 4), 1] += 1_000

    edit_rows(root, "action", change)


def drop_frames(root):
    def change(time_s, episode, frame):
        time_s[(episode == 2) & (frame >= 6)] += 0.3

    edit_rows(root, "timestamp", change)
    # The video would have been written with the same times.
    edit_json(root / "meta" / "info.json", lambda info: info["features"].pop(VIDEO))


def repeat_an_episode(root):
    def change(values, episode, frame):
        values[episode == 2] = values[episode == 0]

    edit_rows(root, "observation.state", change)
    edit_rows(root, "action", change)


def cover_a_camera(root):
    noise = np.random.default_rng(0).integers(0, 12, (99, *SIZE, 3), dtype=np.uint8)
    edit_rows(root, IMAGES, lambda images, *_: images.__setitem__(slice(None), [png(n) for n in noise[: len(images)]]))


def freeze_a_camera(root):
    def change(images, episode, frame):
        for number in np.unique(episode):
            images[episode == number] = images[(episode == number) & (frame == 0)][0]

    edit_rows(root, IMAGES, change)


def break_an_image(root):
    def change(images, episode, frame):
        images[0] = {"bytes": images[0]["bytes"][:40], "path": "frame.png"}
        images[frame == 0] = images[0]

    edit_rows(root, IMAGES, change)


def break_a_number(root):
    edit_rows(root, "action", lambda action, episode, frame: action.__setitem__((3, 0), np.nan))


PLANTED = {
    "quantiles": (lose_quantiles, "action"),
    "constant": (hold_a_joint, "observation.state: joint_2 never changes"),
    "jumps": (knock_an_action, "motor_1 jumps 2 times"),
    "gaps": (drop_frames, "1 timestamps in episode 2"),
    "duplicates": (repeat_an_episode, "episodes 0, 2"),
    "dark": (cover_a_camera, IMAGES),
    "frozen": (freeze_a_camera, IMAGES),
}
DAMAGED = {"image": (break_an_image, IMAGES), "number": (break_a_number, "episode 0")}


def test_missing_files_are_reported_and_other_episodes_shown(clean, tmp_path):
    root = shutil.copytree(clean, tmp_path / "holes")
    meta = load_metadata(root)
    (root / meta.data_files[0]).unlink()
    (root / meta.video_files[VIDEO][-1]).unlink()
    lost = meta.episode_data_file == 0
    lost |= meta.episode_video_file[VIDEO] == len(meta.video_files[VIDEO]) - 1
    look = look_at(meta)
    (text,) = (finding.text for finding in look.findings if "--dataset.exclude_episodes" in finding.text)
    assert meta.data_files[0] in text and meta.video_files[VIDEO][-1] in text
    argv = [text.rpartition(" by ")[2], "--dataset.root=x", "--policy.path=y", "--output_dir=z"]
    assert parse_args(argv).dataset.exclude_episodes == np.flatnonzero(lost).tolist()
    assert look.episodes.tolist() == np.flatnonzero(meta.episode_data_file != 0).tolist()
    assert (~lost).any() and look.sheet[0].episode in np.flatnonzero(~lost)
    shutil.rmtree(root / "data")
    with pytest.raises(FileNotFoundError, match="is missing"):
        look_at(meta)


def test_unknown_feature_dtypes_are_ignored(copy, shown):
    """Annotations and features of later versions, here without a column in the parquet files."""

    def annotate(info):
        info["features"]["language_events"] = {"dtype": "language", "shape": [1], "names": None}
        info["features"]["observation.sound"] = {"dtype": "audio", "shape": [2], "names": None}

    edit_json(copy / "meta/info.json", annotate)
    printed = "\n".join(shown(copy)[0])
    assert "no warnings;" in printed and "feature 'observation.sound': dtype is 'audio'" in printed


def test_clean_dataset_has_no_findings(clean, shown):
    look = look_at(load_metadata(clean))
    assert look.findings == []
    assert look.rows == sum(EPISODES) and look.episodes.tolist() == [0, 1, 2, 3]
    shapes = {key: image.shape for key, image in look.sheet[0].images.items()}
    assert shapes == dict.fromkeys((VIDEO, IMAGES), (*SIZE, 3))
    assert len(look.sheet) == dataset_look.MOMENTS
    assert look.task_counts == [("go to the red bin", 2), ("go to the blue bin", 2)]
    printed, page = shown(clean)
    assert printed[0].startswith("no warnings; looked at every row")
    labels = "".join(svg["aria-label"] for svg in page.all("svg"))
    for part in ("observation.state over time", "action over time", "Histogram of episode lengths", "ranges of action"):
        assert part in labels
    assert len(page.all("img")) == 2 * dataset_look.MOMENTS


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_fault_is_the_only_finding(copy, kind):
    plant, text = PLANTED[kind]
    plant(copy)
    (finding,) = look_at(load_metadata(copy)).findings
    assert finding.kind == kind and text in finding.text


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_values_are_reported_and_the_rest_shown(copy, kind, shown):
    plant, text = DAMAGED[kind]
    plant(copy)
    (warning, summary, *_), page = shown(copy)
    assert warning.startswith("warning [damaged]") and text in warning
    assert summary.startswith("1 warning;")
    assert len(page.all("img")) == dataset_look.MOMENTS * (2 if kind == "number" else 1)


def test_dataset_without_readable_episode(copy, shown):
    edit_json(copy / "meta" / "stats.json", lambda stats: stats["action"].update(max=[9, 1e3, 9]))
    edit_rows(copy, "frame_index", lambda values, *_: values.__iadd__(1))
    *warnings, summary, _ = shown(copy)[0]
    assert "warning [damaged] episode 0: cannot be read: data/chunk-000/file-000.parquet: expected" in warnings[0]
    assert [line.split()[1] for line in warnings] == ["[damaged]"] * 4 + ["[outliers]"]
    assert "0 of 43 rows" in summary


def test_curves_equal_lerobot_rows(clean):
    look = look_at(load_metadata(clean))
    dataset = LeRobotDataset("local/data", root=clean, episodes=[look.shown], video_backend="pyav")
    rows = dataset.hf_dataset.with_format("numpy")[:]
    assert set(look.curves) == {"observation.state", "action"}
    for key, values in look.curves.items():
        np.testing.assert_array_equal(values, rows[key])
    np.testing.assert_allclose(look.time_s, rows["timestamp"])


def test_wrong_statistics_are_distinguished_from_outliers(tmp_path, shown):
    """As if quantiles of episodes were averaged: outliers are then those of the rows themselves."""
    root = make_dataset(tmp_path / "data", episodes=(30, 31, 29, 30), cameras={}, true_quantiles=False)
    wrong = {"q01": [1.0] * 3, "q99": [1.01] * 3, "max": [9, 1e3, 9]}
    edit_json(root / "meta" / "stats.json", lambda stats: stats["action"].update(wrong))
    knock_an_action(root)
    look = look_at(load_metadata(root))
    stored = look.outside["action"]
    values = all_rows(root, ["action"])["action"]
    np.testing.assert_allclose(stored, ((values < 1) | (values > 1.01)).mean(0), atol=0.02)
    assert [(f.kind, f.text.split(":")[0]) for f in look.findings if f.kind in ("statistics", "outliers")] == [
        ("statistics", "observation.state"),
        ("statistics", "action"),
        ("outliers", "action"),
    ]
    (outlier,) = (f.text for f in look.findings if f.kind == "outliers")
    q01, q99 = np.quantile(values[:, 1], [0.01, 0.99])
    beyond = (np.abs((values[:, 1] - q01) / ((q99 - q01) / 2) - 1) > 5).sum()
    assert "motor_1 reach" in outlier and f"({beyond} of the {len(values)} values that were read)" in outlier
    np.testing.assert_allclose([r.q99 for r in look.ranges["action"]], np.quantile(values, 0.99, axis=0))
    out = "\n".join(shown(root)[0])
    assert "the statistics are wrong, not the data" in out
    assert f"action: of the values, {stored.mean():.1%} ({stored.max():.1%} of motor_" in out


def test_statistics_of_long_episodes_are_checked_on_all_rows(tmp_path, monkeypatch):
    """The first rows of an episode are no fair sample: the robot waits, then works."""
    root = make_dataset(tmp_path / "data", episodes=(300, 400), cameras={})
    edit_rows(root, "action", lambda action, episode, frame: action.__setitem__(frame < 60, action[frame < 60] * 0.01))
    describe_truly(root)
    monkeypatch.setattr(dataset_look, "SAMPLE_ROWS", 100)
    look = look_at(load_metadata(root))
    assert [finding for finding in look.findings if finding.kind == "statistics"] == []
    assert 0 < look.outside["action"].max() < 0.05 and look.rows == 700
    # An episode beyond the memory limit is read in part, and its statistics are not checked.
    row_bytes = dataset_look.EpisodeReader(load_metadata(root), []).source.row_bytes()
    monkeypatch.setattr(dataset_look, "SAMPLE_BYTES", 60 * row_bytes)
    partial = look_at(load_metadata(root))
    assert partial.rows == 60 and not partial.outside and "statistics" not in {f.kind for f in partial.findings}


def test_outlier_is_marked_in_chart_and_table(copy, shown):
    edit_json(copy / "meta" / "stats.json", lambda stats: stats["action"]["max"].__setitem__(1, 1234.5))
    ranges = ranges_of(load_metadata(copy), "action")
    assert [r.outliers for r in ranges] == [False, True, False]
    assert ranges[0].scaled(ranges[0].q01) == -1 and ranges[0].scaled(ranges[0].q99) == pytest.approx(1)
    _, page = shown(copy)
    assert "motor_1 outlier" in page.text and "1234" in page.text
    assert f"{ranges[1].scaled(1234.5):.3g}" in page.text  # beside its mark, at the edge of the chart


def test_dataset_text_is_escaped_in_page(copy, shown):
    task, name = "<script>alert(1)</script>", '"><img src=x onerror=alert(2)> $\\frac{$ \x01'
    old = load_metadata(copy).tasks[0]

    def rename(path, column, change):
        table = pq.read_table(path)
        at = table.schema.get_field_index(column)
        values = pa.array([change(value) for value in table[column].to_pylist()])
        pq.write_table(table.set_column(at, column, values), path)

    (column,) = set(pq.read_schema(copy / "meta" / "tasks.parquet").names) - {"task_index"}
    rename(copy / "meta" / "tasks.parquet", column, lambda text: task if text == old else text)
    for path in copy.glob("meta/episodes/*/*.parquet"):
        rename(path, "tasks", lambda texts: [task if text == old else text for text in texts])
    edit_json(
        copy / "meta" / "info.json", lambda info: info["features"]["action"].update(names=[name, "x_cm", "z.deg"])
    )
    _, page = shown(copy)
    assert task in page.text and "onerror=alert(2)" in page.text
    assert "x_cm (cm)" in page.text and "z.deg (deg)" in page.text
    assert len(page.all("img")) == 2 * dataset_look.MOMENTS


def test_hub_dataset_is_fetched_or_refused_offline(clean, tmp_path, capsys, monkeypatch):
    page = tmp_path / "new folder" / "page.html"
    with mock.patch.object(show_dataset, "fetch_dataset", return_value=(str(clean), "0" * 40)) as fetch:
        assert main(["--repo_id=user/robot", "--revision=v1", f"--output={page}"]) == 0
    fetch.assert_called_once_with("user/robot", "v1")
    assert page.is_file()
    assert main(["--repo_id=user/robot"]) == 2  # the suite is offline
    assert "error: dataset user/robot: the Hub cannot be reached" in capsys.readouterr().err


def test_dataset_without_cameras_or_statistics(tmp_path, shown):
    root = make_dataset(tmp_path / "data", episodes=(5, 1), cameras={})
    (root / "meta" / "stats.json").unlink()
    (warning, *_), page = shown(root)
    assert warning.startswith("warning [quantiles]")
    assert "The dataset has no cameras." in page.text and "has no ranges" in page.text


def test_large_dataset_is_sampled_and_page_reports_it(clean, monkeypatch, shown):
    lengths = np.full(1_000_000, 400)
    chosen = sample_episodes(lengths, 20_000)
    assert lengths[chosen].sum() <= 20_000 and chosen[0] == 0 and chosen[-1] == 999_999
    assert np.ptp(np.diff(chosen)) <= 1
    assert sample_episodes(np.array([10**7]), 20_000).tolist() == [0]
    assert len(sample_episodes(np.full(100, 30_000), 50_000)) == 10

    monkeypatch.setattr(dataset_look, "SAMPLE_ROWS", 25)
    monkeypatch.setattr(dataset_look, "LEAST_EPISODES", 1)
    look = look_at(load_metadata(clean))
    assert len(look.episodes) == 2
    assert f"{look.rows} of 43 rows" in look.sample and "2 of 4 episodes" in look.sample
    assert look.sample in shown(clean)[1].text


def stand_still(root):
    for column in ("observation.state", "action"):
        edit_rows(root, column, lambda values, episode, frame: values.__setitem__(episode == 1, values[0]))


def shake(root):
    def change(action, episode, frame):
        action[(episode == 3) & (frame % 2 == 0), 1] = 1
        action[(episode == 3) & (frame % 2 == 1), 1] = -1

    for column in ("observation.state", "action"):  # slow everywhere else
        edit_rows(root, column, lambda v, episode, frame: v.__setitem__(..., np.sin(frame / 10 + episode)[:, None] / 2))
    edit_rows(root, "action", change)
    edit_json(root / "meta" / "stats.json", lambda stats: stats["action"].update(min=[-1] * 3, max=[1] * 3))


def push_an_end(root):
    def change(action, episode, frame):
        action[(episode == 2) & (frame > 2), 0] = 100

    edit_rows(root, "action", change)
    edit_json(root / "meta" / "stats.json", lambda stats: stats["action"]["max"].__setitem__(0, 100))


def cover_a_camera_once(root):
    black = png(np.zeros((*SIZE, 3), np.uint8))
    edit_rows(root, IMAGES, lambda images, episode, frame: images.__setitem__(episode == 1, black))


SUSPECT = {
    "idle": (stand_still, 1, "stands still in 100% of its frames"),
    "jerk": (shake, 3, "times as much as in half of the episodes"),
    "saturated": (push_an_end, 2, "an action is at the end of its range in 75% of its frames"),
    "same": (repeat_an_episode, 2, "the same states and actions as episode 0"),
    "damaged": (break_a_number, 0, "states or actions hold NaN or infinity"),
    "camera": (cover_a_camera_once, 1, f"camera {IMAGES} is dark"),
}


def test_clean_episodes_have_no_reasons(clean):
    scores = list(score_episodes(load_metadata(clean)))
    assert [(score.episode, score.frames, score.reasons) for score in scores] == [
        (episode, frames, ()) for episode, frames in enumerate(EPISODES)
    ]
    assert all(score.apart is None for score in scores)  # state and action have other names


def test_skipped_and_weighted_rows_are_tabulated_per_task(copy, tmp_path, capsys, shown):
    """The second episode of four does not move; they have two tasks in turn, and the first is to come twice."""
    stand_still(copy)
    weights = tmp_path / "weights.json"
    weights.write_text('{"0": 2, "3": 0}')
    printed, page = shown(copy, "--skip_idle=0.4", f"--episode_weights=@{weights}")
    printed = [" ".join(line.split()) for line in printed]
    assert "1 of weight 0, 2 of weight 1, 1 of weight 2" in printed
    assert "4 43 19 ( 44.2%) 36 ( 0.84x) all" in printed  # of 12, 9, 12 and 10 frames
    assert "2 24 0 ( 0.0%) 36 ( 1.50x) 'go to the red bin'" in printed
    assert "2 19 19 (100.0%) 0 ( 0.00x) 'go to the blue bin'" in printed
    assert "2 24 0 ( 0.0%) 36 ( 1.50x) 'go to the red bin'" in page.text
    scores = tmp_path / "scores.jsonl"
    assert main([str(copy), "--skip_idle=0", f"--scores={scores}", f"--output={tmp_path / 'page.html'}"]) == 2
    assert not scores.exists()
    assert "--skip_idle=0.0: must be positive" in capsys.readouterr().err


def test_action_tokenizer_length_and_error_are_reported(clean, tmp_path, shown):
    rows = all_rows(clean, ["action"])["action"]
    high = np.quantile(rows, 0.99, axis=0)
    half = (high - np.quantile(rows, 0.01, axis=0)) / 2
    normalised = ((rows - high + half) / half)[:, None]
    tokenizer = ActionTokenizer.fit(normalised, 300)
    tokenizer.save(tmp_path / "tokenizer")
    apart = np.abs(tokenizer.decode(tokenizer.encode(normalised), normalised.shape[1:]) - normalised)[:, 0] * half
    lines, _ = shown(clean, f"--train.action_tokenizer={tmp_path / 'tokenizer'}", "--policy.chunk_size=1")
    (first,) = (number for number, line in enumerate(lines) if line.startswith("Actions "))
    assert "as 300 tokens" in lines[first] and f"a chunk of {rows.shape[1]} entries" in lines[first]
    assert f"motor_0 {apart[:, 0].mean():.2g} ({apart[:, 0].max():.2g})" in lines[first + 1]
    assert "as 1024 tokens" in "".join(shown(clean, "--train.action_tokenizer=fit")[0])


def test_label_shares_are_tabulated_per_task(clean, tmp_path, shown):
    """Episodes 0 and 2 succeeded, and share a task; the last one has no labels."""
    meta, path = load_metadata(clean), tmp_path / "labels.parquet"
    success = np.repeat([True, False, True], EPISODES[:3])
    advantage = np.where(success, 0.2, -0.4).astype(np.float32)
    columns = {"advantage": advantage, "success": success, "positive": success & (np.arange(33) % 2 == 0)}
    write_labels(path, [meta], [np.arange(3)], columns)
    printed, page = shown(clean, f"--recap.labels={path}")
    printed = [" ".join(line.split()) for line in printed]
    positive, of_successes = columns["positive"].mean(), columns["positive"][success].mean()
    assert f"33 {positive:.1%} {of_successes:.1%} 0.0% -0.400 to 0.200 all" in printed
    assert f"9 0.0% 0.0% -0.400 to -0.400 {meta.episode_tasks[1][0]}" in printed
    assert "Advantages and labels" in page.text and "-0.400 to 0.200" in page.text
    assert main([str(clean), f"--recap.labels={tmp_path / 'none'}", f"--output={tmp_path / 'page.html'}"]) == 2


@pytest.mark.parametrize("kind", list(SUSPECT)[:-1])
def test_suspect_episode_is_scored_with_reason(copy, kind):
    plant, episode, reason = SUSPECT[kind]
    plant(copy)
    scores = list(score_episodes(load_metadata(copy)))
    assert [score.episode for score in scores if score.reasons] == [episode]
    assert reason in "; ".join(scores[episode].reasons)


def test_suspect_episode_is_written_to_scores_and_exclude_list(copy, tmp_path, shown):
    plant, episode, reason = SUSPECT["camera"]
    plant(copy)
    lines, listed = tmp_path / "new" / "scores.jsonl", tmp_path / "other" / "bad.json"
    printed, page = shown(copy, f"--scores={lines}", f"--exclude_to={listed}")
    assert json.loads(listed.read_text()) == [episode]
    scores = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [score["episode"] for score in scores] == [0, 1, 2, 3]
    assert reason in "; ".join(scores[episode]["reasons"])
    assert f"episode {episode}: {'; '.join(scores[episode]['reasons'])}" in printed
    assert "1 of 4 episodes give a reason" in page.text and reason in page.text


def test_distance_of_action_from_next_state(tmp_path):
    """By hand; actions are the next states, but not those of one episode."""
    root = make_dataset(tmp_path / "data", episodes=EPISODES, state_dim=3, cameras={IMAGES: SIZE})
    names = {"names": ["x", "y", "z"]}
    keys = ("observation.state", "action")
    edit_json(root / "meta" / "info.json", lambda info: [info["features"][key].update(names) for key in keys])
    rng = np.random.default_rng(0)

    def follow(action, episode, frame):
        state = all_rows(root, ["observation.state"])["observation.state"]
        action[:-1] = state[1:] + 0.001 * rng.standard_normal(state[1:].shape)
        action[episode == 2] += 0.3

    edit_rows(root, "action", follow)
    meta = load_metadata(root)
    span = np.asarray(meta.stats["action"]["max"]) - np.asarray(meta.stats["action"]["min"])
    scores = list(score_episodes(meta))
    assert scores[2].apart == pytest.approx(0.3 / span.min(), rel=0.05)
    assert [bool(score.reasons) for score in scores] == [False, False, True, False]
    assert scores[2].apart > MEDIANS * scores[1].apart


@pytest.mark.parametrize("kind", ["openpi", "lerobot"])
def test_augmented_frames_are_shown_below_the_frame(clean, kind, shown):
    sheet = look_at(load_metadata(clean)).sheet
    for before, after in zip(sheet, augmented(sheet, show_dataset.AUGMENTATIONS[kind]), strict=True):
        for key, frame in before.images.items():
            pictures = after.images[key].reshape(1 + EPOCHS_SHOWN, *frame.shape)
            assert pictures.dtype == np.uint8 and np.array_equal(pictures[0], frame)
            assert len({picture.tobytes() for picture in pictures}) == len(pictures)
    assert "what training makes of it in three epochs" in shown(clean, f"--augmentation={kind}")[1].text


def test_report_of_run_applies_its_augmentation(clean, tmp_path):
    write_json(tmp_path / "run.json", {"datasets": [{"root": str(clean)}]})
    for config, augments in ((Config().to_json(), False), (show_dataset.AUGMENTATIONS["openpi"], True)):
        write_json(tmp_path / "config.json", config)
        (section,) = look_at_datasets(tmp_path)
        assert section["augmented"] is augments
        assert len({image["uri"] for image in next(iter(section["images"].values()))}) > 1


@pytest.mark.parametrize("gone", [[0, 1], [1, 2]])
def test_gaps_in_episode_numbers_are_skipped(copy, tmp_path, shown, gone):
    remove_episodes(copy, gone)
    remaining = [episode for episode in range(4) if episode not in gone]
    meta = load_metadata(copy)
    look = look_at(meta)
    texts = [f"episodes {gone[0]}, {gone[1]}: cannot be read: is in no file of meta/episodes"] if gone[0] else []
    assert look.episodes.tolist() == remaining and [finding.text for finding in look.findings] == texts
    assert look.sample.startswith("every row") and look.rows == sum(EPISODES[episode] for episode in remaining)
    shown(copy, f"--scores={tmp_path / 'scores.jsonl'}")
    lines = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert [json.loads(line)["episode"] for line in lines] == remaining
    assert describe_tokens_of(meta, "fit", 4)
