"""Join or start a run's cluster, with what the run needs on its nodes."""

from __future__ import annotations

import ray.data

from vla_finetuning.plan.resolve import Run, with_stats
from vla_finetuning.plan.statistics import hold_statistics
from vla_finetuning.run import cluster


def on_cluster(run: Run, gpu_bytes: int = 0) -> tuple[Run, ray.data.ExecutionOptions]:
    """Join or start the run's cluster, compute missing statistics, and wait for capacity.

    Statistics come first: nodes that an autoscaler brings for training should not stand idle meanwhile.

    Args:
        gpu_bytes: what a worker needs of its GPU, as planned; 0 where that is not known.
    Returns:
        The run with all its statistics, and how Ray Data is to read its rows.
    """
    job, needs = run.job, join_cluster(run, gpu_bytes)
    run = with_stats(run)
    hold_statistics(job, run.policy)
    return run, cluster.wait_for_capacity(job.scaling, needs, job.output_dir).execution_options()


def join_cluster(run: Run, gpu_bytes: int = 0) -> cluster.Needs:
    """Join or start the run's cluster, and return what the run needs on every node, which the nodes have."""
    job = run.job
    roots = [meta.root for meta in run.rows.metas]
    needs = cluster.node_needs(job.scaling, roots, run.policy.shared_folder, gpu_bytes)
    cluster.start(job.scaling, needs, job.output_dir)
    return needs
