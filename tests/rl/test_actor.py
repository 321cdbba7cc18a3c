"""What a policy that acts at random remembers, beside `test_learning.py`, which plays and learns with it."""

from types import SimpleNamespace

import torch

from vla_finetuning.rl.actor import StochasticActor


def test_what_was_recorded_is_given_up_as_it_is_put_together():
    recorded = [{"image": torch.full((n, 2), float(n)), "x": torch.arange(n)} for n in (3, 1, 2)]
    acting = StochasticActor(SimpleNamespace(device=None), None, 0, 0)
    acting._recorded = parts = [dict(part) for part in recorded]
    columns = acting.columns()
    for key in ("image", "x"):
        torch.testing.assert_close(columns[key], torch.cat([part[key] for part in recorded]), rtol=0, atol=0)
    assert parts == [{}, {}, {}] and acting.columns() == {}
