"""Batches that several Ray Data coordinators give to ranks against the plan's, and their shares of the cluster."""

import copy
import itertools
import math
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray.data import DataContext, ExecutionOptions, ExecutionResources

from lerobot_datasource import SHARDS, read_source
from tests import clusters
from tests.datasets import datasource, make_dataset
from vla_finetuning.data.disk_cache import FrameCache
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.data.read_tasks import BlockShare
from vla_finetuning.data.shards import Sharding
from vla_finetuning.training import coordinators
from vla_finetuning.training.coordinators import GroupedRanks, shared
from vla_finetuning.training.stream import LazyPickle, RankSchedule, TrainingData, stream_batches

BLOCK, WORLD = 3, 3
TOP = "observation.images.top"


def test_executions_of_a_run_share_limits():
    options = ExecutionOptions(preserve_order=True)
    options.exclude_resources = ExecutionResources(object_store_memory=100, cpu=2)
    before = copy.deepcopy(options)
    share = shared(options, 4, cpus=7.5)
    share.validate()
    assert share.preserve_order and options == before
    assert share.resource_limits == ExecutionResources.for_limits(cpu=7.5)
    assert share.exclude_resources == ExecutionResources(object_store_memory=25)
    options = ExecutionOptions(resource_limits=ExecutionResources.for_limits(cpu=8, object_store_memory=100))
    assert shared(options, 4, cpus=7.5).resource_limits == ExecutionResources.for_limits(cpu=2, object_store_memory=25)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_block_share_has_the_rows_of_its_ranks_in_a_run_that_may_resize(world):
    """Blocks of a share go to its ranks in turn, in executions that 1 to 4 workers can share."""
    most, batch, steps, done = 4, 2, 7, 3
    per_step, multiple = 2 * most, batch * math.lcm(*range(1, most + 1))
    position, end = done * per_step * batch, (steps * per_step + most) * batch
    for first in range(0, world, 2):
        share = BlockShare(first, min(first + 2, world), world)
        blocks = []
        for start in range(position, end, multiple):
            for a, b in share.runs(start, min(start + multiple, end), batch).tolist():
                blocks += range(a, b, batch)
        for rank in range(share.first, share.last):
            schedule = RankSchedule(batch, batch, rank, world, per_step, done)
            actual = blocks[rank - share.first :: share.last - share.first]
            expected = [position + int(schedule.rows(micro)[0]) for micro in range(schedule.micros(steps - 1).stop)]
            assert actual[: len(expected)] == expected


@pytest.fixture
def configured(monkeypatch):
    """Return the list of arguments of calls of Ray's own `configure`."""
    calls: list[tuple] = []
    monkeypatch.setattr("ray.train.DataConfig.configure", lambda self, *args: calls.append(args) or [])
    return calls


@pytest.mark.parametrize(("world", "cpus"), [(128, 1000), (129, 129 + 1.9)], ids=["few ranks", "few CPUs"])
def test_one_coordinator_is_configured_by_ray(monkeypatch, configured, world, cpus):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": cpus})
    options = ExecutionOptions(preserve_order=True)
    data, dataset = GroupedRanks(options, 1.0, 1.0), SimpleNamespace(context=DataContext())
    data.configure({"train": dataset}, world, None, ["node"] * world)
    assert configured == [({"train": dataset}, world, None, ["node"] * world)]
    assert data._resolve_execution_options("train") == options


@pytest.fixture(scope="module")
def source(tmp_path_factory, ray_cluster):
    """Read two executions, of 5 and of 3 turns of the ranks, and a block that no rank gets."""
    meta = load_metadata(make_dataset(tmp_path_factory.mktemp("grouped") / "dataset", cameras={}))
    turn = BLOCK * WORLD
    order = {"shuffle_seed": 0, "shuffle_window": 20, "stream": (6, 6 + 8 * turn + BLOCK)}
    source = datasource([meta], block_rows=BLOCK, rows_multiple=turn, num_cpus=0.5, **order)
    source._rows_per_execution = 5 * turn
    return source


@pytest.mark.ray
@pytest.mark.gate
def test_grouped_ranks_get_planned_rows_within_cluster_resources(source, monkeypatch):
    """Shutting down rank 0's coordinator shuts down all."""
    monkeypatch.setattr(coordinators, "RANKS_PER_COORDINATOR", 2)
    data = GroupedRanks(ExecutionOptions(preserve_order=True), cpus_per_worker=0.5, cpus_per_read_task=0.5)
    iterators = data.configure({"train": read_source(source)}, WORLD, None, ["node"] * WORLD)
    splits = [split["train"] for split in iterators]
    assert [split.world_size() for split in splits] == [1, 2, 2]
    rank_0 = ray.get(ray.put(splits))[0]._coord_actor  # as it goes to its process
    actors = rank_0._actors
    batches_of = {rank: [] for rank in range(WORLD)}
    all_wait, finish = threading.Barrier(WORLD + 1, timeout=120), threading.Event()

    def consume(rank):
        """Read an execution, and the first batch of the next one."""
        for execution, count in enumerate((5, 1)):
            batches = iter(splits[rank].iter_batches(batch_size=BLOCK, prefetch_batches=0))
            for batch in itertools.islice(batches, count):
                batches_of[rank].append((batch["position"], batch["index"]))
            assert execution or next(batches, None) is None
        all_wait.wait()
        finish.wait()

    threads = [threading.Thread(target=consume, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    all_wait.wait()
    cluster = ray.cluster_resources()
    for _ in range(240):  # each execution looks for others once a second
        limits = ray.get([actor.__ray_call__.remote(limits_of) for actor in actors])
        if sum(now.object_store_memory for _, now in limits) <= 0.5 * cluster["object_store_memory"]:
            break
        time.sleep(0.5)
    for_reading = cluster["CPU"] - 0.5 * WORLD
    assert [limit.cpu for limit, _ in limits] == [for_reading / 2] * 2
    # Ray gives busy executions more, and one that has read all its blocks nothing.
    assert sum(now.cpu for _, now in limits) <= for_reading
    assert sum(now.object_store_memory for _, now in limits) <= 0.5 * cluster["object_store_memory"]

    (rows,) = source.read_rows(range(source._stream[1]), source._stream[1])
    for rank, batches in batches_of.items():
        schedule = RankSchedule(BLOCK, BLOCK, rank, WORLD, batches_per_step=WORLD)
        assert len(batches) == 6
        for micro, (position, index) in enumerate(batches):
            np.testing.assert_array_equal(position, 6 + schedule.rows(micro))
            np.testing.assert_array_equal(index, rows["index"][position])

    assert ray.get([actor._is_executor_shutdown.remote() for actor in actors]) == [False, False]
    ray.get(rank_0.shutdown_executor.remote())
    assert ray.get([actor._is_executor_shutdown.remote() for actor in actors]) == [True, True]
    finish.set()
    for actor in actors:
        ray.kill(actor)


@pytest.mark.ray
def test_ranks_get_their_blocks_if_prepare_makes_rows_larger(ray_cluster, tmp_path, caplog):
    block, world, last = 8, 2, 48
    meta = load_metadata(make_dataset(tmp_path / "dataset", episodes=(30, 30), cameras={TOP: (64, 80)}))
    read = partial(datasource, [meta], shuffle_seed=0, shuffle_window=16, block_rows=block)
    read = partial(read, frame_cache=FrameCache(str(tmp_path / "cache"), 1.0))
    source = read(stream=(0, last))
    row_bytes = sum(values.nbytes for values in widened(source.example()).values())
    assert row_bytes > 4 * source.row_bytes()
    dataset = TrainingData(read, last, LazyPickle(widened), row_bytes, tmp_path / "checkpoints")()
    here = ray.get_runtime_context().get_node_id()
    data = GroupedRanks(ExecutionOptions(preserve_order=True), cpus_per_worker=0.5, cpus_per_read_task=0.5)
    iterators = data.configure({"train": dataset}, world, None, [here, "another"])
    (rows,) = source.read_rows(range(last), last)
    for batches in batches_of_ranks(iterators, source, last):
        assert len(batches) == last // block // world
        for batch in batches:
            np.testing.assert_array_equal(batch[TOP], rows[TOP][batch["position"]])
    advised = "start the run with --dataset.shards=2 to find all"
    assert sum(advised in message for message in caplog.messages) == 1


def test_node_without_cpus_for_reading_is_reported_by_name(monkeypatch, caplog, configured):
    cpus = {"a": 4, "b": 2.4}
    nodes = [{"NodeID": name, "Alive": True, "Resources": {"CPU": n}} for name, n in cpus.items()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    dataset = SimpleNamespace(context=DataContext())
    dataset.context.set_config(SHARDS, 2)
    GroupedRanks(ExecutionOptions(), 1.0, 0.5).configure({"train": dataset}, 4, None, ["a", "a", "b", "b"])
    GroupedRanks(ExecutionOptions(), 1.0, 0.5).configure({"train": dataset}, 4, None, ["b"] * 4)  # only one node
    assert configured == [({"train": dataset}, 4, None, nodes) for nodes in (["a", "a", "b", "b"], ["b"] * 4)]
    (message,) = caplog.messages
    assert "node b has 2.4 CPUs; 2 workers leave 0.4 of them, and a read task takes 0.5: rows are read on" in message


@pytest.mark.ray
@pytest.mark.gate
def test_each_node_reads_its_own_shard(no_ray_cluster, monkeypatch, tmp_path):
    """In two epochs with two ranks on each of two nodes, each node reads the same rows again."""
    block, world, last = 8, 4, 640
    meta = load_metadata(make_dataset(tmp_path / "dataset", episodes=(200, 120), cameras={TOP: (64, 80)}))
    read = partial(datasource, [meta], shuffle_seed=0, shuffle_window=32, block_rows=block, num_cpus=0.5)
    read = partial(read, frame_cache=FrameCache(str(tmp_path / "cache"), 1.0), rows_multiple=world * block)
    read = partial(read, sharding=Sharding(2, 2 * block))
    source = read(stream=(0, last))
    monkeypatch.setenv("PYTHONPATH", str(clusters.ROOT))
    with clusters.of_several_nodes(num_cpus=2, object_store_memory=3 * 10**8, include_dashboard=False) as cluster:
        cluster.add_node(num_cpus=2, object_store_memory=3 * 10**8)
        ray.init(cluster.address, log_to_driver=False)
        a, b = (node["NodeID"] for node in ray.nodes())
        row_bytes = source.row_bytes() + 8
        dataset = TrainingData(read, last, LazyPickle(where_read), row_bytes, tmp_path / "checkpoints")()
        data = GroupedRanks(ExecutionOptions(preserve_order=True), cpus_per_worker=0.5, cpus_per_read_task=0.5)
        iterators = data.configure({"train": dataset}, world, None, [a, a, b, b])
        batches_of = batches_of_ranks(iterators, source, last)
    (rows,) = source.read_rows(range(last), last)
    indices_by_node = {node: (set(), set()) for node in (a, b)}
    for batches, node in zip(batches_of, (a, a, b, b), strict=True):
        for batch in batches:
            np.testing.assert_array_equal(batch[TOP], rows[TOP][batch["position"]])
            assert set(batch["node"].tolist()) == {int(node[:12], 16)}
            for position, index in zip(batch["position"].tolist(), batch["index"].tolist(), strict=True):
                indices_by_node[node][position // 320].add(index)
    for first, second in indices_by_node.values():
        assert len(first) == len(second) == 160 and len(first & second) >= 160 - 2 * 2 * block


def batches_of_ranks(iterators, source, last):
    """Return each rank's batches of the first `last` rows of the stream."""
    world, block = len(iterators), source.block_rows
    batches_of: list[list] = [[] for _ in iterators]

    def consume(rank):
        schedule = RankSchedule(block, block, rank, world, batches_per_step=world)

        def collate(batch):
            return {key: torch.from_numpy(values.copy()) for key, values in batch.items()}

        for batch in stream_batches(iterators[rank]["train"], schedule, 0, last // block // world, collate):
            batches_of[rank].append(batch)

    threads = [threading.Thread(target=consume, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return batches_of


def where_read(batch):
    node = int(ray.get_runtime_context().get_node_id()[:12], 16)
    columns = {key: batch[key] for key in (TOP, "index", "position") if key in batch}
    return columns | {"node": np.full(len(batch["index"]), node)}


def widened(batch):
    columns = {key: batch[key] for key in (TOP, "index", "position") if key in batch}
    return columns | {"wide": np.zeros((len(batch["index"]), 100_000), np.uint8)}


def limits_of(coordinator):
    """Return the limits of a coordinator's execution at its start, and those of Ray now."""
    executor = coordinator._current_executor
    return executor._options.resource_limits, executor._resource_manager.get_global_limits()
