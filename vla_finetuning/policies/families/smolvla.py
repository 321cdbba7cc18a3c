"""SmolVLA as a family: its loss, its trainable parts and its token counts.

`SmolVLALoss` gives the loss and gradients of LeRobot's `SmolVLAPolicy.forward`. It calls LeRobot's layers in another
order and skips work that the loss does not need:

* Images and words attend to neither state nor actions, and the state attends to no action. So images and words run
  first, without autograd if nothing in them trains. The state token follows with autograd, because its projection
  trains. The action tokens run last. In self-attention layers they attend to the prefix and to earlier actions; in
  cross-attention layers they attend to keys and values that the expert projects from those of the prefix.
* The loss uses only keys and values of the language model's last layer.
* LeRobot masks a camera that is not in the batch; here it has no tokens. A camera that only some rows lack is masked in
  these rows.
* No value is read from the device. LeRobot's vision tower indexes by a boolean mask in every step (transformers 5.5) to
  find the positions of patches; here they follow from the image size.
* Attention stores no attention weights (`attention`).

Legend: B batch, K draws of noise and time per row, T chunk, P prefix tokens: images, language and the state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.configs import PreTrainedConfig
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import (
    ACTION,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OBS_STATE,
    OPENPI_ATTENTION_MASK_VALUE,
)
from torch import Tensor, nn
from transformers import AutoConfig

from util import Draws
from vla_finetuning.policies.attention import Kernel, Shape
from vla_finetuning.policies.families.pi0 import PI0
from vla_finetuning.policies.families.pi05 import (
    Prefix,
    attend_rotated,
    finish_layer,
    keys_values_of,
    later_layer,
    norm,
    prefix_layer,
    suffix_layer,
)
from vla_finetuning.policies.family import MEAN_COUNT, UNUSED, parts_by_prefix
from vla_finetuning.policies.flow import (
    FlowLoss,
    TimeDistribution,
    repeat_rows,
    sample_noise_and_time,
    scale_to_robot_dims,
)
from vla_finetuning.policies.layers import heads_of, mask_absent
from vla_finetuning.policies.prompts import prompt_lengths

# `VLAFlowMatching.sample_time` of LeRobot 0.6.1, and `apply_rope`.
TIMES = TimeDistribution(alpha=1.5, beta=1.0, scale=0.999, offset=0.001)
MAX_WAVELENGTH = 10_000
# With `add_image_special_tokens`: two tokens before an image, one after it.
MARKS_PER_IMAGE = 3

# --- the loss ---------------------------------------------------------------------------------------------


class SmolVLALoss(FlowLoss):
    """SmolVLA's loss; equals `SmolVLAPolicy.forward` with the same noise and time, gradients included.

    As in LeRobot, the loss is the mean over the unpadded action steps of a micro-batch (`action_is_pad`), not over its
    rows; with MEAN_COUNT, over those of the whole step. With `row_weight` it is the weighted mean of the rows' means.

    Construct it after `choose_trainable`, which decides whether images and language need gradients.
    """

    # Token ids of the marks around an image: two before it and one after it.
    marks: Tensor

    def __init__(self, policy: PreTrainedPolicy, **options: Any):
        super().__init__(policy, **options)
        core = policy.model.vlm_with_expert
        self._prefix_trains = any(parameter.requires_grad for parameter in core.vlm.parameters())
        language = core.get_vlm_model().text_model
        # Expert layer of each language layer, or None, up to the last language layer with an expert layer.
        experts = core.get_model_layers([language, core.lm_expert])[1]
        depth = 1 + max(number for number, expert in enumerate(experts) if expert is not None)
        self._pairs = list(zip(language.layers[:depth], experts[:depth], strict=True))
        every = core.self_attn_every_n_layers
        self._crosses = [
            "cross" in core.attention_mode and not (every > 0 and number % every == 0) for number in range(depth)
        ]
        fake, around = policy.model.fake_image_token, policy.model.global_image_token
        marks = torch.tensor([fake, around, fake], device=policy.model.state_proj.weight.device)
        self.register_buffer("marks", marks, persistent=False)
        self._vision_layer, self._prefix_layer = self._compiled(_vision_layer), self._compiled(prefix_layer)
        self._state_layer, self._suffix_layer = self._compiled(later_layer), self._compiled(suffix_layer)
        self._cross_layer = self._compiled(_cross_layer)

    def layers(self) -> Iterable[nn.Module]:
        vision = self.policy.model.vlm_with_expert.get_vlm_model().vision_model
        language, experts = zip(*self._pairs, strict=True)
        return (*vision.encoder.layers, *language[:-1], *(expert for expert in experts if expert is not None))

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        batch = super().inputs(batch)
        if self.policy.config.adapt_to_pi_aloha:
            # LeRobot's functions work in place.
            batch[OBS_STATE] = self.policy._pi_aloha_decode_state(batch[OBS_STATE].clone())
            batch[ACTION] = self.policy._pi_aloha_encode_actions_inv(batch[ACTION].clone())
        return batch

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return _step_mask(batch).sum()

    def reduce(self, losses: Tensor, batch: Mapping[str, Tensor], draws: int, per_row: bool) -> Tensor:
        mask = repeat_rows(_step_mask(batch), draws)
        losses = scale_to_robot_dims(losses, batch, draws)
        losses, width = losses * mask[:, :, None], losses.shape[2]
        if not per_row and "row_weight" not in batch:
            total = batch[MEAN_COUNT] * draws if MEAN_COUNT in batch else mask.sum().clamp_min(1)
            return losses.sum() / (total * width)
        rows = losses.sum(dim=(1, 2)) / (mask.sum(dim=1) * width).clamp_min(1)
        if "row_weight" in batch:
            rows = rows * repeat_rows(batch["row_weight"], draws)
        return rows if per_row else rows.mean()

    def attentions(self, cameras: int, prompts: Iterable[int]) -> list[tuple[nn.Module, Shape]]:
        images, steps = image_tokens(self.policy.config, cameras), self.policy.config.chunk_size
        language, expert = self._pairs[0][0].self_attn, self.policy.model.vlm_with_expert.lm_expert.layers[0].self_attn
        attentions = []
        for prompt in prompts:
            length = images + prompt
            attentions += [
                (language, Shape("prefix", length, images, prompt, 0, self._prefix_trains)),
                (language, Shape("state", 1, images, prompt, 1, True)),
            ]
            if not all(self._crosses):
                attentions.append((expert, Shape("suffix", steps, images, prompt, 1 + steps, True, causal=True)))
            if any(self._crosses):
                attentions.append((expert, Shape("cross", steps, images, prompt, 1, True)))
        return attentions

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        static = self._prefix_trains and torch.is_grad_enabled()
        with torch.set_grad_enabled(static):
            hidden, mask = self._embed(batch)
        bias = torch.where(mask, 0.0, OPENPI_ATTENTION_MASK_VALUE)[:, None, None, :]
        state_bias, length = F.pad(bias, (0, 1)), mask.sum(dim=1, keepdim=True)
        rotation, state_rotation = self._rotation(mask.cumsum(dim=1) - 1), self._rotation(length)
        state = self.policy.model.state_proj(self.policy.prepare_state(batch))[:, None, :]
        keys_values = []
        for layer, _ in self._pairs[:-1]:
            with torch.set_grad_enabled(static):
                hidden, key, value = self._run(self._prefix_layer, layer, hidden, rotation, bias, self.attention)
            state, key, value = self._run(
                self._state_layer, layer, state, state_rotation, state_bias, key, value, self.attention
            )
            keys_values.append((key, value))
        last = self._pairs[-1][0]
        with torch.set_grad_enabled(static):
            key, value = keys_values_of(last, hidden, rotation)
        state_key, state_value = keys_values_of(last, state, state_rotation)
        keys_values.append((torch.cat([key, state_key], dim=2), torch.cat([value, state_value], dim=2)))
        return Prefix(keys_values, state_bias, length + 1)

    def velocity(self, noisy_actions: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        core, config = self.policy.model, self.policy.config
        actions = core.action_in_proj(noisy_actions)
        embedded_time = create_sinusoidal_pos_embedding(
            time, actions.shape[2], config.min_period, config.max_period, device=time.device
        ).to(actions.dtype)
        with_time = torch.cat([actions, embedded_time[:, None, :].expand_as(actions)], dim=2)
        hidden = core.action_time_mlp_out(F.silu(core.action_time_mlp_in(with_time)))

        steps, draws = hidden.shape[1], len(time) // len(prefix.length)
        place = torch.arange(steps, device=hidden.device)
        later = torch.where(place[:, None] < place, OPENPI_ATTENTION_MASK_VALUE, 0.0)
        prefix_bias = repeat_rows(prefix.bias, draws)
        self_bias = torch.cat([prefix_bias.expand(-1, -1, steps, -1), later.expand(len(prefix_bias), 1, -1, -1)], dim=3)
        rotation = self._rotation(repeat_rows(prefix.length + place, draws))
        cross_rotation = self._rotation(place[None])
        for (_, expert), crosses, (key, value) in zip(self._pairs, self._crosses, prefix.keys_values, strict=True):
            if expert is None:
                continue
            function, expert_rotation, bias = self._suffix_layer, rotation, self_bias
            if crosses:
                function, expert_rotation, bias = self._cross_layer, cross_rotation, prefix_bias
            hidden = self._run(function, expert, hidden, expert_rotation, bias, key, value, self.attention)
        return core.action_out_proj(core.vlm_with_expert.lm_expert.norm(hidden).to(torch.float32))

    def _embed(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return embeddings of images and words (B, P - 1, width), and which tokens are valid, bool (B, P - 1)."""
        policy, core = self.policy, self.policy.model.vlm_with_expert
        cameras = [key for key in policy.config.image_features if key in batch]
        images = policy.prepare_images(batch)[0][: len(cameras)]  # LeRobot appends blank images
        same = len({image.shape[1:] for image in images}) == 1
        features = self._embed_images(torch.cat(images)).chunk(len(images)) if same else map(self._embed_images, images)
        embedded = dict(zip(cameras, features, strict=True))
        words = core.embed_language_tokens(batch[OBS_LANGUAGE_TOKENS])
        words, rows = words * words.shape[2] ** 0.5, len(words)
        pieces: list[Tensor] = []
        # LeRobot appends blank images for `empty_cameras` of the absent cameras: only their marks are attended to.
        blank = min(policy.config.empty_cameras, len(policy.config.image_features) - len(cameras))
        for image in (*(embedded[key] for key in cameras), *[words[:, :0]] * blank):
            pieces.append(image)
            if policy.config.add_image_special_tokens:
                start, end = core.embed_language_tokens(self.marks).expand(rows, -1, -1).split([2, 1], dim=1)
                pieces[-1:] = [start, image, end]
        hidden = torch.cat([*pieces, words], dim=1)
        mask = F.pad(batch[OBS_LANGUAGE_ATTENTION_MASK], (hidden.shape[1] - words.shape[1], 0), value=True)
        marks = MARKS_PER_IMAGE * policy.config.add_image_special_tokens
        mask_absent(mask, batch, {key: embedded[key].shape[1] + marks for key in cameras})
        return hidden, mask

    def _embed_images(self, images: Tensor) -> Tensor:
        """Compute LeRobot's `embed_image` layer by layer, scaled for the language model: (N, tokens, width)."""
        vlm = self.policy.model.vlm_with_expert.get_vlm_model()
        vision: Any = vlm.vision_model
        patches = vision.embeddings.patch_embedding(images.to(vision.embeddings.patch_embedding.weight.dtype))
        rows, columns = patches.shape[2:]
        places = patch_places(rows, columns, vision.embeddings.num_patches_per_side, patches.device)
        # The convolution leaves a transposed view, whose memory layout every layer would keep.
        hidden = patches.flatten(2).transpose(1, 2).contiguous() + vision.embeddings.position_embedding(places)
        for layer in vision.encoder.layers:
            hidden = self._run(self._vision_layer, layer, hidden)
        features = vlm.connector(vision.post_layernorm(hidden))
        return features * torch.tensor(features.shape[2] ** 0.5, dtype=features.dtype)  # on the CPU, as a number

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines float32 (B, 1, tokens, head_dim) of the rotary embedding at int64 (B, tokens)."""
        width = self._pairs[0][0].self_attn.head_dim
        exponents = (2.0 / width) * torch.arange(width // 2, dtype=torch.float32, device=positions.device)
        angles = positions[:, None, :, None].to(torch.float32) / MAX_WAVELENGTH**exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _step_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mask of unpadded action steps of readable rows, bool (B, T)."""
    mask = torch.ones_like(batch[ACTION][:, :, 0], dtype=torch.bool)
    if "action_is_pad" in batch:
        mask = ~batch["action_is_pad"]
    return mask & batch["is_read"][:, None] if "is_read" in batch else mask


def patch_places(rows: int, columns: int, side: int, device: torch.device) -> Tensor:
    """Return the index of each patch in the position embedding of side * side entries, int64 (rows * columns,).

    Equals `SmolVLMVisionEmbeddings.forward` of transformers 5.5 for an image without padding, roundings included.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side, device=device)

    def bucket(patches: int) -> Tensor:
        step = 1.0 / torch.full((), patches, device=device)
        fractions = torch.arange(patches, device=device, dtype=torch.float32) * step
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)

    return (bucket(rows)[:, None] * side + bucket(columns)).flatten()


def _vision_layer(layer: nn.Module, hidden: Tensor) -> Tensor:
    return layer(hidden, attention_mask=None)


def _cross_layer(
    layer: Any,
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor],
    bias: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    attention: Kernel,
) -> Tensor:
    """Compute a cross-attention layer, whose keys and values are projections of the prefix's keys and values."""
    module, draws = layer.self_attn, len(hidden) // len(prefix_key)
    key, value = (
        repeat_rows(heads_of(projection, prefix_heads.transpose(1, 2).flatten(2), module), draws)
        for projection, prefix_heads in ((module.k_proj, prefix_key), (module.v_proj, prefix_value))
    )
    normed, _ = norm(layer.input_layernorm, hidden)
    attended = attend_rotated(module, normed, rotation, key, value, bias, attention)
    return finish_layer(layer, hidden, attended)


# --- the family -------------------------------------------------------------------------------------------

STATE_FROZEN, VISION_FROZEN = "state projection (train_state_proj=false)", "vision (freeze_vision_encoder)"
LAST_LAYERS = "the language model's last layers"


class SmolVLA(PI0):
    """SmolVLA, whose inputs are PI0's: images, a prompt and the state."""

    loss_class = SmolVLALoss
    train_options = frozenset({"exact_mean", "noise_draws", "attention", "activation_checkpointing", "compile"})
    ignored_options = {
        "train_expert_only": "--train.mode: expert, or full",
        "compile_model": "--train.compile",
        "compile_mode": "--train.compile",
    }

    def check_plan(self, config: Any, columns: Collection[str], folder: Path | None, forwards: int) -> list[str]:
        if reason := self.cannot_predict(config):
            raise ValueError(f"a '{self.type}' predicts nothing: {reason}")
        return []

    def cannot_predict(self, config: Any) -> str:
        return "" if config.use_cache else "LeRobot's code needs --policy.use_cache=true"

    def freezes(self, config: Any, training: Collection[str]) -> dict[str, bool]:
        """Return PI0's options; with adapters, also parts that the policy's options freeze are trained."""
        adapted = {VISION_FROZEN: "vision", LAST_LAYERS: "language model"}
        state = config.train_state_proj or STATE_FROZEN in training
        options = super().freezes(config, [adapted.get(part, part) for part in training])
        return {**options, "train_state_proj": state}

    def parts(self, policy: PreTrainedPolicy) -> Mapping[str, str]:
        """Assign parameters to heads, action expert, language model and vision, or to parts that every mode freezes.

        With `freeze_vision_encoder`, LeRobot's default, `full` also freezes the vision tower. LeRobot always freezes
        the last one or two layers of the language model. The loss uses only keys and values of the last used layer.
        """
        core, config = policy.model.vlm_with_expert, policy.config
        depth, count = core.num_vlm_layers, core.num_expert_layers
        multiple = depth // count
        last_used = (depth - 1) // multiple * multiple
        frozen = {depth - 1, *([depth - 2] if depth != count and depth % count == 0 else [])}
        language = "model.vlm_with_expert.vlm.model.text_model."
        last = f"{language}layers.{last_used}."
        never = ("self_attn.q_proj.", "self_attn.o_proj.", "post_attention_layernorm.", "mlp.")
        unused = (
            "model.vlm_with_expert.vlm.lm_head.",
            f"{language}norm.",
            *(f"{last}{module}" for module in never),
            *(f"{language}layers.{number}." for number in range(last_used + 1, depth)),
        )
        prefixes = (
            *((prefix, UNUSED) for prefix in unused),
            ("model.state_proj.", "heads" if config.train_state_proj else STATE_FROZEN),
            *((f"model.{module}.", "heads") for module in self.heads),
            ("model.vlm_with_expert.lm_expert.", "action expert"),
            *((f"{language}layers.{number}.", LAST_LAYERS) for number in frozen),
            (language, "language model"),
            ("model.vlm_with_expert.vlm.model.connector.", "language model"),
            (
                "model.vlm_with_expert.vlm.model.vision_model.",
                VISION_FROZEN if config.freeze_vision_encoder else "vision",
            ),
        )
        return parts_by_prefix(policy, prefixes)

    def draw(self, config: PreTrainedConfig, rows: int, seed: int, step: int, device: torch.device | str) -> Draws:
        return sample_noise_and_time(config, rows, seed, step, device, TIMES)

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def prompt_lengths(self, config: Any, cameras: int) -> tuple[int, ...]:
        images, steps = image_tokens(config, cameras), self.before_actions + config.chunk_size
        return prompt_lengths(config.tokenizer_max_length, images, steps)

    def image_sizes(self, config: Any) -> list[tuple[int, int]]:
        return image_sizes(config)

    def without_downloads(self, config: Any) -> Any:
        config.load_vlm_weights = False
        return config

    def tokens(self, config: Any, cameras: int, draws: int = 1, prompt: int | None = None) -> int:
        language = config.tokenizer_max_length if prompt is None else prompt
        return image_tokens(config, cameras) + language + self.before_actions + draws * config.chunk_size


def image_sizes(config: Any) -> list[tuple[int, int]]:
    """Return (height, width) of each camera's images in the vision tower."""
    cameras = len(config.image_features) or 1
    if config.resize_imgs_with_padding is not None:
        width, height = config.resize_imgs_with_padding
        return [(height, width)] * cameras
    return [tuple(feature.shape[1:]) for feature in config.image_features.values()]


def image_tokens(config: Any, cameras: int) -> int:
    """Count the positions of the images of `cameras` cameras in the language model, with their marks.

    LeRobot appends blank images for `empty_cameras` of the absent cameras: their marks count, their patches do not.
    """
    sizes = (image_sizes(config) * cameras)[:cameras]
    blank = max(0, min(config.empty_cameras, len(config.image_features) - cameras))
    marks = MARKS_PER_IMAGE * config.add_image_special_tokens * (cameras + blank)
    return sum(_tokens(config, size) for size in sizes) + marks


def _tokens(config: Any, size: tuple[int, int]) -> int:
    """Count the tokens of an image of size (height, width); several patches become one token."""
    backbone = _backbone(config.vlm_model_name)
    patch = backbone.vision_config.patch_size
    return (size[0] // patch) * (size[1] // patch) // backbone.scale_factor**2


@cache
def _backbone(model: str) -> Any:
    return AutoConfig.from_pretrained(model)


FAMILIES = (SmolVLA("smolvla", as_lerobot=True, chunk_draws="noise", tokenizer_option="vlm_model_name"),)
