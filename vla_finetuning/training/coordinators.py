"""Which processes deal the rows to the ranks: a coordinator of Ray Data for each group of ranks.

Every block of an execution passes one process, its split coordinator, whose Python runs on one core: for hundreds of
ranks that is the limit (docs/scale.md). So each group of consecutive ranks has an execution of its own, which reads
its ranks' blocks of the stream; a rank gets what one coordinator for all would give it (`stream.RankSchedule`).

Where the rows are divided into shards, the ranks of a node are a group, and their rows are read on that node, which has
decoded them before. Ray's controller opens this too: nothing heavy is imported.
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

from lerobot_datasource import SHARDS, SHARE, keeps_frames
from vla_finetuning.data.read_tasks import BlockShare

logger = logging.getLogger(__name__)

# Of a group at most, if there are CPUs for so many groups: half as many as one coordinator could just deal to where a
# rank takes 20 rows a second in blocks of 8 (docs/scale.md).
RANKS_PER_COORDINATOR = 128


class GroupedRanks(ray.train.DataConfig):
    """Splits datasets over the ranks, a group of consecutive ranks at a time. Datasets come from `read_source`.

    Args:
        execution_options: of the data, if one execution read it all.
        cpus_per_worker: that each rank holds; the rest is for the executions to share.
        cpus_per_read_task: there are no more groups than read tasks that can run at once, one for each.
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
        """Return what each rank iterates over, by dataset. Called at every start of the worker group, by Ray Train."""
        node_ids = worker_node_ids or []
        sharded = any(dataset.context.get_config(SHARDS, 1) > 1 for dataset in datasets.values())
        on_nodes = self._on_nodes(node_ids) if sharded else []
        for dataset in datasets.values():
            if (nodes := len(set(node_ids))) > 1 and keeps_frames(dataset) and not sharded:
                logger.warning(
                    "%d nodes keep frames, and any of them reads any row: each finds 1/%d of them in the second epoch. "
                    "A run that is started with --dataset.shards=%d finds all",
                    *(nodes, nodes, nodes),
                )
        groups = on_nodes or self._groups(world_size)
        if not groups:
            return super().configure(datasets, world_size, worker_handles, worker_node_ids, **kwargs)
        splits: list[dict[str, Any]] = []
        for first, last, options in groups:
            for dataset in datasets.values():
                # Goes with it to its coordinator.
                dataset.context.set_config(SHARE, BlockShare(first, last, world_size))
            handles = worker_handles and worker_handles[first:last]
            group_config = ray.train.DataConfig(execution_options=options)
            splits += group_config.configure(datasets, last - first, handles, node_ids[first:last] or None, **kwargs)
        for name, split in splits[0].items():
            every = dict.fromkeys(rank_splits[name]._coord_actor for rank_splits in splits)
            split._coord_actor = Coordinators(list(every))
        return splits

    def _groups(self, world_size: int) -> list[tuple[int, int, ExecutionOptions]]:
        """The ranks, [first, last), that a coordinator each deals to, from anywhere; and its options."""
        groups = -(-world_size // RANKS_PER_COORDINATOR)
        if groups > 1:
            in_all = ray.cluster_resources().get("CPU", 0) - world_size * self._cpus_per_worker
            cpus = max(0.0, in_all - self._options.exclude_resources.cpu)
            # Ranks wait for one another: a group without a CPU would block the others, which hold all CPUs.
            groups = min(groups, int(cpus / self._cpus_per_read_task))
        if groups <= 1:
            return []
        options = shared(self._options, groups, cpus / groups)
        return [(*ends, options) for ends in itertools.pairwise(world_size * i // groups for i in range(groups + 1))]

    def _on_nodes(self, node_ids: Sequence[str]) -> list[tuple[int, int, ExecutionOptions]]:
        """The same of the ranks of each node, from there; nothing if there is one, or one cannot read for its own."""
        # In the order of ranks, which Ray Train 2.60 counts node by node.
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
    """Return the share of one execution's resources that each of several at once may use. `cpus`: for each.

    Ray Data 2.60 divides what a node has left by the executions, but gives more to one that asks first.
    """
    options, excluded = copy.deepcopy(options), options.exclude_resources
    if not excluded.is_zero():  # setting it warns (Ray 2.60); of CPUs, Ray allows a limit or that
        options.exclude_resources = excluded.copy(cpu=0).scale(1 / executions)
    limits = options.resource_limits.scale(1 / executions)
    options.resource_limits = limits.min(ExecutionResources.for_limits(cpu=cpus))
    return options


class Coordinators:
    """The first of some coordinators; ending its execution ends all of theirs.

    Ray Train 2.60 ends rank 0's alone with a worker group; the others would hold the CPUs that the next one waits for.
    """

    def __init__(self, actors: list[Any]):
        self._actors = actors

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled there are no actors yet
            raise AttributeError(name)
        return getattr(self._actors[0], name)

    @property
    def shutdown_executor(self) -> Coordinators:
        return self

    def remote(self) -> Any:
        """`shutdown_executor.remote()`: when the first has ended its execution."""
        return [actor.shutdown_executor.remote() for actor in self._actors][0]
