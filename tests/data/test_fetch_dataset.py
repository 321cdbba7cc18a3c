"""Datasets from the Hub, which is a stand-in on loopback."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest

from tests.data.test_metadata_v2 import as_v2
from tests.datasets import make_dataset
from tests.hub import TOKEN, dataset_hub
from vla_finetuning.data.dataset_files import check_files, fetch_dataset
from vla_finetuning.data.metadata import load_metadata

TOP = "observation.images.top"
COMMIT = "0" * 40


@pytest.fixture
def hub(original, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with dataset_hub(monkeypatch, original, tmp_path / "cache") as server:
        yield server


def test_fetch_downloads_only_selected_files(hub):
    folder, _ = fetch_dataset(hub.repo_id, episodes=[0, 5], camera_keys=[TOP])
    meta = load_metadata(folder)
    check_files(meta, episodes=[0, 5], camera_keys=[TOP])
    expected = {meta.data_files[meta.episode_data_file[e]] for e in (0, 5)}
    expected |= {meta.video_files[TOP][meta.episode_video_file[TOP][e]] for e in (0, 5)}
    assert {name for name in hub.downloads() if not name.startswith("meta/")} == expected


@pytest.mark.parametrize("camera_keys", [None, [TOP]])
def test_fetch_downloads_images_referenced_by_path(hub, tmp_path, camera_keys):
    root = make_dataset(tmp_path / "images", episodes=(3,), cameras={}, image_cameras={TOP: (32, 32)})
    (root / "images" / TOP).mkdir(parents=True, exist_ok=True)
    (root / "images" / TOP / "frame-000000.png").write_bytes(b"png")
    hub.folder = root
    fetch_dataset(hub.repo_id, camera_keys=camera_keys)
    assert f"images/{TOP}/frame-000000.png" in hub.downloads()


def test_fetch_refuses_unknown_camera_or_episode(hub):
    with pytest.raises(ValueError, match=r"no camera \['front'\]"):
        fetch_dataset(hub.repo_id, camera_keys=["front"])
    with pytest.raises(ValueError, match=r"\[6\] not in the dataset"):
        fetch_dataset(hub.repo_id, episodes=[6])
    assert all(name.startswith("meta/") for name in hub.downloads())


def test_fetch_resolves_revision_to_commit(hub):
    """Without the version's tag the default branch does; a commit that is cached needs no request."""
    commit = hub.commits["v3.0"] = hub.commits.pop("main")
    assert fetch_dataset(hub.repo_id)[1] == commit
    hub.commits = {"main": commit}
    assert fetch_dataset(hub.repo_id)[1] == commit
    hub.asked.clear()
    assert fetch_dataset(hub.repo_id, commit)[1] == commit
    assert not [request for request in hub.asked if "/revision/" in request]


def test_fetch_downloads_one_episode_of_v21(hub, tmp_path):
    one_each = {"data_files_size_in_mb": 1e-6, "video_files_size_in_mb": 1e-6}
    v3 = make_dataset(tmp_path / "v3", episodes=(3, 4), cameras={"observation.images.top": (48, 64)}, **one_each)
    hub.folder = as_v2(v3, tmp_path / "v21")
    folder, _ = fetch_dataset(hub.repo_id, episodes=[1])
    fetched = {str(path.relative_to(folder)) for path in Path(folder).rglob("*.*") if path.is_file()}
    files = {path for path in fetched if not path.startswith("meta/")}
    video = "videos/chunk-000/observation.images.top/episode_000001.mp4"
    assert files == {"data/chunk-000/episode_000001.parquet", video}
    check_files(load_metadata(folder), episodes=[1])


@pytest.mark.parametrize(
    ("refusal", "error", "message"),
    [
        ((404, "RepoNotFound"), ValueError, "check the name at https://huggingface.co/datasets/somebody/arm"),
        ((403, ""), ValueError, r"refused access \(403\); set HF_TOKEN"),
        ((503, ""), OSError, r"error \(503\); try again"),
    ],
)
def test_fetch_reports_hub_errors_with_remedy(hub, refusal, error, message):
    hub.refusal = refusal
    with pytest.raises(error, match=f"dataset somebody/arm: .*{message}") as raised:
        fetch_dataset(hub.repo_id, "v9")
    assert type(raised.value) is error
    assert TOKEN not in str(raised.value) + repr(raised.value.__cause__)


def test_fetch_without_network_names_offline_mode(hub, monkeypatch):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(OSError, match="the Hub cannot be reached, and it is not in.*HF_HUB_OFFLINE"):
        fetch_dataset(hub.repo_id)


@pytest.mark.parametrize("name", ["v3.0", "main"])
def test_fetch_uses_cached_revision_without_network(hub, tmp_path, name):
    hub.commits = {name: hub.commits["main"]}
    expected = fetch_dataset(hub.repo_id)
    hub.shutdown()
    hub.server_close()
    huggingface_hub.close_session()  # its open connections would still be answered
    assert fetch_dataset(hub.repo_id) == expected
    shutil.rmtree(tmp_path / "cache" / "datasets--somebody--arm" / "trees")  # an earlier client lists no files there
    assert fetch_dataset(hub.repo_id) == expected


def test_fetch_offline_with_real_client():
    """The suite runs with HF_HUB_OFFLINE=1."""
    for revision in (None, COMMIT):
        with pytest.raises(OSError, match="dataset user/name: the Hub cannot be reached"):
            fetch_dataset("user/name", revision)
    with pytest.raises(ValueError, match="dataset user/na/me: not a repository name"):
        fetch_dataset("user/na/me", COMMIT)
