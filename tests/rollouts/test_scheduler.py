"""Episodes on Ray against a plain loop, with lost processes; policy servers; capacity."""

from functools import partial

import gymnasium
import numpy as np
import pytest

from tests.rollouts.players import FAULTY_ID, Seeing, plain_loop
from vla_finetuning.envs import two_bins
from vla_finetuning.envs.two_bins_scene import INSTRUCTIONS
from vla_finetuning.options.environment import EvalOptions
from vla_finetuning.rollouts import scheduler
from vla_finetuning.rollouts.episodes import Acted, Condition, episode_list
from vla_finetuning.rollouts.scheduler import NoCapacityError
from vla_finetuning.rollouts.servers import PolicyServer, Processes, Row, play

pytestmark = pytest.mark.ray
OTHER = dict(zip(INSTRUCTIONS.values(), reversed(INSTRUCTIONS.values()), strict=True))
CONDITIONS = {"plain": Condition(), "other": Condition(instructions=OTHER)}
SEED, DELAY = 50, 2


def played(episodes, gym=(two_bins.GYM_ID, {}), sources=None, acted=None, **options):
    """Play episodes; return each one's outcome or error; append (line, actions) to `acted`."""
    lines = {}

    def on_end(line, actions):
        assert (actions is None) == (line["error"] is not None)
        if acted is not None:
            acted.append((line, actions))
        (episode,) = [e for e in episodes if (e.condition, e.episode) == (line["condition"], line["episode"])]
        assert episode not in lines and line["seed"] == episode.seed and line["task"] == "two_bins"
        names = ("instruction", "success_once", "steps", "decisions", "initial_state")
        lines[episode] = line["error"] or (*(line[name] for name in names), line["info"]["reached"])

    # gymnasium imports the module that registers it.
    module = {two_bins.GYM_ID: two_bins.__name__, FAULTY_ID: "tests.rollouts.players"}[gym[0]]
    makers = {"two_bins": partial(gymnasium.make, f"{module}:{gym[0]}", **gym[1])}
    conditions, sources = {**CONDITIONS, "late": Condition(delay=DELAY)}, sources or {"policy": Seeing()}
    options = EvalOptions(**options)
    play(episodes, conditions, sources, makers, options, seed=SEED, on_end=on_end)
    return lines


@pytest.fixture(scope="module")
def episodes():
    return episode_list(CONDITIONS, ["two_bins"], 12, seed=1000)


@pytest.fixture(scope="module")
def expected(episodes):
    lines = {
        episode: plain_loop(
            episode.seed, (SEED, episode.task, episode.episode), CONDITIONS[episode.condition].instructions
        )
        for episode in episodes
    }
    successes = {name: sum(line[1] for e, line in lines.items() if e.condition == name) for name in CONDITIONS}
    assert 0 < successes["plain"] < 12 and successes["other"] == 0  # there is something to tell apart
    return lines


def test_failing_episode_is_an_error_and_others_are_unaffected(ray_cluster, episodes, expected):
    """Four of the six environment processes fit the cluster."""
    gym = FAULTY_ID, {"seed": 1005, "how": "dies"}
    actual = played(episodes, gym, env_actors=6, policy_actors=2, batch_size=1)
    assert set(actual) == set(episodes)
    for episode, line in actual.items():
        assert ("its process died" in line) if episode.seed == 1005 else (line == expected[episode])


def test_late_chunks_match_plain_loop_despite_lost_processes(ray_cluster, tmp_path, monkeypatch):
    """A stage hangs and a server dies; left-over actions and generated texts survive."""
    monkeypatch.setenv("VLA_STEP_TIMEOUT_S", "2")
    late = episode_list(["plain", "late"], ["two_bins"], 8, seed=1000)
    expected = {
        episode: plain_loop(episode.seed, key, delay=DELAY if episode.condition == "late" else None)
        for episode in late
        for key in [(SEED, episode.task, episode.episode)]
    }
    gym, notes = (FAULTY_ID, {"seed": 1005, "how": "hangs", "marker": str(tmp_path / "stage")}), tmp_path / "n"
    sources, acted = {"policy": Seeing(notes=str(notes), dies=str(tmp_path / "server"), dies_after=3, writes=True)}, []
    assert played(late, gym, sources, acted, env_actors=2, policy_actors=2, batch_size=3, exact=True) == expected
    assert set(notes.read_text().split()) == {"3"} and len(acted) == len(late)
    # Written actions reproduce the episode, also where steps were repeated.
    with gymnasium.make(two_bins.GYM_ID) as env:
        for line, actions in acted:
            assert line["texts"] == [f"{line['episode']} {decision}" for decision in range(line["decisions"])]
            env.reset(seed=line["seed"])
            assert len(actions) == line["steps"]
            *_, (_, reward, over, _, _) = [env.step(action) for action in actions]
            assert (env.unwrapped.state_hash(), reward == 1) == (line["final_state"], line["success_at_end"])
    assert (tmp_path / "stage").exists() and (tmp_path / "server").exists()
    assert {line[3] for episode, line in expected.items() if episode.condition == "late"} != {
        line[3] for episode, line in expected.items() if episode.condition == "plain"
    }


# ---- a server, without Ray ------------------------------------------------------------------------------------------


class Echo:
    """A player that returns its name and its inputs."""

    def __init__(self, name):
        self.name, self.batches = name, []

    weights_bytes, predicts_rows_alone = 0, False

    def load(self, threads, other=None):
        return self

    def act(self, observation, instructions, keys, delay, left):
        self.batches.append(len(keys))
        image = observation["pixels"]["top"].reshape(len(keys), -1).max(1)
        rows = zip(image, observation["agent_pos"][:, 0], instructions, keys, strict=True)
        return [Acted(np.array([[self.name, i, x, len(task), key[2]]], float)) for i, x, task, key in rows]


@pytest.mark.parametrize("exact", [False, True])
def test_server_returns_each_row_its_own_actions(exact):
    """Rows of two policies and two stages in one call, some blindfolded."""
    players = {"a": Echo(1), "b": Echo(2)}
    server = PolicyServer(players, batch_size=2, exact=exact)
    observations = [
        {"agent_pos": np.arange(n)[:, None] + 10.0 * first, "pixels": {"top": np.full((n, 4, 4, 3), 9, np.uint8)}}
        for first, n in ((1, 3), (2, 2))
    ]
    rows = [Row("ab"[i % 2], "x" * i, i in (1, 4), (0, "t", 100 + i, 0)) for i in range(5)]
    chunks, left, texts = zip(*server.act(rows, *observations), strict=True)
    actions = np.stack(chunks)
    assert left == texts == (None,) * 5
    xs = [10, 11, 12, 20, 21]
    assert actions[:, 0].tolist() == [[1 + i % 2, 0 if i in (1, 4) else 9, xs[i], i, 100 + i] for i in range(5)]
    assert all(part["pixels"]["top"].all() for part in observations)
    assert players["a"].batches == ([2, 2] if exact else [2, 1])  # three rows
    players["a"].predicts_rows_alone = True  # a full batch would not change the result
    server.act(rows, *observations)
    assert players["a"].batches[2:] == [2, 1]


# ---- capacity -------------------------------------------------------------------------------------------------------


def test_policy_without_capacity_raises_with_missing_resources(ray_cluster, episodes, monkeypatch):
    monkeypatch.setattr(scheduler, "CAPACITY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(scheduler, "LOOK_EVERY_S", 0.5)
    with pytest.raises(NoCapacityError, match="decides .* needs 1 GPU, 0 of the cluster's 0 free"):
        played(episodes[:2], sources={"policy": Seeing(device="cuda")})


@pytest.mark.parametrize(
    ("cpus", "options", "episodes", "gigabytes", "use_gpu", "expected"),
    [
        (2, {}, 1000, 0.1, False, (2, 2, 1, 32)),
        (2, {}, 15, 0.1, False, (1, 3, 2, 5)),  # another server would start for nothing
        (2, {}, 1000, 14, False, (1, 3, 2, 22)),  # one copy of the policy
        (2, {"policy_actors": 1, "exact": True}, 1000, 0.1, False, (1, 3, 1, 22)),
        (64, {}, 1000, 0.1, False, (4, 124, 16, 3)),
        (64, {}, 1000, 14, True, (1, 127, 1, 1)),
        (64, {"env_actors": 2, "policy_actors": 3}, 1000, 0.1, False, (3, 2, 1, 32)),
        (0.3, {}, 3, 0.1, False, (1, 2, 2, 2)),
        (8, {}, 1, 0.1, False, (1, 1, 1, 1)),
    ],
)
def test_process_counts_fit_cluster_and_episode_list(cpus, options, episodes, gigabytes, use_gpu, expected):
    """Counts: servers, stages, threads of a server, episodes at once in a stage."""
    counts = Processes.of(
        EvalOptions(**options), cpus, episodes=episodes, weights_bytes=int(gigabytes * 1e9), use_gpu=use_gpu
    )
    assert (counts.servers, counts.stages, counts.threads, counts.slots) == expected
