"""`python -m tests.golden`: record what this tree computes, or compare it with another revision."""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.golden.records import compare

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("tests") / "golden"
LIBRARIES = ("torch", "numpy", "lerobot", "transformers", "av", "ray")
IN_PROCESS = ("pi05_full", "pi05_expert", "pi05_lora", "smolvla", "act", "robots", "value", "grpo", "ppo")
WITH_RAY = ("vla_ray",)
# One thread: sums in one order. Nothing of the user's, and no network.
ENVIRONMENT = {
    **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"},
    **{"HF_HUB_OFFLINE": "1", "AWS_EC2_METADATA_DISABLED": "true", "RAY_USAGE_STATS_ENABLED": "0"},
    **{"RAY_DATA_DISABLE_PROGRESS_BARS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
    **{"RAY_num_workers_soft_limit": "3", "CUDA_VISIBLE_DEVICES": ""},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: equal, or recorded; 1: something differs; 2: there is nothing to compare with."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--against", metavar="REV", help="default: HEAD, or HEAD~1 where nothing is changed")
    parser.add_argument(
        "--record", metavar="FILE", type=Path, help="write down what this tree computes, and compare nothing"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(IN_PROCESS + WITH_RAY)}")
    parser.add_argument("--no-ray", action="store_true", help="only the runs in one process")
    parser.add_argument("--ignore", metavar="KEYS", default="", help="keys of metrics that may differ, as a,b")
    options = parser.parse_args(argv)
    names = options.only.split(",") if options.only else [*IN_PROCESS, *([] if options.no_ray else WITH_RAY)]
    if unknown := sorted(set(names) - {*IN_PROCESS, *WITH_RAY}):
        parser.error(f"--only {','.join(unknown)}: no such runs; they are {', '.join(IN_PROCESS + WITH_RAY)}")
    if options.record:
        options.record.write_text(json.dumps(run(ROOT, names)))
        return 0

    clean = not git("status", "--porcelain")
    revision = options.against or ("HEAD~1" if clean else "HEAD")
    try:
        before = record_of(revision, names)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    after = run(ROOT, names)
    if clean:
        keep(cache_of(git("rev-parse", "HEAD^{tree}")), after)
    print(f"against {revision} ({git('rev-parse', '--short', revision)})")
    return show(before, after, names, options.ignore.split(","))


def show(before: dict[str, Any], after: dict[str, Any], names: Sequence[str], ignored: Sequence[str]) -> int:
    """Print a line a run. Returns the exit status."""
    status = 0
    for name in names:
        if before[name] is None:
            print(f"{name:12} new: the other revision has no such run")
            continue
        equal, said = compare(before[name], after[name], ignored)
        print(f"{name:12} {said}", flush=True)
        status |= not equal
    return status


def record_of(revision: str, names: Sequence[str]) -> dict[str, Any]:
    """The records of a revision: cached ones, and those made now in a temporary worktree.

    Raises:
        LookupError: it has no golden runs.
    """
    cache = cache_of(git("rev-parse", f"{revision}^{{tree}}"))
    cached = json.loads(cache.read_text()) if cache.exists() else {}
    if missing := [name for name in names if name not in cached]:
        with worktree(revision) as tree:
            if not (tree / HERE).exists():
                raise LookupError(f"{revision} has no {HERE}")
            cached |= run(tree, missing)
        keep(cache, cached)
    return cached


def run(tree: Path, names: Sequence[str]) -> dict[str, Any]:
    """Run a tree's own definitions, in a process of their own. Returns the records by name."""
    if not names:
        return {}
    short = tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True)  # for Ray's sockets
    with tempfile.TemporaryDirectory(prefix="golden-") as folder, short as ray:
        file = Path(folder) / "record.json"
        own = {"HF_HOME": f"{folder}/hf", "VLA_NUMBERS_DIR": f"{folder}/numbers", "RAY_TMPDIR": ray}
        foreign = ("HF_", "RAY_", "VLA_", "MAX_TRAIN_STEPS", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        command = [sys.executable, "-m", "tests.golden.runs", str(file), folder, *names]
        print(f"running {', '.join(names)} in {tree}", file=sys.stderr, flush=True)
        log = Path(folder) / "log.txt"
        with log.open("w") as out:
            done = subprocess.run(command, cwd=tree, env=environment | ENVIRONMENT | own, stdout=out, stderr=out)
        if done.returncode:
            sys.exit(f"{log.read_text()[-8000:]}\nthe golden runs of {tree} failed: see above")
        found: dict[str, Any] = json.loads(file.read_text())
        lines = log.read_text().splitlines()
        if any("error" in (one or {}) for one in found.values()):
            print("\n".join(lines[-100:]), file=sys.stderr)
        print("\n".join(line for line in lines if line.startswith("golden: ")), file=sys.stderr, flush=True)
        return found


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A checkout of a revision beside this one, for a while."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            if (ROOT / ".venv").exists():
                (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def cache_of(tree_hash: str) -> Path:
    """The file with the records of a tree on machines like this one; all worktrees of a repository share it."""
    repository = Path(git("rev-parse", "--path-format=absolute", "--git-common-dir")).parent
    machine = "\n".join([cpu(), platform.python_version(), *(f"{name} {version(name)}" for name in LIBRARIES)])
    key = hashlib.sha256(f"{machine}\n{sorted(ENVIRONMENT.items())}\n".encode()).hexdigest()[:12]
    return repository / ".cache" / "golden" / f"{tree_hash[:16]}-{key}.json"


def keep(cache: Path, records: dict[str, Any]) -> None:
    """Add records to a file of the cache, in one rename."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(cache.read_text()) if cache.exists() else {}
    records = {name: found for name, found in records.items() if "error" not in (found or {})}
    partial = cache.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(known | records))
    partial.rename(cache)


def cpu() -> str:
    """The model of the CPU, and what it can: kernels are chosen by that."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
    return f"{platform.machine()} {platform.processor()}"


def git(*arguments: str) -> str:
    """Raises LookupError where git refuses."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise LookupError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
