"""Write facts about a run to files in its folder, for reports, trackers and model cards."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

from vla_finetuning.data.metadata import dimension_names
from vla_finetuning.files import write_json
from vla_finetuning.plan.rows import Rows
from vla_finetuning.policies.spec import PolicySpec
from vla_finetuning.run.folder import RUN_NAME
from vla_finetuning.run.job import Job
from vla_finetuning.run.revision import code_revision

PACKAGES = ("ray", "lerobot", "torch", "av")


def record_run(
    job: Job,
    policy: PolicySpec,
    plan: str,
    cluster: Mapping[str, float],
    rows: Rows | None = None,
    repo_id: str | None = None,
) -> None:
    """Write `run.json`: facts for the report besides measurements. Runs on the driver, after Ray has started.

    `plan` is the plan as text, `cluster` are Ray's resources, `repo_id` is the id of the dataset on the Hub.
    """
    episodes = () if rows is None else zip(rows.metas, rows.train_episodes, rows.eval_episodes, strict=True)
    datasets = [
        {
            "root": meta.root,
            "name": repo_id or meta.root,
            "renamed": {
                name: keys
                for name, feature in meta.features.items()
                if (keys := [part.key for part in feature.joined or (feature,)]) != [name]
            },
            "episodes": meta.total_episodes,
            "frames": meta.total_frames,
            "fps": meta.fps,
            "robot_type": meta.robot_type,
            "train_episodes": len(train),
            "eval_episodes": len(held_out),
            "weight": rows.selection.weights[number] if rows and rows.selection.weights else None,
        }
        for number, (meta, train, held_out) in enumerate(episodes)
    ]
    facts = {
        "datasets": datasets,
        "policy": {
            "type": policy.config.type,
            "base": policy.base["path"],
            "revision": policy.base["revision"],
            "parameters": policy.parameters.total if policy.parameters else None,
            "trainable": policy.parameters.trainable if policy.parameters else None,
        },
        "steps": job.steps,
        "rows_per_epoch": rows.per_epoch if rows else None,
        "robots": _robots(policy, rows) if rows else {},
        "use_gpu": job.use_gpu,
        "hardware": {
            "nodes": sum(name.startswith("node:") and name != "node:__internal_head__" for name in cluster),
            "cpus": cluster.get("CPU", 0),
            "gpus": cluster.get("GPU", 0),
            "gpu_types": sorted(n.removeprefix("accelerator_type:") for n in cluster if n.startswith("accelerator_ty")),
            "memory_bytes": cluster.get("memory", 0),
        },
        "versions": {
            "code": code_revision(),
            "python": platform.python_version(),
            **{p: importlib.metadata.version(p) for p in PACKAGES},
        },
        "plan": plan,
    }
    write_json(job.output_dir / RUN_NAME, facts)


def _robots(policy: PolicySpec, rows: Rows) -> dict[str, Any]:
    """Return names and rate of each robot's actions, by name of the robot; "" for a single robot."""
    first = {robot.name: robot.datasets[0] for robot in policy.robots}
    return {
        name: {
            "action_names": dimension_names(rows.metas[dataset], "action"),
            "actions_per_s": rows.metas[dataset].fps / rows.window_step(dataset),
        }
        for name, dataset in first.items()
    }
