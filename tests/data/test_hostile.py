"""Hostile and random datasets are read correctly, or refused by name within little time and memory."""

import io
import json
import os
import shutil
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

from tests.datasets import datasource, edit_json
from tests.memory import takes_at_most
from vla_finetuning.data.decode import decode_image
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.rows import read_rows
from vla_finetuning.files import read_regular
from vla_finetuning.report.dataset_look import look_at

LENGTHS = (6, 4, 9)
TOP, WRIST = "observation.images.top", "observation.images.wrist"
ORIGINAL = {"episodes": LENGTHS}


def read_all(root):
    source = datasource([load_metadata(root)], check_files=False)
    return list(read_rows(source._context(), np.array([[0, sum(LENGTHS)]]), source._options(64)))


def overwrite_box(root, box, offset, *values):
    """Overwrite big-endian 32-bit values of a table of the first video (ISO/IEC 14496-12); return the file's name."""
    file = load_metadata(root).video_files[TOP][0]
    data = bytearray((root / file).read_bytes())
    struct.pack_into(f">{len(values)}I", data, data.index(box.encode()) + offset, *values)
    (root / file).write_bytes(bytes(data))
    return file


def test_mp4_with_more_declared_frames_than_bytes_is_refused(root):
    """FFmpeg would list 80 million of them, 2 GB, while it opens the file."""
    file = overwrite_box(root, "stsz", 8, 1, 80_000_000)
    with takes_at_most(50), pytest.raises(ValueError, match=rf"{file} .*claims 80,000,000 frames of 1 bytes .*copy"):
        read_all(root)


def h264_that_claims(width, height):
    """An H.264 stream of one picture whose header gives it this size, in multiples of 16 (ITU-T H.264, 7.3.2)."""

    def golomb(value):
        binary = bin(value + 1)[2:]
        return "0" * (len(binary) - 1) + binary

    def unit(kind, bits):
        bits += "1"
        bits += "0" * (-len(bits) % 8)
        data = int(bits, 2).to_bytes(len(bits) // 8)
        for zeros in (b"\0\0\0", b"\0\0\1", b"\0\0\2", b"\0\0\3"):
            data = data.replace(zeros, zeros[:2] + b"\3" + zeros[2:])
        return b"\0\0\0\1" + bytes([kind]) + data

    size = golomb(width // 16 - 1) + golomb(height // 16 - 1)
    sequence = f"{66:08b}{0:08b}{51:08b}" + golomb(0) * 2 + golomb(2) + golomb(1) + "0" + size + "1" + "0" * 3
    picture = golomb(0) * 2 + "00" + golomb(0) * 3 + "000" + golomb(0) * 3 + "000"
    picture_data = golomb(0) + golomb(7) + golomb(0) + "0000" + golomb(0) + "00" + golomb(0) + "0" * 400
    return unit(0x67, sequence) + unit(0x68, picture) + unit(0x65, picture_data)


@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (16_000, 16_000)])
def test_video_header_of_huge_size_is_refused(root, width, height):
    """Refused by its header: neither this code nor FFmpeg's probing allocates a frame."""
    file = load_metadata(root).video_files[TOP][0]
    (root / file).write_bytes(h264_that_claims(width, height))
    refused = pytest.raises(
        ValueError, match=f"{root}: {file} .*episodes.*(not a readable video|frames are ({height}x{width}|0x0))"
    )
    with takes_at_most(200), refused:
        read_all(root)


def test_video_that_changes_to_huge_size_is_refused(root):
    """Frames of the declared size are followed by a header of 16000x16000, 384 MB a frame."""
    file = load_metadata(root).video_files[TOP][0]
    with av.open(str(root / file), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"bf": "0", "x264-params": "threads=1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        frames = [av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * i, np.uint8), "rgb24") for i in range(2)]
        packets = [packet for frame in [*frames, None] for packet in stream.encode(frame)]
        packets += [av.Packet(h264_that_claims(16_000, 16_000)) for _ in range(4)]
        for i, packet in enumerate(packets):
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, i, i, Fraction(1, 10)
            container.mux(packet)
    with takes_at_most(300), pytest.raises(ValueError, match=f"{file} .*holds frames larger than 48x64: copy it again"):
        read_all(root)


@pytest.mark.parametrize("box", ["stsz", "stts", "stco"])
def test_mp4_table_with_huge_count_is_refused_or_ignored(original, root, box):
    file = overwrite_box(root, box, 12 if box == "stsz" else 8, 2**32 - 1)
    if box == "stco":  # FFmpeg reads the offsets that exist
        assert read_all(root) == read_all(original)
    else:
        with pytest.raises(ValueError, match=f"{root}: {file} .*copy"):
            read_all(root)


def png_that_claims(width, height, rows=None):
    """A PNG of one colour, a thousandth of its pixels' size. `rows`: the rows that it really has."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(bytes(1 + 3 * width)) for _ in range(rows or height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def with_images(root, data, height, width):
    """Replace the cameras by one whose images are all `data`, of the declared size; return its key."""
    still = "observation.images.still"

    def change(info):
        info["features"] = {k: v for k, v in info["features"].items() if v["dtype"] != "video"}
        info["features"][still] = {"dtype": "image", "shape": [height, width, 3], "names": None}

    edit_json(root / "meta/info.json", change)
    for path in root.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        images = pa.array([{"bytes": data, "path": None}] * len(table), kind)
        pq.write_table(table.append_column(still, images), path)
    return still


def test_dataset_look_downscales_large_images(root):
    """Fifteen decoded frames of 4K would be 370 MB."""
    camera = with_images(root, png_that_claims(3840, 2160), 2160, 3840)
    meta = load_metadata(root)
    with takes_at_most(200):
        look = look_at(meta)
    assert {moment.images[camera].shape for moment in look.sheet} == {(360, 640, 3)}


@pytest.mark.parametrize("side", [9_000, 14_000])
def test_images_larger_than_declared_are_refused(root, side):
    """Refused by the header. 14 000 x 14 000 is more than PIL itself opens."""
    with_images(root, png_that_claims(side, side, rows=100), 48, 64)
    with (
        takes_at_most(100),
        pytest.raises(ValueError, match=f"row 0: image is (far larger than the|{side}x{side}).*48x64"),
    ):
        read_all(root)
    (finding,) = [finding for finding in look_at(load_metadata(root)).findings if "camera" in finding.text]
    assert finding.kind == "damaged" and "48x64" in finding.text


@pytest.mark.parametrize("kind", ["EPS", "PPM", "RGBA", "16 bits"])
def test_unsupported_image_formats_are_not_decoded(kind, monkeypatch):
    """PIL would hand EPS to Ghostscript. Channels and depth, too, are known from the header."""
    buffer = io.BytesIO()
    mode, form = {"RGBA": ("RGBA", "PNG"), "16 bits": ("I;16", "PNG")}.get(kind, ("RGB", kind))
    Image.new(mode, (64, 48)).save(buffer, form)
    Image.init()  # decodes something itself
    for name, of in (("load", Image.Image), ("Ghostscript", EpsImagePlugin)):
        monkeypatch.setattr(of, name, lambda *args, **options: pytest.fail("was decoded"))
    with pytest.raises(ValueError, match="an image: (damaged image|expected 8-bit RGB, found an image of mode)"):
        decode_image(buffer.getvalue(), name="an image", height=48, width=64)


def camera(*shape, **info):
    return {"dtype": "video", "shape": list(shape), "names": None, "info": info}


@pytest.mark.parametrize(
    ("features", "accepted"),
    [
        ([camera(4320, 8192, 3) | {"dtype": "image"}] * 2, True),
        ([camera(18_900, 18_900, 3)], False),
        ([camera(3, 18_900, 18_900) | {"dtype": "image"}], False),
        ([camera(8192, 8192, 1, is_depth_map=True)], False),
        ([camera(2160, 3840, 3)] * 11, False),
        ([{"dtype": "float32", "shape": [2**24], "names": None}], True),
        ([{"dtype": "float32", "shape": [10**12], "names": None}], False),
    ],
)
def test_oversized_rows_are_refused(root, features, accepted):
    more = {f"observation.images.{number}": feature for number, feature in enumerate(features)}
    edit_json(root / "meta/info.json", lambda info: info["features"].update(more))
    if accepted:
        load_metadata(root)
    else:
        message = f"{root}: .*a row has [0-9,]+ MiB, more than the 256 MiB .*largest is 'observation.images.0' of shape"
        with pytest.raises(ValueError, match=message):
            load_metadata(root)


def write_huge_json(root, name):
    with open(root / name, "r+b") as file:
        file.truncate(2**31)


def write_long_instruction(root, name):
    texts = ["wave" * 2_000_000, "go"]
    pq.write_table(pa.table({"task_index": range(2), "task": texts}), root / name)


def write_huge_footer(root, name):
    """Two GB that take no space on the disk."""
    with open(root / name, "wb") as file:
        file.write(b"PAR1")
        file.truncate(2**31 + 4)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<I4s", 2**31 - 8, b"PAR1"))


def write_millions_of_tasks(root, name):
    with pq.ParquetWriter(root / name, pa.schema({"task_index": pa.int64(), "task": pa.string()})) as file:
        for first in range(0, 20_000_000, 2**20):
            count = min(2**20, 20_000_000 - first)
            file.write_table(pa.table({"task_index": np.zeros(count, np.int64), "task": pa.repeat("wave", count)}))
    assert (root / name).stat().st_size < 500_000


@pytest.mark.parametrize(
    ("write", "name", "message"),
    [
        (write_huge_json, "meta/info.json", r"has 2,048.0 MiB, more than the \d+ MiB that it may"),
        (write_huge_json, "meta/stats.json", r"has 2,048.0 MiB, more than the \d+ MiB that it may"),
        (write_long_instruction, "meta/tasks.parquet", "task_index 0 has 8,000,000 characters, more than the 20,000"),
        (write_huge_footer, "meta/tasks.parquet", ".*footer of 2,048 MiB is larger than"),
        (write_millions_of_tasks, "meta/tasks.parquet", ": its tasks need 229 MiB"),
    ],
)
def test_oversized_metadata_is_refused(root, write, name, message):
    write(root, name)
    with takes_at_most(50), pytest.raises(ValueError, match=f"{name}.*{message}"):
        load_metadata(root)


@pytest.mark.parametrize("name", ["meta/info.json", "meta/stats.json", "meta/tasks.parquet"])
def test_named_pipe_is_refused(root, name):
    (root / name).unlink()
    os.mkfifo(root / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        load_metadata(root)
    with pytest.raises(ValueError, match=f"{root} is not a regular file"):  # a folder, as of --config_path
        read_regular(root, 1)


def test_folder_links_to_parents_are_not_followed(root):
    """A search that followed two links in each folder would not end."""
    for folder in ("meta/episodes", "meta/episodes/chunk-000", "data", "data/chunk-000", f"videos/{TOP}/chunk-000"):
        for name in ("again", "and-again"):
            (root / folder / name).symlink_to("..", target_is_directory=True)
    assert sum(table.num_rows for table in read_all(root)) == sum(LENGTHS)


@pytest.mark.parametrize("kind", ["video", "data", "meta/info.json", "meta/episodes/chunk-000/file-000.parquet"])
def test_files_linking_to_themselves_are_refused(root, kind):
    meta = load_metadata(root)
    file = {"video": meta.video_files[TOP][0], "data": meta.data_files[0]}.get(kind, kind)
    (root / file).unlink()
    (root / file).symlink_to(root / file)
    with pytest.raises(
        (ValueError, OSError), match=f"{root}.*(Too many levels of symbolic links|is empty|is missing|not a LeRobot)"
    ):
        read_all(root)


def test_unpickling_arrow_type_is_read_as_storage(root):
    """That its code is not run: `test_extension_types_are_not_deserialised`."""
    file = load_metadata(root).data_files[0]
    before = pa.concat_tables(read_all(root))
    table = pq.read_table(root / file)
    field = table.schema.field("action").with_metadata({"ARROW:extension:name": "ray.data.arrow_tensor_v2"})
    at = table.schema.get_field_index("action")
    pq.write_table(table.cast(table.schema.set(at, field)), root / file)
    assert pa.concat_tables(read_all(root)).equals(before)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
template_pieces = st.lists(
    st.sampled_from(
        ["data", "videos", "/", "..", ".", "\\", "\0", "~", "%2e", "s3://", "{", "}", "{{", "}}", "{}", "{0}"]
        + ["{chunk_index}", "{chunk_index:03d}", "{file_index:03d}", "{file_index:012d}", "{file_index!r}"]
        + ["{video_key}", "{episode_index:06d}", "{episode_chunk}", "{chunk_index.real}", "{x}", ".parquet", "\n"]
    )
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@st.composite
def mutations(draw):
    """A change of a value in a JSON file, or of a path template."""
    if draw(st.booleans()):
        return ("template", draw(st.sampled_from(["data_path", "video_path"])), draw(template_pieces))
    return (
        draw(st.sampled_from(["replace", "delete", "insert"])),
        draw(st.lists(st.integers(0, 30), min_size=1, max_size=4)),
        draw(json_values),
    )


def mutate(info, mutation):
    kind, where, value = mutation
    if kind == "template":
        info[where] = value
        return
    target = info
    for step in where[:-1]:
        items = list(target) if isinstance(target, dict) else range(len(target))
        child = target[items[step % len(items)]] if len(items) else None
        if not isinstance(child, dict | list) or not child:
            break
        target = child
    keys = list(target) if isinstance(target, dict) else list(range(len(target)))
    key = keys[where[-1] % len(keys)]
    if kind == "delete":
        del target[key]
    elif kind == "insert" and isinstance(target, dict):
        target[str(value)[:8]] = value
    else:
        target[key] = value


@pytest.fixture(scope="module")
def mutable(original, tmp_path_factory):
    """A folder with the metadata alone, which the examples overwrite."""
    return Path(shutil.copytree(original / "meta", tmp_path_factory.mktemp("mutable") / "d" / "meta")).parent


def read_or_refused(root):
    """Check that load_metadata gives files inside the root, or an error that names the dataset."""
    try:
        meta = load_metadata(root)
    except (ValueError, FileNotFoundError) as error:
        assert str(root) in str(error)
        return
    for path in [*meta.data_files, *(path for files in meta.video_files.values() for path in files)]:
        assert Path(os.path.realpath(root / path)).is_relative_to(os.path.realpath(root))
    assert meta.num_episodes == len(meta.episode_length) == len(LENGTHS)
    assert (meta.episode_length > 0).all() and meta.total_frames == sum(LENGTHS)


def overwrite(original, mutable, name, content):
    """Restore the original metadata, but for the file `name`."""
    for path in (original / "meta").rglob("*"):
        if path.is_file():
            shutil.copyfile(path, mutable / path.relative_to(original))
    (mutable / name).write_bytes(content)


@settings(max_examples=25)
@given(st.sampled_from(["info", "stats"]), st.lists(mutations(), min_size=1, max_size=3))
def test_random_json_is_read_or_refused(original, mutable, name, changes):
    content = json.loads((original / f"meta/{name}.json").read_text())
    for change in changes:
        mutate(content, change)
    overwrite(original, mutable, f"meta/{name}.json", json.dumps(content).encode())
    read_or_refused(mutable)


parquet_values = st.lists(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), min_size=3, max_size=3
) | st.lists(st.none() | st.floats() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=2), max_size=5)


@given(st.sampled_from(["tasks", "episodes/chunk-000/file-000"]), st.integers(0, 30), parquet_values)
def test_random_column_is_read_or_refused(original, mutable, name, column, values):
    name = f"meta/{name}.parquet"
    table = pq.read_table(original / name)
    column %= table.num_columns
    try:
        array = pa.array(values)
        values_of_others = {n: table[n].to_pylist()[: len(array)] for n in table.column_names}
        changed = pa.table({**values_of_others, table.column_names[column]: array})
    except (pa.ArrowException, OverflowError):
        return  # no such table can be written
    target = pa.BufferOutputStream()
    pq.write_table(changed, target)
    overwrite(original, mutable, name, target.getvalue().to_pybytes())
    read_or_refused(mutable)


damages = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)


@given(st.sampled_from(["tasks", "episodes/chunk-000/file-000"]), damages, st.none() | st.integers(0, 10**6))
def test_random_bytes_are_read_or_refused(original, mutable, name, changes, cut):
    name = f"meta/{name}.parquet"
    data = bytearray((original / name).read_bytes())
    for at, value in changes:
        data[at % len(data)] = value
    overwrite(original, mutable, name, bytes(data if cut is None else data[: cut % len(data)]))
    read_or_refused(mutable)
