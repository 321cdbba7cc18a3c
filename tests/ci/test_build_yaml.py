"""ci/validate_build_yaml.py: the project's own build.yaml passes; each fault is reported with its line."""

import http.server
import json
import re
import shutil
import threading
from pathlib import Path

import pytest

from ci.validate_build_yaml import main

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "anyscale/ray:2.60.0-py312-cu128"


@pytest.fixture
def project(tmp_path):
    """A copy of build.yaml and what it refers to."""
    for name in ("build.yaml", "requirements.txt", ".python-version"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "template_test.sh", tmp_path / "ci")
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new))


def faults(project, capsys, *arguments):
    """Return the faults with relative paths, and check the exit status."""
    status = main([str(project / "build.yaml"), *(arguments or ["--no-network"])])
    lines = capsys.readouterr().err.replace(f"{project}/", "").splitlines()
    assert status == (1 if lines else 0)
    return lines


@pytest.mark.parametrize(
    ("file", "old", "new", "line", "message"),
    [
        ("build.yaml", "owner_team: ray-train", "owner_taem: x", 4, "owner_taem: nothing reads this key"),
        ("build.yaml", "  owner_team: ray-train\n", "", 3, "owner_team: is missing"),
        ("build.yaml", "- name: vla-fine-tuning", "- name: vla fine tuning", 3, "found 'vla fine tuning'"),
        ("build.yaml", "timeout_in_sec: 3600", "timeout_in_sec: 0", 14, "greater than 0, found 0"),
        ("build.yaml", "timeout_in_sec: 3600", "timeout_in_sec: '3600'", 14, "valid integer, found '3600'"),
        ("build.yaml", "timeout_in_sec: 3600", "command: bash x.sh", 14, "command is given twice"),
        ("build.yaml", "AWS: configs/aws_l4", "AWS: configs/aws_t4", 9, "there is no file configs/aws_t4.yaml"),
        ("build.yaml", "AWS: configs", "AWS: ../configs", 9, "leaves the project's folder"),
        ("build.yaml", "AWS: configs/aws_l4.yaml", "Azure: configs/aws_l4.yaml", 9, "Azure: nothing reads this key"),
        ("build.yaml", "dir: .", "dir: templates/vla", 5, "there is no folder templates/vla"),
        ("build.yaml", "bash ci/template_test.sh", "bash ci/gone.sh", 12, "there is no file ci/gone.sh"),
        ("build.yaml", "bash ci/template_test.sh", "make test", 12, "names no script"),
        ("build.yaml", "tests_path: ci/", "tests_path: ci/template_test.sh", 13, "there is no folder"),
        ("build.yaml", "ray:2.60.0", "ray:2.54.1", 7, "has Ray 2.54.1, requirements.txt has 2.60.0"),
        ("build.yaml", "-py312", "-py311", 7, "has Python 3.11, .python-version has 3.12"),
        ("build.yaml", "-cu128", "", 7, "without CUDA"),
        ("build.yaml", "ray:2.60.0-py312-cu128", "ray:latest", 7, "expected a tag like"),
        ("build.yaml", "  dir: .", "\tdir: .", 5, "is no YAML"),
        ("configs/gcp_l4.yaml", "    CPU: 0\n    GPU: 0\n", "    CPU: 8\n", 7, "CPU: 8: the head would run tasks"),
        ("configs/gcp_l4.yaml", "    CPU: 0\n", "", 6, "no CPU, so all that the machine has"),
        ("configs/gcp_l4.yaml", "    GPU: 0\n", "    GPU: 1\n", 8, "the head would run training"),
        ("configs/gcp_l4.yaml", "    min_nodes: 1\n", "    min_nodes: 3\n", 12, "min_nodes 3 is above max_nodes 1"),
        ("configs/gcp_l4.yaml", "    min_nodes: 0\n", "    min_workers: 0\n", 17, "min_workers: nothing reads this"),
    ],
)
def test_build_yaml_fault_is_reported_with_its_line(project, capsys, file, old, new, line, message):
    edit(project / file, old, new)
    lines = faults(project, capsys)
    assert any(re.match(rf"{re.escape(file)}:{line}: ", text) and message in text for text in lines), lines


def test_other_anyscale_keys_are_accepted(project, capsys):
    disk = "{BlockDeviceMappings: [{DeviceName: /dev/sda1, Ebs: {VolumeSize: 1000}}]}"
    path = project / "configs/aws_l4.yaml"
    path.write_text(
        path.read_text().replace("    min_nodes: 1\n", f"    min_nodes: 1\n    advanced_instance_config: {disk}\n")
        + "zones: [us-west-2a]\nmax_resources: {CPU: 200}\n"
    )
    assert "advanced_instance_config" in path.read_text() and faults(project, capsys) == []


def test_all_build_yaml_faults_are_reported_at_once(project, capsys):
    edit(project / "build.yaml", "-py312", "-py311")
    edit(project / "build.yaml", "GCP: configs/gcp_l4.yaml", "GCP: configs/none.yaml")
    edit(project / "configs/aws_l4.yaml", "    CPU: 0\n", "    CPU: 1\n")
    assert [line.partition(": ")[0] for line in faults(project, capsys)] == [
        "configs/aws_l4.yaml:7",
        "build.yaml:10",
        "build.yaml:7",
    ]


def test_empty_or_missing_build_yaml_is_a_fault(project, capsys):
    (project / "build.yaml").write_text("# nothing\n")
    assert faults(project, capsys) == ["build.yaml:1: is empty"]
    (project / "build.yaml").unlink()
    assert "cannot be read" in faults(project, capsys)[0]


class Registry(http.server.BaseHTTPRequestHandler):
    """As public registries: a manifest is shown only to those who fetched an anonymous token first."""

    def do_HEAD(self):
        if self.headers.get("Authorization") != "Bearer anonymous":
            self.send_response(401)
            realm = f"http://{self.headers['Host']}/token"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="r",scope="repository:x:pull"')
        else:
            tag = self.path.rpartition("/")[2]
            known = self.path.startswith("/v2/anyscale/ray/manifests/") and tag == "2.60.0-py312-cu128"
            self.send_response(403 if tag.endswith("cu130") else 200 if known else 404)
        self.end_headers()

    def do_GET(self):
        is_token_request = self.path == "/token?service=r&scope=repository%3Ax%3Apull"
        self.send_response(200 if is_token_request else 400)
        self.end_headers()
        self.wfile.write(json.dumps({"token": "anonymous"}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def registry():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_missing_image_in_registry_is_reported(project, capsys, registry):
    assert faults(project, capsys, f"--registry={registry}") == []
    edit(project / "build.yaml", "-cu128", "-cu126")
    (fault,) = faults(project, capsys, f"--registry={registry}")
    assert "build.yaml:7: " in fault and f"{registry} has no such image" in fault
    edit(project / "build.yaml", "-cu126", "-cu130")
    assert "answered 403" in faults(project, capsys, f"--registry={registry}")[0]


def test_registry_in_the_image_name_has_precedence(project, capsys, registry):
    edit(project / "build.yaml", IMAGE, f"{registry}/{IMAGE}")
    assert faults(project, capsys, "--registry=127.0.0.1:1") == []
    edit(project / "build.yaml", f"{registry}/{IMAGE}", f"127.0.0.1:1/{IMAGE}")
    assert "127.0.0.1:1 could not be asked" in faults(project, capsys, "--registry=none")[0]


def test_unchecked_image_is_reported(project, capsys):
    assert main([str(project / "build.yaml")]) == 0
    assert "not checked whether the image exists" in capsys.readouterr().out
