"""Check build.yaml and all it refers to, so that a template does not first fail on a paid cluster.

    python ci/validate_build_yaml.py [--no-network] [--registry HOST] [FILE]

Checked: keys and values; that named files exist; that no head node schedules work; that the image has the Ray of
requirements.txt, the Python of .python-version, and CUDA; and, with the network, that the image exists. One line per
fault, `FILE:LINE: what is wrong`. Exit status 0 when there is none, otherwise 1.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]*$")]
Text = Annotated[str, StringConstraints(min_length=1)]
# What comes back for a tag depends on which of these a registry knows the image by.
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)


class Strict(BaseModel):
    """Values as written (`"0"` is no number), and no key that nothing reads."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ClusterEnv(Strict):
    image_uri: Text


class ComputeConfigs(Strict):
    AWS: Text
    GCP: Text


class Test(Strict):
    command: Text
    tests_path: Text
    timeout_in_sec: Annotated[int, Field(gt=0)]


class Template(Strict):
    """An entry of build.yaml. Paths are relative to the folder that holds the file."""

    name: Name
    owner_team: Name
    dir: Text
    cluster_env: ClusterEnv
    compute_config: ComputeConfigs
    test: Test


class Resources(Strict):
    CPU: Annotated[float, Field(ge=0)] | None = None
    GPU: Annotated[float, Field(ge=0)] | None = None
    memory: Annotated[int, Field(gt=0)] | None = None
    object_store_memory: Annotated[int, Field(gt=0)] | None = None


class Node(Strict):
    """What head and workers have in common; what is passed on to the cloud as it is, is not looked into."""

    instance_type: Text
    resources: Resources = Resources()
    labels: dict[str, str] = {}
    advanced_instance_config: dict[str, Any] = {}
    flags: dict[str, Any] = {}


class WorkerNodes(Node):
    name: Name
    min_nodes: Annotated[int, Field(ge=0)] = 0
    max_nodes: Annotated[int, Field(gt=0)]
    market_type: Literal["ON_DEMAND", "SPOT", "PREFER_SPOT"] = "ON_DEMAND"


class ComputeConfig(Strict):
    """An Anyscale compute config (`anyscale compute-config create -f`) that names its machines."""

    cloud: Text | None = None
    head_node: Node
    worker_nodes: Annotated[list[WorkerNodes], Field(min_length=1)]
    zones: list[Text] = []
    enable_cross_zone_scaling: bool = False
    min_resources: dict[str, float] = {}
    max_resources: dict[str, float] = {}
    advanced_instance_config: dict[str, Any] = {}
    flags: dict[str, Any] = {}


class BadFile(Exception):
    """A file cannot be read at all; its faults are already noted."""


@dataclass
class Yaml:
    """A parsed file: its value, and the line of every part of it by the path of keys and indices that leads there."""

    path: Path
    value: Any
    lines: dict[tuple[str | int, ...], int]

    def line(self, *loc: str | int) -> int:
        """The line of `loc`, or of the nearest part around it that is there."""
        while loc not in self.lines:
            loc = loc[:-1]
        return self.lines[loc]


@dataclass
class Faults:
    found: list[str] = field(default_factory=list)

    def add(self, path: Path, line: int, message: str) -> None:
        self.found.append(f"{path}:{line}: {message}")


def read_yaml(path: Path, faults: Faults) -> Yaml:
    """Parse `path`, remembering lines. Raises BadFile; a key given twice is a fault (YAML would keep the last)."""
    lines: dict[tuple[str | int, ...], int] = {}

    def walk(node: yaml.Node, loc: tuple[str | int, ...]) -> None:
        lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, MappingNode):
            for key, child in node.value:
                name = key.value if isinstance(key, ScalarNode) else str(key.start_mark)
                if (*loc, name) in lines:
                    faults.add(path, key.start_mark.line + 1, f"{name} is given twice")
                lines[(*loc, name)] = key.start_mark.line + 1
                walk(child, (*loc, name))
        elif isinstance(node, SequenceNode):
            for index, child in enumerate(node.value):
                walk(child, (*loc, index))

    try:
        text = path.read_text(encoding="utf-8")
        if (root := yaml.compose(text, yaml.SafeLoader)) is None:
            faults.add(path, 1, "is empty")
            raise BadFile
        walk(root, ())
        return Yaml(path, yaml.safe_load(text), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        faults.add(path, mark.line + 1 if mark else 1, f"is no YAML: {error.problem}")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        faults.add(path, 1, f"cannot be read: {error}")
    raise BadFile


def parse[T](kind: type[T], source: Yaml, faults: Faults) -> T:
    """Parse `source` as a `kind`. Raises BadFile if it does not fit."""
    try:
        return TypeAdapter(kind).validate_python(source.value)
    except ValidationError as error:
        for one in error.errors():
            where = ".".join(str(part) for part in one["loc"])
            if one["type"] == "extra_forbidden":
                message = f"{where}: nothing reads this key; is it misspelt?"
            elif one["type"] == "missing":
                message = f"{where}: is missing"
            else:
                message = f"{where}: {one['msg']}, found {one['input']!r}"
            faults.add(source.path, source.line(*one["loc"]), message)
        raise BadFile from None


def check(path: Path, faults: Faults) -> list[tuple[str, int]]:
    """Note all faults of build.yaml at `path` that need no network. Returns its images and their lines."""
    try:
        source = read_yaml(path, faults)
        templates = parse(list[Template], source, faults)
    except BadFile:
        return []
    root, images = path.parent, []
    for index, template in enumerate(templates):

        def fault(message: str, *loc: str, index: int = index) -> None:
            faults.add(path, source.line(index, *loc), f"{'.'.join(loc)}: {message}")

        for name, loc in {template.dir: ("dir",), template.test.tests_path: ("test", "tests_path")}.items():
            if problem := outside_or_missing(root, name, "folder"):
                fault(problem, *loc)
        if not any(word.endswith((".sh", ".py")) for word in words(template.test.command)):
            fault("names no script (.sh or .py) to run", "test", "command")
        for word in words(template.test.command):
            if word.endswith((".sh", ".py")) and (problem := outside_or_missing(root / template.dir, word, "file")):
                fault(problem, "test", "command")
        for cloud, name in template.compute_config.model_dump().items():
            if problem := outside_or_missing(root, name, "file"):
                fault(problem, "compute_config", cloud)
            else:
                check_compute_config(root / name, faults)
        for problem in image_problems(template.cluster_env.image_uri, root):
            fault(problem, "cluster_env", "image_uri")
        images.append((template.cluster_env.image_uri, source.line(index, "cluster_env", "image_uri")))
    return images


def words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # an open quote: the shell would say so
        return []


def outside_or_missing(root: Path, name: str, kind: str) -> str | None:
    """Why `name` is no `kind` ("file", "folder") within `root`; None when it is one."""
    path = root / name
    if Path(name).is_absolute() or not path.resolve().is_relative_to(root.resolve()):
        return f"{name} leaves the project's folder; give a path inside it"
    if not (path.is_dir() if kind == "folder" else path.is_file()):
        return f"there is no {kind} {name}"
    return None


def check_compute_config(path: Path, faults: Faults) -> None:
    """Note what is wrong with a cluster's shape; above all a head node that would run tasks beside the driver."""
    try:
        source = read_yaml(path, faults)
        config = parse(ComputeConfig, source, faults)
    except BadFile:
        return
    head = config.head_node.resources
    if head.CPU != 0:
        found = "no CPU, so all that the machine has" if head.CPU is None else f"CPU: {head.CPU:g}"
        line = source.line("head_node", "resources", "CPU")
        faults.add(path, line, f"head_node.resources: {found}: the head would run tasks; write CPU: 0")
    if head.GPU:
        line = source.line("head_node", "resources", "GPU")
        faults.add(path, line, f"head_node.resources: GPU: {head.GPU:g}: the head would run training; write GPU: 0")
    for index, group in enumerate(config.worker_nodes):
        if group.min_nodes > group.max_nodes:
            line = source.line("worker_nodes", index, "min_nodes")
            faults.add(path, line, f"{group.name}: min_nodes {group.min_nodes} is above max_nodes {group.max_nodes}")


def image_problems(image_uri: str, root: Path) -> Iterator[str]:
    """Return what is wrong with an image by its tag, e.g. `anyscale/ray:2.60.0-py312-cu128`."""
    tag = re.fullmatch(r"(\d+\.\d+\.\d+)(?:-slim)?-py(\d)(\d+)(?:-(cu\d+))?", image_uri.rpartition(":")[2])
    if tag is None:
        yield f"{image_uri}: expected a tag like 2.60.0-py312-cu128 (Ray, Python, CUDA)"
        return
    ray, major, minor, cuda = tag.groups()
    wanted = re.search(r"^ray(?:\[[^]]*\])?==(\S+)", (root / "requirements.txt").read_text(), flags=re.MULTILINE)
    if wanted is None:
        yield "requirements.txt pins no Ray (ray==VERSION) to compare with"
    elif ray != wanted[1]:
        yield f"{image_uri} has Ray {ray}, requirements.txt has {wanted[1]}"
    python = (root / ".python-version").read_text().strip()
    if f"{major}.{minor}" != ".".join(python.split(".")[:2]):
        yield f"{image_uri} has Python {major}.{minor}, .python-version has {python}"
    if cuda is None:
        yield f"{image_uri} is an image without CUDA; its GPUs would stay idle (-cu128, for example)"


def image_found(image_uri: str, default_registry: str | None, timeout_s: float = 30.0) -> str | None:
    """Ask the image's registry (registry HTTP API v2, anonymously) for its manifest.

    Returns None when it is there, otherwise what to say. Raises LookupError when there is no registry to ask: the image
    names no registry and no default was given.
    """
    first, _, rest = image_uri.partition("/")
    named = rest and ("." in first or ":" in first or first == "localhost")
    registry, image = (first, rest) if named else (default_registry, image_uri)
    if registry is None:
        raise LookupError(f"{image_uri} names no registry; --registry HOST says which one to ask")
    repository, _, tag = image.rpartition(":")
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{registry}/v2/{repository}/manifests/{tag}"
    headers = {"Accept": MANIFESTS}
    try:
        with httpx.Client(timeout=timeout_s, follow_redirects=True) as client:
            answer = client.head(url, headers=headers)
            challenge = answer.headers.get("www-authenticate", "")
            if answer.status_code == 401 and challenge.lower().startswith("bearer "):
                asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
                token = client.get(asked.pop("realm", ""), params=asked).raise_for_status().json()
                headers["Authorization"] = f"Bearer {token.get('token') or token['access_token']}"
                answer = client.head(url, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        return f"{image_uri}: {registry} could not be asked: {error!r} (--no-network leaves this check out)"
    if answer.status_code == 404:
        return f"{image_uri}: {registry} has no such image"
    if answer.status_code != 200:
        return f"{image_uri}: {registry} answered {answer.status_code}; does the image need a login?"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check build.yaml and all it refers to.")
    parser.add_argument("file", nargs="?", type=Path, default=Path("build.yaml"))
    parser.add_argument("--no-network", action="store_true", help="do not ask whether the image exists")
    parser.add_argument("--registry", help="host to ask for images that name none")
    options = parser.parse_args(argv)
    faults = Faults()
    images = check(options.file, faults)
    for image, line in images:
        if options.no_network:
            print(f"{options.file}:{line}: not checked whether {image} exists (--no-network)")
            continue
        try:
            if problem := image_found(image, options.registry):
                faults.add(options.file, line, problem)
        except LookupError as error:
            print(f"{options.file}:{line}: not checked whether the image exists: {error}")
    for fault in faults.found:
        print(fault, file=sys.stderr)
    print(f"{options.file}: {len(faults.found)} faults" if faults.found else f"{options.file}: valid")
    return 1 if faults.found else 0


if __name__ == "__main__":
    sys.exit(main())
