"""Split the stream of rows over the ranks with several coordinators of Ray Data.

All blocks of an execution pass through one process, its split coordinator. Its single core limits a run of hundreds of
ranks (docs/scale.md). Each group of consecutive ranks therefore has its own execution, which reads the blocks of these
ranks. A rank gets the same rows as from one coordinator (`stream.RankSchedule`).

If the rows are divided into shards, the ranks of a node form a group, and that node reads their rows, because it caches
their decoded frames. Ray's controller imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import ray
import ray.train
from ray.data import ExecutionOptions, ExecutionResources

from lerobot_datasource import CACHING, SHARDS, SHARE
from vla_finetuning.data.read_tasks import BlockShare

logger = logging.getLogger(__name__)

# Largest group, if there are CPUs for that many groups: half of the ranks that one coordinator can serve with 20 rows a
# second each, in blocks of 8 (docs/scale.md).
RANKS_PER_COORDINATOR = 128


class GroupedRanks(ray.train.DataConfig):
    """Split datasets of `read_source` over groups of consecutive ranks.

    `execution_options` are those of a single execution that reads all rows. The executions share the CPUs that ranks
    leave; each needs enough for a read task.
    """

    def __init__(self, execution_options: ExecutionOptions, cpus_per_worker: float, cpus_per_read_task: float):
        super().__init__(execution_options=execution_options)
        self._options = execution_options
        self._cpus_per_worker, self._cpus_per_read_task = cpus_per_worker, cpus_per_read_task

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: list[Any] | None,
        worker_node_ids: list[str] | None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Return each rank's iterators by dataset. Ray Train calls it at every start of the worker group."""
        node_ids = worker_node_ids or []
        sharded = any(dataset.context.get_config(SHARDS, 1) > 1 for dataset in datasets.values())
        on_nodes = self._on_nodes(node_ids) if sharded else []
        for dataset in datasets.values():
            if (nodes := len(set(node_ids))) > 1 and dataset.context.get_config(CACHING) and not sharded:
                logger.warning(
                    "frames are cached on %d nodes, and any node reads any row, so only 1/%d of the cached frames are "
                    "found in the second epoch; start the run with --dataset.shards=%d to find all",
                    *(nodes, nodes, nodes),
                )
        groups = on_nodes or self._groups(world_size)
        if not groups:
            return super().configure(datasets, world_size, worker_handles, worker_node_ids, **kwargs)
        splits: list[dict[str, Any]] = []
        for first, last, options in groups:
            for dataset in datasets.values():
                dataset.context.set_config(SHARE, BlockShare(first, last, world_size))
            handles = worker_handles and worker_handles[first:last]
            group_config = ray.train.DataConfig(execution_options=options)
            splits += group_config.configure(datasets, last - first, handles, node_ids[first:last] or None, **kwargs)
        for name, split in splits[0].items():
            every = dict.fromkeys(rank_splits[name]._coord_actor for rank_splits in splits)
            split._coord_actor = Coordinators(list(every))
        return splits

    def _groups(self, world_size: int) -> list[tuple[int, int, ExecutionOptions]]:
        """Return the ranks [first, last) and the options of each coordinator, whose tasks may run on any node."""
        groups = -(-world_size // RANKS_PER_COORDINATOR)
        if groups > 1:
            in_all = ray.cluster_resources().get("CPU", 0) - world_size * self._cpus_per_worker
            cpus = max(0.0, in_all - self._options.exclude_resources.cpu)
            # Ranks wait for one another: a group without a CPU would block the groups that hold all CPUs.
            groups = min(groups, int(cpus / self._cpus_per_read_task))
        if groups <= 1:
            return []
        options = shared(self._options, groups, cpus / groups)
        return [(*ends, options) for ends in itertools.pairwise(world_size * i // groups for i in range(groups + 1))]

    def _on_nodes(self, node_ids: Sequence[str]) -> list[tuple[int, int, ExecutionOptions]]:
        """Return a group for each node, whose tasks run there; empty for one node, or if a node has too few CPUs."""
        # Ray Train 2.60 numbers ranks node by node.
        rank_counts = [(node, len(list(ranks))) for node, ranks in itertools.groupby(node_ids)]
        if len(rank_counts) <= 1:
            return []
        have = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]}
        groups, first = [], 0
        for node, ranks in rank_counts:
            cpus = have.get(node, 0) - ranks * self._cpus_per_worker
            if cpus < self._cpus_per_read_task:
                logger.warning(
                    "--dataset.shards: node %s has %g CPUs; %d workers leave %g of them, and a read task takes %g: "
                    "rows are read on any node, not where their frames are cached and used",
                    *(node, have.get(node, 0), ranks, max(cpus, 0), self._cpus_per_read_task),
                )
                return []
            options = shared(self._options, len(rank_counts), cpus)
            options.label_selector = {"ray.io/node-id": node}
            groups.append((first, first + ranks, options))
            first += ranks
        return groups


def shared(options: ExecutionOptions, executions: int, cpus: float) -> ExecutionOptions:
    """Return options for each of `executions` that run at once, with `cpus` and an equal share of the rest.

    Ray Data 2.60 divides a node's free resources by the executions, but gives more to one that asks first.
    """
    options, excluded = copy.deepcopy(options), options.exclude_resources
    if not excluded.is_zero():  # setting it warns (Ray 2.60); Ray allows a limit of CPUs or excluded CPUs
        options.exclude_resources = excluded.copy(cpu=0).scale(1 / executions)
    limits = options.resource_limits.scale(1 / executions)
    options.resource_limits = limits.min(ExecutionResources.for_limits(cpu=cpus))
    return options


class Coordinators:
    """Act as the first of several coordinators, and end the executions of all of them together.

    Ray Train 2.60 ends only rank 0's with a worker group; the others would hold the CPUs that the next group needs.
    """

    def __init__(self, actors: list[Any]):
        self._actors = actors

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `_actors` does not exist yet while pickle restores the object
            raise AttributeError(name)
        return getattr(self._actors[0], name)

    @property
    def shutdown_executor(self) -> Coordinators:
        return self

    def remote(self) -> Any:
        """End all executions, and return the reference of the first."""
        return [actor.shutdown_executor.remote() for actor in self._actors][0]
