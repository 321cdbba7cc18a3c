"""Measure a trained policy on held-out rows, and the demo's in its environment (vla.py)."""

from __future__ import annotations

from ray.exceptions import RayError

from vla_finetuning.evaluation.demo_success import is_demo, success_table, try_demo
from vla_finetuning.evaluation.open_loop import error_table, evaluate_run
from vla_finetuning.evaluation.robot_tools import describe_tools
from vla_finetuning.files import write_json
from vla_finetuning.plan.resolve import Run
from vla_finetuning.policies.registry import family_of
from vla_finetuning.run import cluster
from vla_finetuning.run.exported import errors_by_robot
from vla_finetuning.run.failures import root_cause
from vla_finetuning.run.folder import EVALUATION_NAME
from vla_finetuning.terminal import print_safe, print_safe_error, print_safe_text


def evaluate_trained(run: Run) -> int:
    """Print the open-loop error on held-out episodes, if any, and the demo's success; return the exit status."""
    if not run.rows.any_held_out:
        return 0
    if reason := family_of(run.policy.config).cannot_predict(run.policy.config):
        print_safe(f"Open loop    not measured: '{run.policy.config.type}' predicts nothing: {reason}")
        return 0
    try:
        errors = cluster.run_remote(evaluate_run, run, scaling=run.job.scaling)
        for name, result in errors_by_robot(errors).items():
            prefix = f"{name}: " if name else ""
            print_safe_text(f"{prefix}{error_table(result['trained'], result.get('untrained'))}")
            print_safe(*(f"On the robot {prefix}{line}" for line in describe_tools(result["tools"])))
        if is_demo(run.config, run.policy):
            scores, films = try_demo(run.job, run.policy)
            write_json(run.job.output_dir / EVALUATION_NAME, {**errors, "closed_loop": scores, "films": films})
            print_safe_text(success_table(scores))
        return 0
    except (RayError, RuntimeError, ValueError, OSError) as error:
        print_safe_error(f"the policy is trained, but could not be evaluated: {root_cause(error)}")
        return 5
