"""Runs with knowledge insulation: their means over tokens, however micro-batches and workers share a step."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import vla
from tests import in_process
from tests.datasets import make_dataset
from tests.tiny import make_base
from tests.training.test_parallel import meet, processes
from vla_finetuning.data.metadata import load_metadata
from vla_finetuning.plan.describe import describe
from vla_finetuning.policies.action_tokens import ActionTokenizer
from vla_finetuning.policies.families.insulation import TOKENS, TOKENS_MASK, InsulatedPI05
from vla_finetuning.training.stream import RankSchedule
from vla_finetuning.training.worker import Worker

SPARE_WORDS = 270


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A folder with a dataset, a policy for it, and a tokenizer of actions."""
    folder = tmp_path_factory.mktemp("insulated")
    root = make_dataset(folder / "dataset", episodes=(12, 9, 10))
    base = make_base(folder / "base", load_metadata(root), spare_words=SPARE_WORDS, **in_process.TINY)
    chunks = np.random.default_rng(0).normal(size=(50, 10, 4)).cumsum(axis=1).clip(-1, 1)
    ActionTokenizer.fit(chunks, SPARE_WORDS - 2).save(folder / "tokenizer")
    return folder, root, base


def resolved(setting, name, **changes):
    options = {"train.knowledge_insulation": "true", "train.action_tokenizer": setting[0] / "tokenizer"}
    options = {} if changes.pop("plain", False) else options
    options |= {"batch_size": 4, "grad_accum": 1, "lr": 1e-3, "output_dir": setting[0] / name, **changes}
    return in_process.resolved(setting, **options)


class Shard(in_process.Shard):
    """A rank's batches of rows that have 1 to 7 action tokens, by their position."""

    def __init__(self, run, rank=0, world=1):
        super().__init__(run)
        self._dealt = RankSchedule(run.job.batch_size, run.rows.block_rows, rank, world, run.job.batches_per_step)

    def iter_torch_batches(self, *, batch_size, collate_fn, **_):
        columns = self._row[TOKENS].shape[1]
        for micro in range(self._run.rows.last_row // batch_size):
            position = self._dealt.rows(micro)
            rows = {key: np.repeat(value, batch_size, axis=0) for key, value in self._row.items()}
            rows[TOKENS] = np.stack([np.random.default_rng(p).integers(0, 200, columns) for p in position])
            rows[TOKENS_MASK] = np.arange(columns) <= position[:, None] % 7
            yield collate_fn({**rows, "position": position})


class Rank(Worker):
    def __init__(self, run, rank, world):
        super().__init__(torch.device("cpu"), Shard(run, rank, world))
        self.rank, self.world = rank, world

    def broadcast(self, value):
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]


def trained(run, worker=None):
    tensors = in_process.train(run, worker=worker or Worker(torch.device("cpu"), Shard(run))).named()
    return {name: getattr(tensor, "full_tensor", lambda t=tensor: t)() for name, tensor in tensors.items()}


def apart(found, expected):
    """How far weights are from others, but for biases of keys, whose gradients are rounding alone."""
    assert found.keys() == expected.keys() and len(found) > 10
    names = [name for name in found if "k_proj.bias" not in name]
    return max(((found[name] - expected[name]).norm() / (1 + expected[name].norm())).item() for name in names)


def test_two_micro_batches_with_unequal_tokens_are_one(setting):
    whole = trained(resolved(setting, "whole"))
    assert apart(trained(resolved(setting, "halves", batch_size=2, grad_accum=2)), whole) < 1e-6


def both(rank, world, setting):
    meet(rank, world, setting[0])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    alone, found = trained(resolved(setting, f"{rank}-alone")), {}
    for strategy in ("ddp", "fsdp2_reshard"):
        options = {"batch_size": 2, "scaling.num_workers": world, "scaling.strategy": strategy}
        run = resolved(setting, f"{rank}-{strategy}", **options)
        found[strategy] = apart(trained(run, Rank(run, rank, world)), alone)
    (setting[0] / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_workers_with_unequal_tokens_equal_one(setting):
    processes(both, setting, world=2)
    for rank in range(2):
        found = json.loads((setting[0] / f"{rank}.json").read_text())
        assert found.keys() == {"ddp", "fsdp2_reshard"} and max(found.values()) < 1e-6, found


def test_the_plan_counts_the_work_and_rows_carry_tokens(setting):
    run, plain = resolved(setting, "planned"), resolved(setting, "plain", plain=True)
    assert "(--train.mode full, insulated)" in describe(run)
    assert run.policy.parameters.trainable > plain.policy.parameters.trainable
    longest = max(run.policy.prompts)
    assert run.policy.flops_by_prompt[longest] > 1.05 * plain.policy.flops_by_prompt[longest]
    columns = vla.build_dataset(run)
    row = columns.prepare(columns.read(stream=(0, run.rows.last_row)).example())
    tokenizer = ActionTokenizer.load(setting[0] / "tokenizer")
    count = int(row[TOKENS_MASK].sum())
    assert row[TOKENS][0, :count].tolist() == [*tokenizer.encode(row["action"])[0], tokenizer.vocabulary]


def test_a_run_goes_on_with_the_tokenizer_that_it_began_with(setting, tmp_path):
    chunks = np.random.default_rng(1).normal(size=(50, 10, 4)).cumsum(axis=1).clip(-1, 1)
    begun = InsulatedPI05("pi05", vocabulary=SPARE_WORDS - 2).fit_to_rows(lambda: chunks, tmp_path)
    assert begun.action_tokenizer == ActionTokenizer.fit(chunks, SPARE_WORDS - 2)
    assert InsulatedPI05("pi05").fit_to_rows(lambda: pytest.fail("read again"), tmp_path) == replace(
        begun, vocabulary=0
    )
    other = InsulatedPI05("pi05", action_tokenizer=ActionTokenizer.load(setting[0] / "tokenizer"))
    with pytest.raises(ValueError, match="has the tokenizer that this run was started with"):
        other.fit_to_rows(lambda: chunks, tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train.mode": "expert"}, "--train.mode=full"),
        ({"train.mask_padding": "true"}, "the tokens of a chunk are of all of its steps"),
        ({"peft.method_type": "lora"}, "adapters leave as it is"),
        ({"train.action_tokenizer": "/nowhere"}, "no folder, and the Hub gives none of that name"),
        ({"plain": True, "train.flow_weight": 2}, "does nothing without"),
    ],
)
def test_what_cannot_be_is_refused(setting, changes, message):
    with pytest.raises(ValueError, match=message):
        resolved(setting, "refused", **changes)
