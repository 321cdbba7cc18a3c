"""A tiny PI0.5 for the demo, rehearsals on a laptop and tests: LeRobot's `PI05Policy` with small sizes.

Importing this module registers `tiny_pi05` with LeRobot, which finds `TinyPI05Policy` and
`make_tiny_pi05_pre_post_processors` by its naming convention. LeRobot's code computes everything; this module defines
only sizes, initial weights and the tokenizer. `make_tiny_base` writes a pretrained folder for a dataset.
"""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.lerobot_types import TransitionKey
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.policies.pi_gemma import PiGemmaRMSNorm
from lerobot.processor import (
    AbsoluteActionsProcessorStep,
    PolicyAction,
    PolicyProcessorPipeline,
    ProcessorStepRegistry,
    RelativeActionsProcessorStep,
    TokenizerProcessorStep,
    create_transition,
    make_default_policy_processor_steps,
    make_policy_processor_pipelines,
)
from lerobot.utils.constants import (
    ACTION,
    OBS_STATE,
    POLICY_POSTPROCESSOR_DEFAULT_NAME,
    POLICY_PREPROCESSOR_DEFAULT_NAME,
)
from lerobot.utils.feature_utils import dataset_to_policy_features
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

# Words of PI0.5's prompt "Task: {instruction}, State: {bins};\nAction: ". Bins are 0..255, or -1 for a value below the
# range that normalisation maps to [-1, 1].
PROMPT_WORDS = ("task", "state", "action", ":", ",", ";")
STATE_BINS = range(-1, 256)
PAD_TOKEN, UNKNOWN_TOKEN = "<pad>", "<unk>"
MAX_VOCABULARY = 4096
# Prefix of words that stand for action tokens and are in no prompt.
SPARE_WORD = "<action"
# Extra prompt length for instructions longer than any in the dataset; prompts are a multiple of 8 long.
SPARE_WORDS = 4

# LeRobot's joint attention supports only 8 query heads and one key-value head, as in Gemma.
NUM_HEADS, NUM_KV_HEADS = 8, 1

_construction_lock = threading.Lock()


@PreTrainedConfig.register_subclass("tiny_pi05")
@dataclass
class TinyPI05Config(PI05Config):
    """`PI05Config` with the sizes that PI0.5 takes from its Gemma variants and its SigLIP.

    The inherited `paligemma_variant` and `action_expert_variant` have no effect.

    Attributes:
        width, depth, mlp_dim, head_dim: sizes of both the language model and the action expert (8 heads).
        vision_width, vision_depth, vision_mlp_dim, vision_heads, patch_size: sizes of SigLIP.
        vocabulary: words of the tokenizer besides the words of every prompt and the integers -1 to 255.
    """

    width: int = 64
    depth: int = 3
    mlp_dim: int = 128
    head_dim: int = 16
    vision_width: int = 64
    vision_depth: int = 2
    vision_mlp_dim: int = 128
    vision_heads: int = 4
    patch_size: int = 14
    image_resolution: tuple[int, int] = (56, 56)
    vocabulary: list[str] = field(default_factory=list)
    tokenizer_max_length: int = 64
    chunk_size: int = 10
    n_action_steps: int = 10

    @property
    def vocab_size(self) -> int:
        return len(tokenizer_vocabulary(self.vocabulary))


class TinyPI05Policy(PI05Policy):
    """LeRobot's `PI05Policy` built at the sizes of a `TinyPI05Config`."""

    config_class = TinyPI05Config
    name = "tiny_pi05"

    def __init__(self, config: TinyPI05Config, **kwargs: Any):
        with _construction_at(config):
            super().__init__(config, **kwargs)
        _initialise(self)


@contextlib.contextmanager
def _construction_at(sizes: TinyPI05Config) -> Iterator[None]:
    """Patch LeRobot in the block so that it builds a PI0.5 of the given sizes."""
    # LeRobot 0.6.1 has a table of two sizes of PI0.5, and literals of the vocabulary and SigLIP's sizes in
    # `PaliGemmaWithExpertModel.__init__`. So the three functions that it builds with are replaced.

    def gemma_config(variant: str) -> modeling_pi05.GemmaConfig:
        return modeling_pi05.GemmaConfig(
            sizes.width, sizes.depth, sizes.mlp_dim, NUM_HEADS, NUM_KV_HEADS, sizes.head_dim
        )

    def paligemma(config: Any) -> nn.Module:
        vision = config.vision_config
        vision.hidden_size = sizes.vision_width
        vision.num_hidden_layers = sizes.vision_depth
        vision.num_attention_heads = sizes.vision_heads
        vision.intermediate_size = sizes.vision_mlp_dim
        vision.patch_size = sizes.patch_size
        vision.projection_dim = config.projection_dim = sizes.width
        config.text_config.vocab_size = config._vocab_size = sizes.vocab_size
        config.image_token_index = sizes.vocab_size  # as in PI0.5: one past the last token, never looked up
        return originals["PaliGemmaForConditionalGenerationWithPiGemma"](config=config)

    def expert(config: Any) -> nn.Module:
        config.vocab_size = sizes.vocab_size
        return originals["PiGemmaForCausalLM"](config=config)

    replacements = {
        "get_gemma_config": gemma_config,
        "PaliGemmaForConditionalGenerationWithPiGemma": paligemma,
        "PiGemmaForCausalLM": expert,
    }
    with _construction_lock:
        originals = {name: getattr(modeling_pi05, name) for name in replacements}
        try:
            vars(modeling_pi05).update(replacements)
            yield
        finally:
            vars(modeling_pi05).update(originals)


@torch.no_grad()
def _initialise(policy: TinyPI05Policy) -> None:
    """Initialise weights for training a narrow network from scratch: scaled by width, with open gates."""
    # With LeRobot's standard deviation of 0.02 each layer of width 64 shrinks its input tenfold, and its gates near
    # zero suit a pretrained backbone. With both, several hundred steps do not learn the demo's task.
    joint = policy.model.paligemma_with_expert
    language_model, expert = joint.paligemma.model.language_model, joint.gemma_expert.model
    for part in (language_model, expert, joint.paligemma.model.multi_modal_projector):
        for module in part.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
    for module in expert.modules():
        if isinstance(module, PiGemmaRMSNorm):
            nn.init.zeros_(module.dense.weight)
            scale, shift, gate = module.dense.bias.chunk(3)
            scale.zero_(), shift.zero_(), gate.fill_(1.0)


# --- tokenizer -------------------------------------------------------------------------------------------------------


def tokenizer_vocabulary(words: Sequence[str]) -> dict[str, int]:
    """Assign token ids to padding, unknown, the integers -1..255, the prompt's words, then `words` in order."""
    tokens = itertools.chain((PAD_TOKEN, UNKNOWN_TOKEN), map(str, STATE_BINS), PROMPT_WORDS, words)
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def make_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word, integer or punctuation mark.

    It ignores case and maps unknown words to `<unk>`. One token per state dimension keeps prompts short.
    """
    tokenizer = Tokenizer(models.WordLevel(tokenizer_vocabulary(words), unk_token=UNKNOWN_TOKEN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"-?\d+|\w+|[^\w\s]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD_TOKEN, unk_token=UNKNOWN_TOKEN)


def split_words(text: str) -> list[str]:
    """Split `text` as the tokenizer does into words, integers and punctuation marks."""
    backend = make_tokenizer(()).backend_tokenizer
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))]


@dataclass
@ProcessorStepRegistry.register(name="tiny_pi05_tokenizer_processor")
class TinyPI05TokenizerProcessorStep(TokenizerProcessorStep):
    """LeRobot's tokenizer step with a tokenizer that is saved as a list of words in the step's JSON.

    Raises ValueError for a prompt longer than `max_length`, because truncation would silently cut off the state.
    """

    tokenizer: Any | None = None
    vocabulary: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            self.tokenizer = make_tokenizer(self.vocabulary)
        super().__post_init__()

    def _tokenize_text(self, text: str | list[str]) -> dict[str, torch.Tensor]:
        texts = [text] if isinstance(text, str) else list(text)
        encoded = self.input_tokenizer(
            texts, padding="max_length", max_length=self.max_length, padding_side=self.padding_side, truncation=False
        )
        for prompt, ids in zip(texts, encoded["input_ids"], strict=True):
            if len(ids) > self.max_length:
                raise ValueError(
                    f"the prompt {prompt!r} has {len(ids)} tokens, more than this tiny policy's tokenizer_max_length "
                    f"{self.max_length}; shorten the instruction, or make the base policy for these instructions"
                )
        return {key: torch.tensor(encoded[key]) for key in ("input_ids", "attention_mask")}

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "vocabulary": list(self.vocabulary)}


def make_tiny_pi05_pre_post_processors(
    config: TinyPI05Config, dataset_stats: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    """Make PI0.5's processors, with the same steps in the same order, and the tokenizer of `config.vocabulary`."""
    relative = RelativeActionsProcessorStep(
        enabled=config.use_relative_actions,
        exclude_joints=config.relative_exclude_joints,
        action_names=config.action_feature_names,
    )
    steps = make_default_policy_processor_steps(config, dataset_stats)
    return make_policy_processor_pipelines(
        input_steps=[
            steps.rename_observations,
            steps.add_batch_dim,
            relative,
            steps.normalize,
            Pi05PrepareStateTokenizerProcessorStep(max_state_dim=config.max_state_dim),
            TinyPI05TokenizerProcessorStep(vocabulary=config.vocabulary, max_length=config.tokenizer_max_length),
            steps.to_device,
        ],
        output_steps=[
            steps.unnormalize,
            AbsoluteActionsProcessorStep(enabled=config.use_relative_actions, relative_step=relative),
            steps.to_cpu,
        ],
    )


# --- the base policy of a dataset ------------------------------------------------------------------------------------


def make_tiny_base(
    folder: Path,
    *,
    features: Mapping[str, Any],
    tasks: Sequence[str],
    stats: Mapping[str, Mapping[str, Any]] | None,
    fps: float,
    chunk_size: int | None = None,
    seed: int = 0,
    spare_words: int = 0,
    **sizes: Any,
) -> Path:
    """Write a randomly initialised tiny PI0.5 for a dataset's cameras, state and action as a LeRobot pretrained folder.

    The same arguments give the same bytes.

    Args:
        features: dicts or objects with `dtype`, `shape` and `names`. All RGB cameras, `observation.state` and `action`
            are used.
        stats: the dataset's statistics; `observation.state` and `action` need the quantiles `q01` and `q99`. None: the
            user of the folder supplies them by LeRobot's `preprocessor_overrides`.
        chunk_size: None: one second of actions, at most PI0.5's 50.
        seed: seed of the initial weights. Does not change the process's random state.
        spare_words: words for action tokens.
        sizes: further fields of `TinyPI05Config`.
    Raises:
        FileExistsError: `folder` exists.
        ValueError: the dataset has no RGB camera, state or action, or they lack quantiles or are wider than 32.
    """
    if Path(folder).exists():
        raise FileExistsError(f"{folder} exists; remove it, or choose another folder for the base policy")
    features = {key: f if isinstance(f, Mapping) else vars(f) for key, f in features.items()}
    input_features, output_features = _policy_features(features)
    for key in (OBS_STATE, ACTION):
        names = set(stats.get(key, {})) if stats is not None else {"q01", "q99"}
        if missing := {"q01", "q99"} - names:
            raise ValueError(
                f"the statistics of '{key}' lack {sorted(missing)}, which PI0.5 normalises by; found {sorted(names)}: "
                "add them with `python -m lerobot.scripts.augment_dataset_quantile_stats`"
            )
    if chunk_size is None:
        chunk_size = min(max(round(fps), 2), PI05Config.chunk_size)
    prompts = _prompts(tasks, input_features[OBS_STATE].shape[0])
    config = TinyPI05Config(
        input_features=input_features,
        output_features=output_features,
        chunk_size=chunk_size,
        n_action_steps=chunk_size,
        vocabulary=[*_vocabulary(prompts), *(f"{SPARE_WORD}{number}>" for number in range(spare_words))],
        tokenizer_max_length=-(-(max(map(len, prompts)) + SPARE_WORDS) // 8) * 8,
        action_feature_names=_flat_names(features[ACTION].get("names")),
        device="cpu",  # exists on every machine; may be overridden on loading
        **sizes,
    )
    for key, feature, limit in (
        (OBS_STATE, input_features[OBS_STATE], config.max_state_dim),
        (ACTION, output_features[ACTION], config.max_action_dim),
    ):
        if feature.shape[0] > limit:
            raise ValueError(f"'{key}' has {feature.shape[0]} dimensions, more than PI0.5's {limit}")

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = TinyPI05Policy(config)
    preprocessor, postprocessor = make_tiny_pi05_pre_post_processors(
        config, stats and {key: stats[key] for key in (OBS_STATE, ACTION)}
    )
    policy.save_pretrained(folder)
    preprocessor.save_pretrained(folder, config_filename=f"{POLICY_PREPROCESSOR_DEFAULT_NAME}.json")
    postprocessor.save_pretrained(folder, config_filename=f"{POLICY_POSTPROCESSOR_DEFAULT_NAME}.json")
    return Path(folder)


def _policy_features(
    features: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, PolicyFeature], dict[str, PolicyFeature]]:
    """Return the policy's inputs (RGB cameras channel-first, then the state) and its output (the action)."""
    axes = ("height", "width", "channels")  # default names
    typed = dataset_to_policy_features({key: {**f, "names": f.get("names") or axes} for key, f in features.items()})
    typed = {key: PolicyFeature(feature.type, tuple(feature.shape)) for key, feature in typed.items()}
    cameras = {key: feature for key, feature in typed.items() if feature.type is FeatureType.VISUAL}
    if not (cameras := {key: feature for key, feature in cameras.items() if feature.shape[0] == 3}):
        raise ValueError(f"the dataset has no RGB camera, which PI0.5 needs; its features are {sorted(features)}")
    for key in (OBS_STATE, ACTION):
        if key not in features:
            other = "observation.x" if key == OBS_STATE else "x"
            raise ValueError(
                f"the dataset has no '{key}', which PI0.5 needs; its features are {sorted(features)}; --rename_map="
                f'\'{{"{other}": "{key}"}}\' gives one of them that name'
            )
        if len(typed[key].shape) != 1:
            raise ValueError(f"'{key}' must be a vector for PI0.5, its shape is {typed[key].shape}")
    return {**cameras, OBS_STATE: typed[OBS_STATE]}, {ACTION: typed[ACTION]}


def _flat_names(names: Any) -> list[str] | None:
    """Return the names of a vector's dimensions, which LeRobot stores as a list or a dict of lists."""
    if isinstance(names, Mapping):
        names = list(itertools.chain.from_iterable(names.values()))
    return [str(name) for name in names] if names else None


def _prompts(tasks: Sequence[str], state_dim: int) -> list[list[str]]:
    """Return the words of LeRobot's PI0.5 prompt of each instruction, for a state of zeros."""
    tasks = list(dict.fromkeys(tasks)) or [""]
    transition = create_transition(
        observation={OBS_STATE: torch.zeros(len(tasks), state_dim)}, complementary_data={"task": tasks}
    )
    prepared = Pi05PrepareStateTokenizerProcessorStep()(transition)
    return [split_words(prompt) for prompt in prepared[TransitionKey.COMPLEMENTARY_DATA]["task"]]


def _vocabulary(prompts: Sequence[Sequence[str]]) -> list[str]:
    """Return at most `MAX_VOCABULARY` words of the prompts that are not built in, the most frequent first."""
    counts = Counter(word for prompt in prompts for word in prompt)
    ranked = sorted(counts.keys() - tokenizer_vocabulary(()).keys(), key=lambda word: (-counts[word], word))
    return ranked[:MAX_VOCABULARY]
