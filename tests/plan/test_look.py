"""Dry runs find episodes that would end a run, with the run's own reader."""

import io
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vla
from diagnostics import show_dataset
from tests import in_process
from tests.datasets import make_dataset
from tests.tiny import make_base
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.envs.writing import writing_videos
from vla_finetuning.plan.look import look_at

TOP, STILL = "observation.images.top", "observation.images.still"
EPISODES = (9, 6, 7, 8, 6)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("look")
    root = make_dataset(
        folder / "dataset", episodes=EPISODES, cameras={TOP: (48, 64)}, image_cameras={STILL: (48, 64)}, vcodec="h264"
    )
    return folder, root, make_base(folder / "base", load_metadata(root), **in_process.TINY)


@pytest.fixture
def root(setting, tmp_path):
    return Path(shutil.copytree(setting[1], tmp_path / "dataset"))


@pytest.fixture(scope="module")
def features(setting):
    return replace(in_process.resolved(setting).rows.features, image_size=None)


def problems_of(root, features):
    return look_at(load_metadata(root), np.arange(5), features).problems


def dry_run(setting, root, capsys, *more):
    """Return the exit status and the output of a dry run."""
    argv = in_process.flags(setting, **{"dataset.root": root, "output_dir": root.parent / "run"})
    status = vla.main([*argv, "--dry_run", *more])
    out, err = capsys.readouterr()
    return status, out + err


def edit(root, key, change):
    """Change the values of a column, a list over all rows of the dataset."""
    meta = load_metadata(root)
    first = 0
    for file in meta.data_files:
        table = pq.read_table(root / file)
        values = table[key].to_pylist()
        for row in range(len(values)):
            values[row] = change(first + row, values[row])
        column = pa.array(values, table.schema.field(key).type)
        pq.write_table(table.set_column(table.column_names.index(key), key, column), root / file)
        first += len(values)


def video_of(root, episode):
    meta = load_metadata(root)
    return root / meta.video_files[TOP][meta.episode_video_file[TOP][episode]]


def rewrite(path, fps, start=0.0):
    """Encode the same frames at another rate and start time."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    with writing_videos(), av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": "2", "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = *frames[0].shape[:2], "yuv420p"
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number + round(start * fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def gray(image):
    out = io.BytesIO()
    Image.open(io.BytesIO(image["bytes"])).convert("L").save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def of_episode(episode, change):
    rows = range(sum(EPISODES[:episode]), sum(EPISODES[: episode + 1]))
    return lambda row, value: change(row - rows[0], value) if row in rows else value


def gray_image(root):
    edit(root, STILL, of_episode(0, lambda frame, image: gray(image) if frame == 0 else image))


def damaged_image(root):
    edit(root, STILL, of_episode(2, lambda frame, image: {"bytes": b"x" * 99, "path": None}))


def not_a_number(root):
    edit(root, "observation.state", of_episode(1, lambda frame, v: [float("nan"), *v[1:]] if frame == 5 else v))


def test_look_finds_every_kind_of_broken_episode(root, features):
    gray_image(root)
    not_a_number(root)
    damaged_image(root)
    edit(root, "task_index", of_episode(3, lambda frame, v: 77))
    edit(root, "timestamp", of_episode(4, lambda frame, v: v + 0.03 * (frame == 4)))
    problems = problems_of(root, features)
    messages = [
        "found an image of mode L",
        r"episode 1, frame 5: observation.state\[0\] is nan",
        "damaged image",
        "task_index 77 has no entry",
        "farther than the tolerance of 0.0001 s.*--tolerance_s",
    ]
    assert all(re.search(message, problems[episode]) for episode, message in enumerate(messages)), problems
    edit(root, "frame_index", of_episode(3, lambda frame, v: EPISODES[3] - 1 - frame))
    assert "expected episode 3 frame 0 at row" in problems_of(root, features)[3]


def test_dry_run_proposes_flag_that_excludes_damaged_episode(setting, root, capsys):
    damaged_image(root)
    status, printed = dry_run(setting, root, capsys)
    assert status == 2 and "damaged image" in printed and str(root) in printed
    assert "of 5 episodes 5 were checked, and 1 have this" in printed.lower()
    proposed = shlex.split(printed[printed.index("--dataset.exclude_episodes=") :].splitlines()[0])
    assert proposed == ["--dataset.exclude_episodes=2"]
    status, printed = dry_run(setting, root, capsys, *proposed)
    assert status == 0
    assert f"Looked at    {root}: read 29 rows of 4 episodes, 8 of them with all cameras" in printed
    edit(root, STILL, lambda row, image: {"bytes": b"x" * 99, "path": None})
    status, printed = dry_run(setting, root, capsys)
    assert status == 2 and "all 5 checked episodes have this or a similar fault" in printed and "exclude" not in printed


@pytest.mark.parametrize(
    ("fps", "start", "message"),
    [(20, 0.0, "no frame at .*; the video ends at|farther than the tolerance"), (10, 0.3, "no frame at")],
)
def test_look_finds_videos_with_wrong_rate_or_start(root, features, fps, start, message):
    for path in {video_of(root, episode) for episode in range(5)}:
        rewrite(path, fps, start)
    problems = problems_of(root, features)
    assert problems and all(re.search(message, problem) for problem in problems.values()), problems


def test_look_finds_undecodable_video(root, features):
    path = video_of(root, 0)
    data = bytearray(path.read_bytes())
    at = data.index(b"mdat") + 8
    data[at : at + 2000] = np.random.default_rng(0).bytes(2000)
    path.write_bytes(data)
    assert str(path.relative_to(root)) in problems_of(root, features)[0]


def test_on_error_skip_covers_damage_but_not_nan(setting, root, capsys):
    damaged_image(root)
    flags = ["--dataset.on_error=skip", "--dataset.max_skipped=0.5"]
    status, printed = dry_run(setting, root, capsys, *flags)
    assert status == 0 and "1 of them will be skipped, by --dataset.on_error" in printed
    not_a_number(root)
    status, printed = dry_run(setting, root, capsys, *flags)
    assert status == 2 and "episode 1, frame 5: observation.state[0] is nan" in printed


def test_look_covers_every_dataset_root(setting, root, capsys):
    gray_image(root)
    status, printed = dry_run(setting, root, capsys, f"--dataset.root={setting[1]},{root}")
    assert status == 2 and "found an image of mode L" in printed and f'{{"{root}": [0]}}' in printed


def test_show_dataset_reports_episodes_that_would_end_a_run(root, capsys, tmp_path):
    edit(root, "timestamp", of_episode(2, lambda frame, v: v + 0.03 * (frame == 4)))
    assert show_dataset.main([str(root), "--output", str(tmp_path / "page.html")]) in (0, 1)
    assert "episode 2 would end a run: " in capsys.readouterr().out
