"""What would end a run after a minute ends its dry run: a look with the run's own reader and limits."""

import io
import re
import shlex
import shutil
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


def dry_run(setting, root, capsys, *more):
    """The exit status of a dry run, and what it printed."""
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


def row_of(episode, frame):
    return sum(EPISODES[:episode]) + frame


def video_of(root, episode):
    meta = load_metadata(root)
    return root / meta.video_files[TOP][meta.episode_video_file[TOP][episode]]


def rewrite(path, fps, start=0.0):
    """The same frames at another rate, from another time on."""
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
    """A PNG of one channel."""
    out = io.BytesIO()
    Image.open(io.BytesIO(image["bytes"])).convert("L").save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def of_episode(episode, change):
    rows = range(row_of(episode, 0), row_of(episode, 0) + EPISODES[episode])
    return lambda row, value: change(row - rows[0], value) if row in rows else value


CASES = {
    "a gray image": (
        lambda root: edit(root, STILL, of_episode(2, lambda frame, image: gray(image) if frame == 0 else image)),
        "found an image of mode L",
    ),
    "a damaged image": (
        lambda root: edit(root, STILL, of_episode(2, lambda frame, image: {"bytes": b"x" * 99, "path": None})),
        "damaged image",
    ),
    "NaN in a state": (
        lambda root: edit(
            root, "observation.state", of_episode(2, lambda frame, v: [float("nan"), *v[1:]] if frame == 5 else v)
        ),
        r"episode 2, frame 5: observation.state\[0\] is nan",
    ),
    "an unknown task": (
        lambda root: edit(root, "task_index", of_episode(2, lambda frame, v: 77)),
        "task_index 77 has no entry",
    ),
    "rows in another order": (
        lambda root: edit(root, "frame_index", of_episode(2, lambda frame, v: EPISODES[2] - 1 - frame)),
        "expected episode 2 frame 0 at row",
    ),
    "timestamps with jitter": (
        lambda root: edit(root, "timestamp", of_episode(2, lambda frame, v: v + 0.03 * (frame == 4))),
        "farther than the tolerance of 0.0001 s.*--tolerance_s",
    ),
}


def test_a_dataset_that_is_whole_is_looked_at(setting, capsys):
    status, printed = dry_run(setting, setting[1], capsys)
    assert status == 0
    assert f"Looked at    {setting[1]}: 36 rows of 5 episodes, 10 of them with every camera's frame" in printed


@pytest.mark.parametrize("case", CASES)
def test_one_episode_that_would_end_the_run(setting, root, capsys, case):
    """The error names it and the flag that goes on without it, which works."""
    change, message = CASES[case]
    change(root)
    status, printed = dry_run(setting, root, capsys)
    assert status == 2 and re.search(message, printed), printed
    assert str(root) in printed and "of 5 episodes 5 were looked at, and 1 are so" in printed.lower()
    proposed = shlex.split(printed[printed.index("--dataset.exclude_episodes=") :].splitlines()[0])
    assert proposed == ["--dataset.exclude_episodes=2"]
    status, printed = dry_run(setting, root, capsys, *proposed)
    assert status == 0 and "28 rows of 4 episodes" in printed or "29 rows of 4 episodes" in printed


@pytest.mark.parametrize(
    ("fps", "start", "message"),
    [(20, 0.0, "no frame at .*; the video ends at|farther than the tolerance"), (10, 0.3, "no frame at")],
)
def test_videos_of_another_rate_or_beginning(setting, root, capsys, fps, start, message):
    for path in {video_of(root, episode) for episode in range(5)}:
        rewrite(path, fps, start)
    status, printed = dry_run(setting, root, capsys)
    assert status == 2 and re.search(message, printed), printed
    assert "so it is in all 5 episodes that were looked at" in printed or "--dataset.exclude_episodes=" in printed


def test_videos_that_cannot_be_decoded(setting, root, capsys):
    path = video_of(root, 0)
    data = bytearray(path.read_bytes())
    at = data.index(b"mdat") + 8
    data[at : at + 2000] = np.random.default_rng(0).bytes(2000)
    path.write_bytes(data)
    status, printed = dry_run(setting, root, capsys)
    assert status == 2 and str(path.relative_to(root)) in printed


def test_what_is_skipped_is_said_and_what_is_not_finite_is_refused(setting, root, capsys):
    CASES["a damaged image"][0](root)
    flags = ["--dataset.on_error=skip", "--dataset.max_skipped=0.5"]
    status, printed = dry_run(setting, root, capsys, *flags)
    assert status == 0 and "1 of them will be skipped, by --dataset.on_error" in printed
    CASES["NaN in a state"][0](root)
    edit(root, "observation.state", lambda row, v: [float("nan"), *v[1:]] if row == row_of(1, 2) else v)
    status, printed = dry_run(setting, root, capsys, *flags)
    assert status == 2 and "episode 1, frame 2: observation.state[0] is nan" in printed


def test_every_dataset_of_several_roots_is_looked_at(setting, root, capsys):
    status, printed = dry_run(setting, root, capsys, f"--dataset.root={setting[1]},{root}")
    assert status == 0 and printed.count("36 rows of 5 episodes") == 2, printed


def test_show_dataset_sees_the_same(root, capsys, tmp_path):
    CASES["timestamps with jitter"][0](root)
    assert show_dataset.main([str(root), "--output", str(tmp_path / "page.html")]) in (0, 1)
    assert "episode 2 would end a run: " in capsys.readouterr().out
