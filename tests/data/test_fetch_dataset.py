"""Datasets from the Hub. No network: its client's functions are replaced."""

import shutil
from pathlib import Path

import httpx
import pytest

from tests.data.test_metadata_v2 import as_v2
from tests.datasets import make_dataset
from vla_finetuning.data.dataset_files import check_files, fetch_dataset
from vla_finetuning.data.metadata import load_metadata

TOP = "observation.images.top"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Six episodes, several mp4 and parquet files; never changed."""
    return make_dataset(tmp_path_factory.mktemp("fetch") / "original")


class FakeHub:
    """Answers as huggingface_hub does, from a folder."""

    def __init__(self, monkeypatch, dataset, cache, error=None, revisions=("main", "v3.0")):
        self.downloads, self.asked, self.error, self.revisions = [], [], error, revisions
        self.dataset, self.cache = dataset, cache
        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", self.repo_info)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)

    def repo_info(self, repo_id, *, repo_type, revision=None):
        self.asked.append(revision)
        if self.error:
            raise self.error
        if revision is not None and revision not in self.revisions:
            raise hub_error("RevisionNotFoundError", 404)
        return type("Info", (), {"sha": COMMIT})

    def snapshot_download(self, repo_id, *, repo_type, revision, cache_dir, allow_patterns):
        from huggingface_hub.utils import filter_repo_objects

        assert (repo_type, revision) == ("dataset", COMMIT)
        if self.error:
            raise self.error
        files = [str(p.relative_to(self.dataset)) for p in self.dataset.rglob("*") if p.is_file()]
        for name in filter_repo_objects(files, allow_patterns=allow_patterns):
            self.downloads.append(name)
            target = self.cache / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.dataset / name, target)
        return str(self.cache)


def hub_error(name, status):
    from huggingface_hub import errors

    request = httpx.Request("GET", "https://huggingface.co/api/x", headers={"authorization": "Bearer hf_secret"})
    return getattr(errors, name)(name, response=httpx.Response(status, request=request))


def test_fetch_only_what_is_needed(original, tmp_path, monkeypatch):
    fake = FakeHub(monkeypatch, original, tmp_path / "cache")
    folder, _ = fetch_dataset("user/name", episodes=[0, 5], camera_keys=[TOP])
    meta = load_metadata(folder)
    check_files(meta, episodes=[0, 5], camera_keys=[TOP])
    expected = {meta.data_files[meta.episode_data_file[e]] for e in (0, 5)}
    expected |= {meta.video_files[TOP][meta.episode_video_file[TOP][e]] for e in (0, 5)}
    assert {name for name in fake.downloads if not name.startswith("meta/")} == expected


@pytest.mark.parametrize("camera_keys", [None, [TOP]])
def test_fetch_images_that_rows_name_by_their_paths(tmp_path, monkeypatch, camera_keys):
    root = make_dataset(tmp_path / "images", episodes=(3,), cameras={}, image_cameras={TOP: (32, 32)})
    (root / "images" / TOP).mkdir(parents=True, exist_ok=True)
    (root / "images" / TOP / "frame-000000.png").touch()
    fake = FakeHub(monkeypatch, root, tmp_path / "cache")
    fetch_dataset("user/name", camera_keys=camera_keys)
    assert f"images/{TOP}/frame-000000.png" in fake.downloads


def test_fetch_refuses_what_the_dataset_lacks(original, tmp_path, monkeypatch):
    fake = FakeHub(monkeypatch, original, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"no camera \['front'\]"):
        fetch_dataset("user/name", camera_keys=["front"])
    with pytest.raises(ValueError, match=r"\[6\] not in the dataset"):
        fetch_dataset("user/name", episodes=[6])
    assert all(name.startswith("meta/") for name in fake.downloads)


def test_fetch_by_what_names_a_commit(original, tmp_path, monkeypatch):
    """Without the version's tag the default branch does; a commit needs no request."""
    fake = FakeHub(monkeypatch, original, tmp_path / "cache", revisions=("main",))
    assert fetch_dataset("user/name")[1] == fetch_dataset("user/name", COMMIT)[1] == COMMIT
    assert fake.asked == ["v3.0", None]


def test_fetch_an_episode_of_v21(tmp_path, monkeypatch):
    one_each = {"data_files_size_in_mb": 1e-6, "video_files_size_in_mb": 1e-6}
    v3 = make_dataset(tmp_path / "v3", episodes=(3, 4), cameras={"observation.images.top": (48, 64)}, **one_each)
    FakeHub(monkeypatch, as_v2(v3, tmp_path / "v21"), tmp_path / "cache")
    folder, _ = fetch_dataset("user/name", episodes=[1])
    fetched = {str(path.relative_to(folder)) for path in Path(folder).rglob("*.*") if path.is_file()}
    files = {path for path in fetched if not path.startswith("meta/")}
    video = "videos/chunk-000/observation.images.top/episode_000001.mp4"
    assert files == {"data/chunk-000/episode_000001.parquet", video}
    check_files(load_metadata(folder), episodes=[1])


@pytest.mark.parametrize(
    ("name", "status", "error", "message"),
    [
        ("RepositoryNotFoundError", 404, ValueError, "check the name at https://huggingface.co/datasets/user/name"),
        ("HfHubHTTPError", 403, ValueError, r"refused access \(403\); set HF_TOKEN"),
        ("HfHubHTTPError", 503, OSError, r"error \(503\); try again"),
    ],
)
def test_fetch_explains_the_hubs_errors(original, tmp_path, monkeypatch, name, status, error, message):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    FakeHub(monkeypatch, original, tmp_path / "cache", error=hub_error(name, status))
    with pytest.raises(error, match=f"dataset user/name: .*{message}") as raised:
        fetch_dataset("user/name", "v9")
    assert type(raised.value) is error
    assert "hf_secret" not in str(raised.value) + repr(raised.value.__cause__)


@pytest.mark.parametrize(
    "error",
    [httpx.ConnectError("no route"), "OfflineModeIsEnabled", "LocalEntryNotFoundError"],
)
def test_fetch_without_network(original, tmp_path, monkeypatch, error):
    from huggingface_hub import errors

    if isinstance(error, str):
        error = getattr(errors, error)("offline")
    FakeHub(monkeypatch, original, tmp_path / "cache", error=error)
    with pytest.raises(OSError, match="dataset user/name: the Hub cannot be reached.*HF_HUB_OFFLINE"):
        fetch_dataset("user/name")


def test_fetch_offline_with_the_real_client(tmp_path):
    """The suite runs with HF_HUB_OFFLINE=1."""
    for revision in (None, COMMIT):
        with pytest.raises(OSError, match="dataset user/name: the Hub cannot be reached"):
            fetch_dataset("user/name", revision, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="dataset user/na/me: not a repository name"):
        fetch_dataset("user/na/me", COMMIT, cache_dir=tmp_path)
