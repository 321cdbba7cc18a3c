"""Play episodes with a trained LeRobot policy: turn an environment's observations into action chunks.

`PolicySource` describes a policy and travels to the process that loads it; `Player` is the loaded policy. The `check_*`
functions refuse a policy that cannot play an environment before anything starts.

Legend: N rows, T chunk, A action, H W C image.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import ray
import torch
import torch.nn.functional as F
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import PipelineFeatureType
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import env_to_policy_features, preprocess_observation
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.policies.rtc import RTCConfig, reanchor_relative_rtc_prefix
from lerobot.processor import NormalizerProcessorStep, RelativeActionsProcessorStep
from lerobot.utils.constants import ACTION, OBS_STATE, OBS_STR

from vla_finetuning.envs.configs import check_drawn, check_rate, drawn_for
from vla_finetuning.envs.protocol import Observation, select_rows, stack
from vla_finetuning.files import read_json
from vla_finetuning.options.policy import ROBOT_NAME, WRITES
from vla_finetuning.options.programs import EvaluateConfig, ServeConfig
from vla_finetuning.options.recap import ADVANTAGE, without_label
from vla_finetuning.policies.family import MAX_DELAY
from vla_finetuning.policies.flow import continue_chunk
from vla_finetuning.policies.loading import WEIGHTS_FILE, load_policy, read_weights
from vla_finetuning.policies.pipelines import (
    check_prompts_differ,
    load_processors,
    saved_rename_map,
    saved_shapes,
    tokenizer_step,
)
from vla_finetuning.policies.processors import EMPTY_CAMERA, IMAGENET_STEP
from vla_finetuning.policies.registry import family_of, types_that
from vla_finetuning.policies.remote_code import remote_code
from vla_finetuning.policies.text_targets import TEXT_COLUMNS, ends_of_text, with_text
from vla_finetuning.rollouts.episodes import Acted, Key, LeftOver, generator, noise
from vla_finetuning.run.cluster import find_gpus

TASK = "task"
# How the chunks of a policy are played; see `Acting`.
Controller = Literal["chunk", "select_action", "rtc"]
# Tensors by name as bytes, dtype and shape. All processes of a node share them in the object store.
Packed = dict[str, tuple[np.ndarray, torch.dtype, tuple[int, ...]]]


def packed(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """Return tensors as NumPy bytes, which Ray shares without a copy; NumPy has no bfloat16."""
    buffers: dict[Any, np.ndarray] = {}  # tied weights are stored once
    weights = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in buffers:
            buffers[key] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        weights[name] = (buffers[key], tensor.dtype, tuple(tensor.shape))
    return weights


def unpacked(weights: Packed) -> dict[str, torch.Tensor]:
    """Return read-only tensors over the memory of packed weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {
            name: torch.from_numpy(array).view(dtype).reshape(shape) for name, (array, dtype, shape) in weights.items()
        }


@dataclass(frozen=True, kw_only=True)
class Acting:
    """How a policy acts.

    Attributes:
        env: environment of the observations; None: they are a dataset's, in the form of gymnasium's.
        rename_map: environment key to policy key, applied before the policy's own preprocessor.
        trusted: whether code that comes with the policy may run.
        opening: prefix of all instructions.
        advantage: label after all instructions, "positive" or "negative"; None: no label.
        guidance: scale of `flow.continue_chunk`.
        subtask: whether the policy acts on texts that it writes (`text_targets`).
        controller: "chunk" executes chunks as they were predicted. "select_action" decides at each step and makes the
            action absolute by the current state, like LeRobot's loop; it needs all decisions of an episode. "rtc"
            continues the last chunk: guided like LeRobot's `RTCInferenceEngine`, or, for a policy
            that was trained for it (MAX_DELAY), conditioned on the actions executed meanwhile.
    """

    env: EnvConfig | None
    rename_map: Mapping[str, str] = field(default_factory=dict)
    trusted: bool = False
    opening: str = ""
    advantage: str | None = None
    guidance: float = 1.0
    subtask: bool = False
    controller: Controller = "chunk"


@dataclass(frozen=True)
class PolicySource(Acting):
    """A policy to load in another process; can be pickled.

    Attributes:
        folder: a LeRobot pretrained folder.
        config: configuration of the policy; `n_action_steps` actions of a chunk are executed.
        processors: preprocessor and postprocessor; None: those of the folder.
        weights: weights in the object store; None: those of the folder.
    """

    folder: Path
    config: PreTrainedConfig
    processors: tuple[Any, Any] | None = None
    device: str = "cpu"
    weights: ray.ObjectRef[Packed] | None = None

    @classmethod
    def of_export(
        cls, folder: Path, config: PreTrainedConfig, options: EvaluateConfig | ServeConfig, **acting: Any
    ) -> PolicySource:
        """Return an exported policy that acts as a program's options say. Raises ValueError if it cannot."""
        check_advantage(config, options.advantage, options.guidance)
        if options.advantage is not None:
            pipelines = load_processors(folder, config, trusted=options.policy_trust_remote_code)
            check_prompts_differ(pipelines[0], [""], f"policy {folder}", "--policy.advantage")
        check_writes(folder, config, options.subtask)
        use_gpu = find_gpus("--use_gpu") > 0 if options.use_gpu is None else options.use_gpu
        return cls(
            folder,
            config,
            device="cuda" if use_gpu else "cpu",
            trusted=options.policy_trust_remote_code,
            opening=opening_of(folder),
            advantage=options.advantage,
            guidance=options.guidance,
            subtask=options.subtask,
            **acting,
        )

    def shared(self) -> PolicySource:
        """Put the weights into the object store, for nodes without the folder. Raises as `read_weights`."""
        processors = self.processors or load_processors(self.folder, self.config, trusted=self.trusted)
        return replace(self, processors=processors, weights=ray.put(packed(read_weights(self.folder))))

    @property
    def weights_bytes(self) -> int:
        """Return the size of the folder's weights in bytes."""
        files = [path] if (path := self.folder / WEIGHTS_FILE).is_file() else self.folder.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)

    def load(self, threads: int, other: Player | None = None) -> Player:
        """Load and verify the policy on its device; compute with `threads` CPU threads.

        Weights that are equal to another player's share its memory, so that both fit on a GPU.
        """
        torch.set_num_threads(threads)
        weights = None if self.weights is None else unpacked(ray.get(self.weights))
        policy = load_policy(self.folder, self.config, trusted=self.trusted, weights=weights)
        if other is not None:
            policy.load_state_dict(other.equal_weights(policy.state_dict()), strict=False, assign=True)
        policy.to(self.device)
        pipelines = self.processors or load_processors(self.folder, self.config, trusted=self.trusted)
        return Player(policy, *pipelines, self)


class Player:
    """A policy with its own and the environment's processors."""

    def __init__(self, policy: PreTrainedPolicy, preprocessor: Any, postprocessor: Any, acting: Acting) -> None:
        config: Any = policy.config
        family = family_of(config)
        self._policy, self._pre, self._post = policy.eval(), preprocessor, postprocessor
        self._acting, self.predicts_rows_alone = acting, family.chunk_draws == "its own"
        self._device = next(policy.parameters()).device
        # Current chunk of each episode, for select_action.
        self._chunks: dict[tuple[int, str, int], torch.Tensor] = {}
        self._rtc: RTCConfig | None = None
        self._continues = False
        if acting.controller == "rtc":  # as lerobot-rollout
            config.rtc_config = self._rtc = rtc_options(config)
            if hasattr(policy, "init_rtc_processor"):
                policy.init_rtc_processor()
            if max_delay := getattr(config, MAX_DELAY, 0):
                self._rtc.execution_horizon, self._continues = max_delay, True
        self._words = "" if acting.advantage is None else ADVANTAGE[acting.advantage == "positive"]
        self._loss: Any = None
        if acting.subtask or self._continues or acting.guidance != 1.0:
            self._loss = family.make_loss(policy).eval()
        relative = (step for step in preprocessor.steps if isinstance(step, RelativeActionsProcessorStep))
        self._relative = next((step for step in relative if step.enabled), None)
        self._env_pre: Any = dict
        self._env_post: Any = dict
        if acting.env is not None:
            step_names = {getattr(step, "_registry_name", "") for step in preprocessor.steps}
            self._env_pre, self._env_post = family.env_processors(config, acting.env, step_names)

    def __call__(self, observation: Observation, instructions: Sequence[str], keys: Sequence[Key]) -> np.ndarray:
        """Return the actions to execute of chunks that are not late, float32 (N, n_action_steps, A), as `act`."""
        return np.stack([acted.actions for acted in self.act(observation, instructions, keys)])

    def act(
        self,
        observation: Observation,
        instructions: Sequence[str],
        keys: Sequence[Key],
        delay: int = 0,
        rests: Sequence[LeftOver | None] = (),
    ) -> list[Acted]:
        """Return each row's actions from its observation to the next decision, n_action_steps later.

        A chunk arrives `delay` steps after its observation; until then the rest of the last chunk is executed. The
        environment waits for an episode's first chunk, and executes it from its first action on. "rtc" omits the first
        `delay` actions of that chunk, like LeRobot's engine.

        Args:
            observation: N rows in the form of gymnasium's vector environments.
            rests: rest of each row's last chunk; None for an episode's first chunk, which all rows have or none.
        """
        if self.predicts_rows_alone and len(keys) > 1:
            # The policy has one generator for a whole batch, so predict each row alone, preprocessing included:
            # processors of language models pack the images of a batch, and others keep the states of the last batch.
            return [
                self.act(select_rows(observation, [row]), [instructions[row]], [key], delay, rests[row : row + 1])[0]
                for row, key in enumerate(keys)
            ]
        if self._acting.controller == "select_action":
            return self._act_by_steps(observation, instructions, keys)
        steps, before = self._policy.config.n_action_steps, [last for last in rests if last is not None]
        predicted, texts = self._chunk(observation, instructions, keys, delay, before)
        absolute = self._absolute(predicted)
        actions = self._env_units(absolute[:, : steps + delay])
        executed = actions[:, delay if before or self._rtc is not None else 0 : steps]
        if before:
            executed = np.concatenate([np.stack([last.actions for last in before]), executed], axis=1)
        remaining: list[LeftOver | None] = [None] * len(keys)
        if self._rtc is not None:
            prefix = (predicted if self._relative is None else absolute)[:, steps:]
            prefixes = prefix[:, : self._rtc.execution_horizon].float().cpu().numpy()
            remaining = list(map(LeftOver, actions[:, steps:], prefixes))
        elif delay:
            remaining = [LeftOver(rest, None) for rest in actions[:, steps:]]
        return list(map(Acted, executed, remaining, texts))

    def _act_by_steps(self, observation: Observation, instructions: Sequence[str], keys: Sequence[Key]) -> list[Acted]:
        steps, written = self._policy.config.n_action_steps, dict[int, str | None]()
        if begin := [row for row, key in enumerate(keys) if key[3] % steps == 0]:
            chunk_keys = [(*keys[row][:3], keys[row][3] // steps) for row in begin]
            begun = select_rows(observation, begin), [instructions[row] for row in begin], chunk_keys
            chunks, texts = self._chunk(*begun)
            self._chunks |= {key[:3]: chunk for key, chunk in zip(chunk_keys, chunks, strict=True)}
            written = dict(zip(begin, texts, strict=True))
        if any(key[:3] not in self._chunks for key in keys):
            raise RuntimeError(
                "a policy process died, and with it the chunks that its episodes were in; start the evaluation again, "
                "which goes on where it was"
            )
        self.prepare(observation, instructions, self._words)  # LeRobot's processors remember the state of now
        actions = self.to_env(torch.stack([self._chunks[key[:3]][key[3] % steps] for key in keys])[:, None])
        return [Acted(action, text=written.get(row)) for row, action in enumerate(actions)]

    def _chunk(
        self,
        observation: Observation,
        instructions: Sequence[str],
        keys: Sequence[Key],
        delay: int = 0,
        rests: Sequence[LeftOver] = (),
    ) -> tuple[torch.Tensor, Sequence[str | None]]:
        """Predict a normalised chunk for each row, (N, T, A), and write its text, if the policy does.

        `delay` as for `act`; `rests` is empty for first chunks.
        """
        use_amp = self._policy.config.use_amp and self._rtc is None  # as lerobot-eval and lerobot-rollout
        with torch.no_grad(), torch.autocast(self._device.type, enabled=use_amp):
            batch, texts = self.prepare(observation, instructions, self._words), list[str]()
            if self._acting.subtask or self._acting.guidance != 1.0:
                # Prepare and embed the images once for all prompts. The language model's features of an image depend
                # on the prompt, so they are not shared.
                features = self._loss.features(self._loss.images(batch))
                observation = {key: value for key, value in observation.items() if key != "pixels"}
                if self._acting.subtask:
                    texts = self._write(batch | features)
                    batch |= self.prepare(observation, instructions, self._words, texts)
                if self._rtc is None or self._continues:  # else LeRobot predicts, of images
                    batch |= features
            if self._rtc is not None:
                chunk = self._continue(batch, keys, delay, rests)
            elif self._acting.guidance != 1.0:
                plain = batch | self.prepare(observation, instructions, texts=texts)
                noise, guidance = self._noise(keys), self._acting.guidance
                chunk = continue_chunk(self._loss, batch, noise, plain=plain, guidance=guidance)
            else:
                chunk = continue_chunk(self._loss, batch, self._noise(keys)) if texts else self._predict(batch, keys)
            return chunk, texts or [None] * len(keys)

    def _prefix(self, rests: Sequence[LeftOver], horizon: int) -> torch.Tensor:
        """Return the rest of the last chunks in the policy's current frame, (N, horizon, A), like LeRobot."""
        prefix = torch.from_numpy(np.stack([last.prefix for last in rests if last.prefix is not None])).to(self._device)
        if self._relative is not None:
            state = self._relative.get_cached_state()
            assert state is not None
            normalizer = next((step for step in self._pre.steps if isinstance(step, NormalizerProcessorStep)), None)
            prefix = reanchor_relative_rtc_prefix(prefix, state, self._relative, normalizer, self._device)
        return F.pad(prefix, (0, 0, 0, horizon - prefix.shape[1]))

    def _continue(
        self, batch: dict[str, Any], keys: Sequence[Key], delay: int, rests: Sequence[LeftOver]
    ) -> torch.Tensor:
        """Predict chunks (N, T, A) that continue the last ones; `delay` and `rests` as for `_chunk`."""
        assert self._rtc is not None
        prefix = self._prefix(rests, self._rtc.execution_horizon) if rests else None
        if self._continues:
            given = None if prefix is None else prefix[:, :delay]
            return continue_chunk(self._loss, batch, self._noise(keys), given)
        delay = 0 if prefix is None else delay
        return self._predict(batch, keys, inference_delay=delay, prev_chunk_left_over=prefix)

    def equal_weights(self, others: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this player's tensors that are equal to those of the same names."""
        own = self._policy.state_dict()
        same = {name for name, tensor in others.items() if name in own and tensor.dtype == own[name].dtype}
        return {name: own[name] for name in same if torch.equal(others[name].to(own[name].device), own[name])}

    def _write(self, batch: dict[str, Any]) -> list[str]:
        """Generate the policy's text for each row."""
        tokenizer = tokenizer_step(self._pre).input_tokenizer
        begin, end = ends_of_text(tokenizer)
        texts = self._loss.write(batch, begin, end, TEXT_COLUMNS).tolist()
        words = [[*itertools.takewhile(lambda word: word != end, text)] for text in texts]
        return [tokenizer.decode(text, skip_special_tokens=True).strip() for text in words]

    def prepare(
        self, observation: Observation, instructions: Sequence[str], words: str = "", texts: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the policy's input batch for N rows, on its device.

        `words` end all instructions; `texts` (`text_targets`) are added to the prompt of each row.
        """
        rename_map = self._acting.rename_map
        with remote_code(self._acting.trusted), torch.no_grad():
            if self._words:  # a client's instruction may have the label already
                instructions = list(map(without_label, instructions))
            instructions = list(map(with_text, instructions, texts)) if texts else instructions
            tasks = [f"{self._acting.opening}{instruction}{words}" for instruction in instructions]
            seen = self._env_pre({**preprocess_observation(dict(observation)), TASK: tasks})
            prepared = self._pre({rename_map.get(key, key): value for key, value in seen.items()})
        # Processors are saved for one device, often the CPU.
        return {k: v.to(self._device) if isinstance(v, torch.Tensor) else v for k, v in prepared.items()}

    def to_env(self, predicted: torch.Tensor) -> np.ndarray:
        """Return the first n_action_steps of normalised chunks (N, T, A) in the environment's units."""
        return self._env_units(self._absolute(predicted)[:, : self._policy.config.n_action_steps])

    def _absolute(self, predicted: torch.Tensor) -> torch.Tensor:
        """Unnormalise chunks to the dataset's units; make relative actions absolute by the last `prepare`'s states."""
        with remote_code(self._acting.trusted), torch.no_grad():
            return self._post(predicted)

    def _env_units(self, chunk: torch.Tensor) -> np.ndarray:
        """Convert actions (N, T, A) to the environment's units, float32."""
        actions = self._env_post({ACTION: chunk.float().cpu().flatten(0, 1)})[ACTION]
        return actions.unflatten(0, chunk.shape[:2]).numpy()

    def _predict(self, batch: dict[str, Any], keys: Sequence[Key], **conditions: Any) -> torch.Tensor:
        """Predict a normalised chunk for each row, (N, T, A); a policy with its own draws gets one row."""
        policy, family = self._policy, family_of(self._policy.config)
        if family.chunk_draws == "noise":
            conditions["noise"] = self._noise(keys)
        policy.reset()
        devices, draws = [self._device] if self._device.type == "cuda" else [], family.chunk_draws == "its own"
        with torch.random.fork_rng(devices, enabled=draws):
            if draws:
                torch.manual_seed(int(generator(*keys[0]).integers(2**63)))
            return family.predict_chunk(policy, batch, **conditions)

    def _noise(self, keys: Sequence[Key]) -> torch.Tensor:
        """Return the initial noise of each row, (N, T, max_action_dim)."""
        config: Any = self._policy.config
        draws = [noise(*key, (config.chunk_size, config.max_action_dim)) for key in keys]
        return torch.from_numpy(np.stack(draws)).to(self._device)


@dataclass(frozen=True)
class Eyes:
    """Convert an environment's observations to a dataset's columns, as the policy's preprocessor expects them."""

    env: EnvConfig
    config: PreTrainedConfig

    def __call__(self, observation: Observation) -> dict[str, np.ndarray]:
        """Return one observation's columns by LeRobot's names: cameras uint8 (H, W, 3), vectors float32."""
        before, _ = family_of(self.config).env_processors(self.config, self.env, later_steps=(IMAGENET_STEP,))
        seen = before(preprocess_observation(stack([observation])))
        rows = {key: value[0] for key, value in seen.items() if key.startswith(OBS_STR) and torch.is_tensor(value)}
        return {
            key: ((row * 255).round().to(torch.uint8).permute(1, 2, 0) if row.ndim == 3 else row.float()).numpy()
            for key, row in rows.items()
        }


def opening_of(folder: Path) -> str:
    """Return the prefix of all instructions that an exported policy was trained with; "" by default."""
    return str(read_json(folder / ROBOT_NAME).get("instructions_begin_with", ""))


def check_advantage(config: PreTrainedConfig, advantage: str | None, guidance: float) -> None:
    """Raise ValueError for a guidance without a label, or for a policy without flow matching."""
    if guidance == 1.0:
        return
    if advantage is None:
        raise ValueError(
            f"--policy.guidance={guidance:g} needs a label to strengthen: give --policy.advantage positive"
        )
    if not family_of(config).flow:
        raise ValueError(
            f"--policy.guidance={guidance:g}: known for {types_that(lambda family: family.flow)}, and the policy is of "
            f"type '{config.type}'"
        )


def check_writes(folder: Path, config: PreTrainedConfig, subtask: bool) -> None:
    """Raise ValueError if texts are requested from a policy that has not learned to write any."""
    if subtask and not (family_of(config).flow and read_json(folder / ROBOT_NAME).get(WRITES)):
        raise ValueError(
            f"--policy.subtask: policy {folder} has not learned to write texts: leave it out, or give one that was "
            "trained with --train.text_targets"
        )


def check_delay(config: PreTrainedConfig, latency_s: float, delay: int, controller: Controller) -> None:
    """Raise ValueError, naming the flags, if chunks are too short for a latency of `delay` steps."""
    settings: Any = config
    if controller == "rtc" and delay > (max_delay := getattr(config, MAX_DELAY, 0) or delay):
        raise ValueError(
            f"--eval.latency_s={latency_s:g} is {delay} steps of the environment (--env.fps), and the policy was "
            f"trained for at most {max_delay} (--policy.{MAX_DELAY}): lower the latency, train it for more, or give "
            f"--policy.{MAX_DELAY}=0, by which LeRobot's guidance plays it"
        )
    steps, chunk = settings.n_action_steps, len(config.action_delta_indices or [0])
    fits = range(max(1, delay), chunk - max(delay, controller == "rtc") + 1)  # values of n_action_steps
    if steps in fits:
        return
    why = (
        f"--eval.latency_s={latency_s:g} is {delay} steps of the environment (--env.fps), and a chunk of {chunk} is "
        f"computed every {steps}"
    )
    if not fits:
        raise ValueError(f"{why}: a chunk must have at least {2 * max(1, delay)} actions; lower --eval.latency_s")
    late = "the next is due before it arrives" if steps < delay else "it ends before the next one arrives"
    raise ValueError(f"{why}: {late}; give --policy.n_action_steps from {fits[0]} to {fits[-1]}")


def rtc_options(config: PreTrainedConfig) -> RTCConfig:
    """Return --policy.rtc_config, or LeRobot's defaults with a horizon that the rest of a chunk fills."""
    settings: Any = config
    if settings.rtc_config is not None:
        return replace(settings.rtc_config, enabled=True)
    remaining = max(1, settings.chunk_size - settings.n_action_steps)
    return RTCConfig(execution_horizon=min(RTCConfig().execution_horizon, remaining))


def check_rtc(config: PreTrainedConfig, guidance: float) -> None:
    """Raise ValueError for a policy without LeRobot's real-time chunking."""
    policy_class: Any = get_policy_class(config.type)
    if not policy_class.supports_rtc(SimpleNamespace(config=config)):
        raise ValueError(
            f"--eval.controller=rtc: LeRobot has no real-time chunking for this policy, of type '{config.type}' "
            "(supports_rtc); give --eval.controller=chunk"
        )
    horizon, chunk = rtc_options(config).execution_horizon, getattr(config, "chunk_size", 0)
    if chunk < horizon and not getattr(config, MAX_DELAY, 0):
        raise ValueError(f"--policy.rtc_config.execution_horizon={horizon}: more than a chunk has ({chunk}); lower it")
    if guidance != 1.0:
        raise ValueError(
            f"--policy.guidance={guidance:g} with --eval.controller=rtc, which has a guidance of its own: leave one out"
        )


def shown_features(config: PreTrainedConfig, env: EnvConfig) -> dict[str, Any]:
    """Return the features that an environment shows a policy, by the environment's own names."""
    # Some environments' processors derive features: LIBERO's joins the parts of the state.
    observation = {PipelineFeatureType.OBSERVATION: env_to_policy_features(env)}
    by_type = env.get_env_processors()[0].transform_features(observation)
    features = {key: feature for of_type in by_type.values() for key, feature in of_type.items()}
    return family_of(config).env_features(config, env, features)


def check_plays(folder: Path, config: PreTrainedConfig, env: EnvConfig, rename_map: Mapping[str, str]) -> None:
    """Refuse an exported policy that cannot play an environment, or was trained on other images or at another rate.

    Raises ValueError, also for a key of `rename_map` that the environment does not have.
    """
    env_keys = sorted(shown_features(config, env).keys() - {ACTION})
    if unknown := sorted(rename_map.keys() - set(env_keys)):
        raise ValueError(
            f"--rename_map: --env.type={env.type} does not show {', '.join(unknown)}; it shows {', '.join(env_keys)}: "
            "give one of these names as the key"
        )
    check_fits(config, env, {**saved_rename_map(folder), **rename_map}, saved_shapes(folder, config))
    check_drawn(drawn_for(folder), env, folder)
    facts = read_json(folder / ROBOT_NAME)
    check_rate(facts.get("fps", 0), facts.get("frames_per_action", 1), env, folder)


def check_acts(config: PreTrainedConfig) -> None:
    """Raise ValueError for a policy that predicts no actions, or needs more than the current observation."""
    family = family_of(config)
    # Any process may get an episode's next decision, so none has the past observations.
    if past := family.remembers(config):
        raise ValueError(f"a '{config.type}' policy {past}, which is not done here yet; lerobot-eval can")
    if reason := family.cannot_predict(config):
        raise ValueError(f"a '{config.type}' policy predicts nothing as it is configured: {reason}")


def robot_shown(env: EnvConfig, robots: Mapping[str, tuple[PreTrainedConfig, Mapping[str, str]]]) -> str:
    """Return the name of the robot whose policy fits an environment. Raises ValueError if none does, or several do.

    `robots` are policy configuration and rename map (environment key to policy key) of each robot, by name.
    """
    refused = {}
    for name, (config, rename_map) in robots.items():
        trained = {key: tuple(feature.shape) for key, feature in config.input_features.items()}
        try:
            check_fits(config, env, rename_map, trained)
        except ValueError as error:
            refused[name] = str(error)
    fits = [name for name in robots if name not in refused]
    if len(fits) != 1:
        why = f"it fits {', '.join(fits)}" if fits else "; ".join(f"{name}: {error}" for name, error in refused.items())
        raise ValueError(f"--env.type={env.type} is to show one of the robots {', '.join(robots)}: {why}")
    return fits[0]


def check_fits(
    config: PreTrainedConfig,
    env: EnvConfig,
    rename_map: Mapping[str, str],
    trained: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Refuse a policy that cannot play an environment, before anything starts.

    Raises ValueError, which names the features on both sides and the flag to give.

    Args:
        rename_map: environment key to policy key.
        trained: shapes of the training data by the policy's keys, if known. The configuration alone may have a padded
            state, and cameras that were masked in training.
    """
    check_acts(config)
    family = family_of(config)
    features = shown_features(config, env)
    env_features = {rename_map.get(key, key): feature for key, feature in features.items()}
    missing = {key for key in config.input_features if key not in env_features and not key.startswith(EMPTY_CAMERA)}
    # A target that the policy does not have is a mistake in the map, not a camera to leave out.
    slip = any(key in rename_map and rename_map[key] not in config.input_features for key in features)
    masks = (family.masks_cameras or family.any_inputs) and any(key in env_features for key in config.image_features)
    if masks and not slip:
        missing -= config.image_features.keys() - trained.keys()
    if missing:
        env_keys = sorted(features.keys() - {ACTION})
        unused = [key for key in env_keys if rename_map.get(key, key) not in config.input_features]
        example = json.dumps({[*unused, *env_keys][0]: min(missing)})
        raise ValueError(
            f"the policy needs {sorted(missing)}, and --env.type={env.type} shows {env_keys}; --rename_map='{example}' "
            "gives one of them another name"
        )
    for key, feature in {**config.output_features, **config.input_features}.items():
        # Policies resize images; a vector of another length belongs to another robot.
        if key not in env_features or len(feature.shape) != 1:
            continue
        env_shape, policy_shape = tuple(env_features[key].shape), trained.get(key, tuple(feature.shape))
        if key == OBS_STATE and key not in trained and len(env_shape) == 1:  # padded, where the policy pads
            padded = policy_shape == (getattr(config, "max_state_dim", None),)
            policy_shape = env_shape if family.any_inputs or (padded and env_shape < policy_shape) else policy_shape
        if env_shape != policy_shape:
            raise ValueError(
                f"the policy's '{key}' has the shape {policy_shape}, that of --env.type={env.type} {env_shape}: it was "
                "trained for another robot"
            )
