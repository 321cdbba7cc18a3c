"""Join or start a run's cluster, with what the run needs on its nodes."""

from __future__ import annotations

from vla_finetuning.plan.resolve import Run
from vla_finetuning.run import cluster


def join_cluster(run: Run) -> cluster.Needs:
    """Join or start the run's cluster, and return what the run needs on every node, which the nodes have."""
    job = run.job
    roots = [meta.root for meta in run.rows.metas]
    needs = cluster.node_needs(job.scaling, roots, run.policy.shared_folder, run.gpu_bytes)
    cluster.start(job.scaling, needs, job.output_dir)
    return needs
