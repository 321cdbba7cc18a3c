"""Lost policy servers, observations and stages, with a stand-in for Ray."""

from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError

from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.rollouts import scheduler, servers
from vla_finetuning.rollouts.episodes import Acted, Condition, Episode, Playing
from vla_finetuning.rollouts.scheduler import Scheduler, Seat
from vla_finetuning.rollouts.stage import Decision


class Actor:
    """An actor whose calls return references: (actor, method, arguments)."""

    def __init__(self, *_):
        self.killed = False

    def __getattr__(self, method):
        def remote(*arguments):
            return self, method, str(arguments)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=lambda *a: remote(*a)))


@pytest.fixture
def actors(monkeypatch):
    """Collect the actors made; calls of `act` raise or return by `results`."""
    stand_in = SimpleNamespace(all=[], results=[])

    def options(**_):
        return SimpleNamespace(remote=lambda *arguments: stand_in.all.append(Actor()) or stand_in.all[-1])

    def get(ref):
        if ref[1] == "act" and isinstance(result := stand_in.results.pop(0), Exception):
            raise result
        return [Acted(np.zeros((2, 3)))]

    def kill(actor):
        actor.killed = True

    ray_stand_in = SimpleNamespace(
        ObjectRef=list,
        remote=lambda of: SimpleNamespace(options=options),
        wait=lambda refs, **_: (refs, []),
        get=get,
        kill=kill,
    )
    monkeypatch.setattr(servers, "ray", ray_stand_in)
    monkeypatch.setattr(scheduler, "ray", ray_stand_in)
    return stand_in


def waiting():
    """Return a seat whose episode waits for its first decision."""
    playing = Playing(0, Episode("plain", "two_bins", 0, 1))
    return Seat(playing=[playing], decisions=[Decision(0, 0, "go")], seen="seen", since=1.0)


def policy_of(actors):
    counts = servers.Processes(servers=1, stages=1, threads=1, slots=1)
    policy = servers.PolicyServers({"plain": Condition()}, {}, EvalOptions(), counts, seed=0, use_gpu=False)
    assert len(actors.all) == 1
    return policy


@pytest.mark.parametrize("error", [OutOfMemoryError("killed for memory"), ActorDiedError()])
def test_dead_server_is_replaced_and_batch_retried(actors, error):
    actors.results, policy, seat = [error, None], policy_of(actors), waiting()
    for _ in range(3):  # it starts and is asked; it fails; the next one starts and is asked
        assert list(policy.decide([seat])) == []
    assert [actor.killed for actor in actors.all] == [True, False]
    ((batch, chunks),) = policy.decide([seat])
    assert batch == [seat] and chunks[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("results", "message"), [([ActorDiedError()] * 4, "policy servers died 4 times"), ([OSError("no weights")], "no w")]
)
def test_policy_that_keeps_failing_ends_the_play(actors, results, message):
    actors.results, policy, seat = results, policy_of(actors), waiting()
    with pytest.raises((RuntimeError, OSError), match=message):
        for _ in range(9):
            assert list(policy.decide([seat])) == []


def test_hanging_server_is_replaced_and_batch_retried(actors, monkeypatch):
    monkeypatch.setenv("VLA_WORKER_TIMEOUT_S", "20")
    clock = [0.0]
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    actors.results, policy, seat = [None, None], policy_of(actors), waiting()
    for number, limit_s in enumerate((20 + servers.LOAD_LIMIT_S, 20)):  # the first answer waits for the policies
        assert list(policy.decide([seat])) == []  # it starts and is asked
        with monkeypatch.context() as patch:
            patch.setattr(servers.ray, "wait", lambda refs, **_: ([], refs))
            start_s = clock[0]
            for waited_s in (limit_s - 1, limit_s + 1):
                clock[0] = start_s + waited_s
                assert list(policy.decide([seat])) == []
                assert actors.all[number].killed == (waited_s > limit_s)
        assert len(actors.all) == number + 2
        assert list(policy.decide([seat])) == []
        ((batch, _),) = policy.decide([seat])
        assert batch == [seat]
        seat.since = 1.0


def test_lost_observation_is_returned_for_replay(actors):
    actors.results, policy, seat = [ObjectLostError("id", None, "")], policy_of(actors), waiting()
    assert list(policy.decide([seat])) == []
    (lost,) = policy.decide([seat])
    assert lost[0] == [seat] and isinstance(lost[1], ObjectLostError) and not actors.all[0].killed


def test_restarted_stage_is_not_queried_for_its_seconds(actors):
    rollouts = Scheduler({"two_bins": None}, stages=1, slots=1, cpus=1, step_limit_s=1)
    (seat,) = rollouts.seats
    seat.started, seat.playing = True, waiting().playing
    rollouts._replace(seat, ActorDiedError())
    assert rollouts.take_seconds() == (0, 0)
    assert len(actors.all) == 2 and list(seat.queue) and not seat.playing
