"""configs/: cluster files are valid, state their hardware, and start the program with flags that it parses."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from ci.validate_build_yaml import ComputeConfig, Faults, Yaml, check_compute_config, parse
from vla_finetuning.cards import OF_PRESET
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.options.programs import PRESETS
from vla_finetuning.run.cluster import DRIVERS

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
COMPUTE = sorted(CONFIGS.glob("*_*.yaml"))
PRESET_GPU = {"l4": "L4", "a100": "A100 80 GB", "a100_40": "A100 40 GB", "h100": "H100", "h200": "H200", "b200": "B200"}
# By the providers' own lists of 2026. Memory is in GiB on AWS, and in GB on Google Cloud.
MACHINES = {
    **{"m5.2xlarge": "8 vCPUs, 32 GiB", "m6i.8xlarge": "32 vCPUs, 128 GiB", "g6.12xlarge": "48 vCPUs, 192 GiB, 4 x L4"},
    "p4d.24xlarge": "96 vCPUs, 1152 GiB, 8 x A100 40 GB",
    "p4de.24xlarge": "96 vCPUs, 1152 GiB, 8 x A100 80 GB",
    "p5.48xlarge": "192 vCPUs, 2048 GiB, 8 x H100",
    "p5en.48xlarge": "192 vCPUs, 2048 GiB, 8 x H200",
    "p6-b200.48xlarge": "192 vCPUs, 2048 GiB, 8 x B200",
    **{"n2-standard-8": "8 vCPUs, 32 GB", "n2-standard-32": "32 vCPUs, 128 GB"},
    "g2-standard-48-nvidia-l4-4": "48 vCPUs, 192 GB, 4 x L4",
    "a2-highgpu-8g-nvidia-tesla-a100-8": "96 vCPUs, 680 GB, 8 x A100 40 GB",
    "a2-ultragpu-8g-nvidia-a100-80gb-8": "96 vCPUs, 1360 GB, 8 x A100 80 GB",
    "a3-highgpu-8g-nvidia-h100-80gb-8": "208 vCPUs, 1872 GB, 8 x H100",
    "a3-ultragpu-8g-nvidia-h200-141gb-8": "224 vCPUs, 2952 GB, 8 x H200",
    "a4-highgpu-8g-nvidia-b200-8": "224 vCPUs, 3968 GB, 8 x B200",
}
README = (CONFIGS / "README.md").read_text()


def ray_version():
    return re.search(r"^ray\[.*?\]==(\S+)", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE)[1]


def ratios(cpus, decoding, gpus):
    """CPUs per GPU as a file states them."""
    return f"CPUs per GPU: {cpus // gpus} on the GPU node, {(cpus + decoding) // gpus} with all"


def vcpus(machine):
    return int(MACHINES[machine].partition(" ")[0])


def command_config(entrypoint):
    """The run that an entrypoint starts: parsed by the program itself."""
    python, script, *flags = shlex.split(entrypoint)
    assert python == "python" and Path(script).name == "vla.py" and flags[-2:] == ["--resume", "auto"]
    return parse_args(flags[:-2])  # which would look into the bucket for a run


@pytest.mark.parametrize("path", COMPUTE, ids=lambda path: path.stem)
def test_compute_config_is_valid_and_states_its_hardware(path):
    faults = Faults()
    check_compute_config(path, faults)
    assert faults.found == []
    text, preset = path.read_text(), path.stem.partition("_")[2]
    gpu, decode = yaml.safe_load(text)["worker_nodes"]
    assert all(MACHINES[machine] in text for machine in re.findall(r"instance_type: (\S+)", text))
    gpus = int(re.search(rf"(\d+) x {PRESET_GPU[preset]}$", MACHINES[gpu["instance_type"]])[1])
    stated = ratios(vcpus(gpu["instance_type"]), decode["max_nodes"] * vcpus(decode["instance_type"]), gpus)
    assert f"--preset {preset}" in text and stated in text
    (row,) = re.findall(rf"^\|.*`{path.name}`.*\|.*\|.*\| (\d+) \| (\d+) \|$", README, re.MULTILINE)
    assert list(row) == re.findall(r"\d+", stated), "the table of files says the same"
    assert int(PRESETS[preset]["scaling.num_workers"]) == gpus * gpu["max_nodes"], "the preset uses every GPU"
    assert decode["min_nodes"] == 0, "CPU-only workers cost nothing while no run needs them"


def test_machine_table_lists_every_gpu_preset():
    rows = [re.split(r"`? \| `?", row) for row in re.findall(r"^\| `([a-z0-9_]+` \|.*) \|$", README, re.MULTILINE)]
    assert {preset for preset, *_ in rows} == PRESET_GPU.keys() - {"l4"} == set(OF_PRESET) - {"l4"}
    for preset, gpus, *machines, alone, with_workers in rows:
        count = PRESETS[preset]["scaling.num_workers"]
        assert gpus.startswith(f"{count} x {PRESET_GPU[preset]}")
        assert all(MACHINES[machine].endswith(f"{count} x {PRESET_GPU[preset]}") for machine in machines)
        for stated, decoding in ((alone, 0), (with_workers, 4 * vcpus("m6i.8xlarge"))):
            assert stated == ", ".join(str((vcpus(machine) + decoding) // int(count)) for machine in machines)


def test_anyscale_job_is_consistent():
    job = yaml.safe_load((CONFIGS / "job.yaml").read_text())
    fields = {"name", "image_uri", "requirements", "compute_config", "working_dir", "excludes", "entrypoint"}
    assert set(job) == fields | {"max_retries"}
    faults = Faults()
    parse(ComputeConfig, Yaml(CONFIGS / "job.yaml", job["compute_config"], {(): 1}), faults)
    assert faults.found == [] and job["compute_config"] == yaml.safe_load((CONFIGS / "aws_l4.yaml").read_text())
    assert job["image_uri"] == yaml.safe_load((ROOT / "build.yaml").read_text())[0]["cluster_env"]["image_uri"]
    assert (ROOT / job["requirements"]).is_file()
    config = command_config(job["entrypoint"])
    assert config.preset == "l4"
    assert "--resume auto" in job["entrypoint"] and job["max_retries"], "a retry goes on with the run"
    assert all(path.startswith("s3://") for path in (config.output_dir, *config.dataset.roots)), (
        "no file system is shared"
    )
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert {".venv", "outputs", ".cache"} <= ignored & set(job["excludes"])


def test_rayjob_is_consistent():
    job = yaml.safe_load((CONFIGS / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray_version()
    head, groups = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    pods = [group["template"]["spec"] for group in (head, *groups)]
    containers = [pod["containers"][0] for pod in pods]
    assert {c["image"] for c in containers} == {f"vla-fine-tuning:{ray_version()}-py312-cu128"}
    base = re.search(r"^FROM (\S+)", (CONFIGS / "Containerfile").read_text(), flags=re.MULTILINE)[1]
    assert base == f"rayproject/ray:{ray_version()}-py312-cu128"
    for pod, container in zip(pods, containers, strict=True):
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert mounts == {"shm": "/dev/shm"} and {v["name"] for v in pod["volumes"]} == set(mounts)
        assert pod["serviceAccountName"] == "vla-fine-tuning", "which may use the bucket"
        # Ray gives its object store 30 % of the memory, if /dev/shm has space for it.
        (shm,) = [v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "shm"]
        memory = container["resources"]["limits"]["memory"]
        assert int(shm.removesuffix("Gi")) >= 0.3 * int(memory.removesuffix("Gi"))
        assert container["resources"]["limits"] == container["resources"]["requests"]
        (token,) = [e for e in container["env"] if e["name"] == "HF_TOKEN"]
        assert "value" not in token, "a secret is referred to, never written here"
    limits = [container["resources"]["limits"] for container in containers]
    gpus, decoding = int(limits[1]["nvidia.com/gpu"]), int(limits[2]["cpu"]) * groups[1]["maxReplicas"]
    assert ratios(int(limits[1]["cpu"]), decoding, gpus) in (CONFIGS / "rayjob.yaml").read_text()
    config = command_config(job["spec"]["entrypoint"])
    assert "--resume auto" in job["spec"]["entrypoint"] and job["spec"]["backoffLimit"], "a retry goes on with the run"
    assert config.scaling.num_workers == gpus * groups[0]["maxReplicas"]
    assert all(path.startswith("s3://") for path in (config.output_dir, *config.dataset.roots)), (
        "no file system is shared"
    )


def test_documented_driver_matches_cuda_of_the_lock():
    """The images' own CUDA is not used: torch's wheels bring theirs. The driver is the node's."""
    (major,) = re.findall(
        r"^nvidia-cuda-runtime==(\d+)\.", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE
    )
    requirement = f"NVIDIA driver {DRIVERS[int(major)]} or newer (CUDA {major})"
    for name in ("README.md", "Containerfile", "job.yaml", "rayjob.yaml"):
        assert requirement in (CONFIGS / name).read_text(), name
    assert requirement in (ROOT / "build.yaml").read_text()


def test_container_copies_every_imported_module():
    copied = re.findall(r"^COPY --chown=ray (\S+) ", (CONFIGS / "Containerfile").read_text(), flags=re.MULTILINE)
    assert copied == ["requirements.lock", "*.py", "diagnostics", "vla_finetuning"]
    code = [*ROOT.glob("*.py"), *ROOT.glob("vla_finetuning/**/*.py")]
    imported = set(re.findall(r"^(?:from|import) (benchmarks|ci|tests)\b", "".join(map(Path.read_text, code))))
    assert not imported, "the program must not import what is not copied"
