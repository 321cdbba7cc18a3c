"""Break a run at random for some minutes and count what was lost.

    python -m benchmarks.soak --minutes 10

The real program trains a tiny PI0.5 on a small dataset. Meanwhile one of its processes after another dies without
warning: a training worker, a read task, the process that deals the rows out, the driver itself and with it everything
(it is then started again with --resume), or the driver is asked to end (SIGTERM). Afterwards `diagnostics.check_rows`
compares what was trained with what there is. The result goes to benchmarks/results/soak-<hardware>-<date>.json. Exit
status 1 when a row is missing or doubled.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.data import RESULTS
from diagnostics.environment import Environment
from vla_finetuning.files import read_lines
from vla_finetuning.run.folder import ATTEMPTS_NAME, METRICS_NAME, attempts

ROOT = Path(__file__).resolve().parent.parent
# What Ray calls the processes.
TITLES = {
    "training worker": "ray::RayTrainWorker",
    "read task": "ray::ReadLeRobot",
    "data coordinator": "ray::SplitCoordinator",
}
VICTIMS = (*TITLES, "driver", "SIGTERM")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long to go on breaking things")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        result = soak(Path(folder), args.minutes * 60, random.Random(args.seed))
    hardware = Environment.here().model_dump()
    result = {"date": datetime.date.today().isoformat(), "hardware": hardware, "minutes": args.minutes, **result}
    path = RESULTS / f"soak-{psutil.cpu_count()}cpu-{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if result["rows_missing"] == result["rows_doubled"] == 0 else 1


def soak(folder: Path, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Kill and resume for so long, then stop the run and check it."""
    from diagnostics.check_rows import check_rows
    from vla_finetuning.run.plan import resolve

    output_dir = folder / "run"
    flags = first_flags(folder, output_dir)
    driver, ends, kills = start(flags), time.monotonic() + seconds, Counter[str]()
    recovered_s: list[float] = []
    while time.monotonic() < ends:
        steps = trains_on(driver, output_dir, 0)
        trains_on(driver, output_dir, steps + rng.randrange(1, 40))
        victim = rng.choice(VICTIMS)
        if not strike(driver, victim, ends):
            continue
        kills[victim] += 1
        struck, starts = time.monotonic(), len(attempts(output_dir))
        if victim in ("driver", "SIGTERM"):
            driver.wait()
            driver = start([f"--output_dir={output_dir}", "--resume"])
        if victim != "read task":  # Ray runs that task again, and nothing else stops
            while len(attempts(output_dir)) == starts and driver.poll() is None:
                time.sleep(0.1)
            trains_on(driver, output_dir, attempts(output_dir)[-1]["resumed_from_step"])
            recovered_s.append(round(time.monotonic() - struck, 1))
        print(f"{victim} killed; attempts {attempts(output_dir)[-1]}", file=sys.stderr, flush=True)
    (output_dir / "stop").touch()
    status = driver.wait()
    config = json.loads((output_dir / "config.json").read_text())
    from vla_finetuning.flags import parse_args

    run = resolve(parse_args([f"--output_dir={output_dir}", "--resume"]), gpus_found=0)
    epochs = check_rows(run)
    starts_at = [line["resumed_from_step"] for line in attempts(output_dir)]
    return {
        "exit_status": status,
        "kills": dict(kills),
        "starts": len(starts_at),
        "epochs": len(epochs),
        "rows_trained": sum(epoch.trained for epoch in epochs),
        "rows_missing": sum(len(epoch.missing) for epoch in epochs),
        "rows_doubled": sum(len(epoch.doubled) for epoch in epochs),
        "save_freq": config["save_freq"],
        "steps_lost": steps_lost(output_dir, starts_at),
        "seconds_until_training_again": recovered_s,
    }


def first_flags(folder: Path, output_dir: Path) -> list[str]:
    """Flags of a small run that would go on for hours."""
    from tests.datasets import make_dataset
    from vla_finetuning.data.metadata import load_metadata
    from vla_finetuning.policies import tiny_pi05

    root = make_dataset(folder / "dataset", episodes=(40, 25, 33, 1, 18, 52))
    meta = load_metadata(root)
    base = tiny_pi05.make_tiny_base(
        folder / "base", features=meta.features, tasks=list(meta.tasks.values()), stats=meta.stats, fps=10, chunk_size=8
    )
    options = {
        "dataset.root": root,
        "policy.path": base,
        "output_dir": output_dir,
        "scaling.num_workers": 2,
        "scaling.cpus_per_worker": 0.5,
        "scaling.max_failures": 1000,
        "batch_size": 4,
        "steps": 1_000_000,
        "log_freq": 1,
        "save_freq": 10,
        "train.mode": "full",
        "run.record_rows": "true",
    }
    return [f"--{name}={value}" for name, value in options.items()]


def start(flags: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "vla.py", *flags], cwd=ROOT, stdout=subprocess.DEVNULL)


def trains_on(driver: subprocess.Popen, output_dir: Path, step: int) -> int:
    """Wait until the run has logged a step beyond `step` in its newest attempt; returns the last step logged.

    Raises RuntimeError when the program ends by itself.
    """
    metrics, starts = output_dir / METRICS_NAME, output_dir / ATTEMPTS_NAME
    while True:
        # Until that attempt has opened the file, the void lines of the one before are there.
        opened = metrics.exists() and metrics.stat().st_mtime_ns > starts.stat().st_mtime_ns
        lines = read_lines(metrics) if opened else []
        last = json.loads(lines[-1])["step"] if lines else 0
        if last > step:
            return last
        if driver.poll() is not None:
            raise RuntimeError(f"the program ended by itself, exit status {driver.returncode}")
        time.sleep(0.05)


def strike(driver: subprocess.Popen, victim: str, ends: float) -> bool:
    """Kill one process of that kind; False when there is none until `ends`."""
    if victim == "driver":
        driver.kill()
        return True
    if victim == "SIGTERM":
        driver.send_signal(signal.SIGTERM)
        return True
    while time.monotonic() < ends:
        for process in psutil.Process(driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if TITLES[victim] in " ".join(process.cmdline()):
                    process.kill()
                    return True
    return False


def steps_lost(output_dir: Path, starts_at: list[int]) -> list[int]:
    """For each restart, how many steps were trained anew."""
    last: Counter[int] = Counter()
    for path in (output_dir / "rows").glob("rank0.jsonl"):
        for line in map(json.loads, read_lines(path)):
            last[line["attempt"]] = max(last[line["attempt"]], line["step"])
    return [max(0, last[number] - resumed) for number, resumed in enumerate(starts_at[1:])]


if __name__ == "__main__":
    sys.exit(main())
