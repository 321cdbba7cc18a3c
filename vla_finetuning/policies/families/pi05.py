"""PI0.5 as a family: its loss, its trainable parts and its token counts.

`PI05Loss` gives the loss and gradients of LeRobot's `PI05Policy.forward`. It calls LeRobot's layers in another order
and skips work that the loss does not need:

* Image and language tokens (the *prefix*) attend to no action token (the *suffix*). So the prefix runs first, and the
  suffix attends to its keys and values. If nothing before the action expert trains, the prefix runs without autograd.
* The loss uses only keys and values of the prefix's last layer. The rest of that layer is not computed, and
  `choose_trainable` freezes its weights and the two language heads.
* LeRobot masks a camera that is not in the batch; here it has no tokens. A camera that only some rows lack is masked in
  these rows.
* No value is read from the device, and none is copied to it.
* Attention stores no attention weights and does not repeat the single key-value head (`attention`).
* Backward recomputes half of the widest tensors of the MLPs (`recompute`). A tensor that several matrix products
  read is cast once.

Legend: B batch, K draws of noise and time per row, T chunk, A action, L language tokens, P prefix tokens.
"""

import contextlib
import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
from lerobot.policies.pi_gemma import PiGemmaRMSNorm, _gated_residual
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import (
    ACTION,
    OBS_IMAGES,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OBS_STATE,
    OPENPI_ATTENTION_MASK_VALUE,
)
from torch import Tensor, nn

from util import Draws
from vla_finetuning.policies.attention import Kernel, Shape, attend
from vla_finetuning.policies.family import MAX_DELAY, UNUSED, Family, LossClass, parts_by_prefix
from vla_finetuning.policies.flow import FlowLoss, repeat_rows, sample_noise_and_time
from vla_finetuning.policies.layers import heads_of, mask_absent, rotated
from vla_finetuning.policies.prompts import prompt_lengths
from vla_finetuning.policies.recompute import feed_forward

# Default of transformers, which LeRobot 0.6.1 uses.
SIGLIP_PATCH = 14

# --- the loss ---------------------------------------------------------------------------------------------


@dataclass
class Prefix:
    """Inputs of the action expert from images and language.

    Attributes:
        keys_values: keys and values of each layer, (B, KV heads, P, head_dim); keys with rotary embeddings.
        bias: float32 (B, 1, 1, P), added to attention scores: 0 for valid tokens, else a large negative number.
        length: int64 (B, 1), number of valid tokens.
        state: float32 (B, max_state_dim), if the expert takes the state as a token.
    """

    keys_values: list[tuple[Tensor, Tensor]]
    bias: Tensor
    length: Tensor
    state: Tensor | None = None


class PI05Loss(FlowLoss):
    """PI0.5's loss; construct it after `choose_trainable`, which decides whether the prefix needs gradients.

    Args: as for `FlowLoss`; `gradient_checkpointing` of the configuration also enables `checkpointing`.
    Attributes:
        before_actions: number of suffix tokens before the actions; these tokens attend to no action.
    """

    before_actions = 0

    def __init__(self, policy: PreTrainedPolicy, *, checkpointing: bool = False, **options: Any):
        super().__init__(policy, checkpointing=checkpointing or policy.config.gradient_checkpointing, **options)
        paligemma = policy.model.paligemma_with_expert.paligemma
        self._prefix_trains = any(parameter.requires_grad for parameter in paligemma.parameters())
        # Read before FSDP2 shards the weights: it may gather float32 weights in bfloat16.
        self._prefix_dtype, self._suffix_dtype = (
            torch.bfloat16 if projection.weight.dtype == torch.bfloat16 else None
            for projection in (
                paligemma.model.language_model.layers[0].self_attn.k_proj,
                policy.model.paligemma_with_expert.gemma_expert.model.layers[0].self_attn.q_proj,
            )
        )
        self._vision_layer, self._prefix_layer = self._compiled(_vision_layer), self._compiled(prefix_layer)
        self._last_keys_values, self._suffix_layer = self._compiled(keys_values_of), self._compiled(suffix_layer)

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        with torch.set_grad_enabled(self._prefix_trains and torch.is_grad_enabled()):
            return self._run_prefix(batch)

    @property
    def _language_model(self) -> Any:
        return self.policy.model.paligemma_with_expert.paligemma.model.language_model

    @torch.no_grad()
    def write(self, batch: Mapping[str, Tensor], begin: int, end: int, most: int) -> Tensor:
        """Generate a text for each row by greedy decoding with a key-value cache: int64 (B, N), N at most `most`.

        The output head is the word embedding, which training on texts trains.

        Args:
            begin, end: tokens before and after a text; `end` also fills the rest of a row.
        """
        language_model = self._language_model
        embedding = language_model.embed_tokens
        prefix = self.prefix(self.images(batch))
        keys_values, bias = prefix.keys_values, prefix.bias
        word, texts = torch.full_like(prefix.length, begin), torch.empty_like(prefix.length[:, :0])
        for number in range(most):
            hidden = embedding(word)
            hidden = hidden.to(self._prefix_dtype or hidden.dtype)
            rotation, bias, extended = self._rotation(hidden, prefix.length + number), F.pad(bias, (0, 1)), []
            for layer, (key, value) in zip(language_model.layers, keys_values, strict=True):
                hidden, key, value = later_layer(layer, hidden, rotation, bias, key, value, self.attention)
                extended.append((key, value))
            keys_values = extended
            hidden, _ = norm(language_model.norm, hidden)
            word = F.linear(hidden, embedding.weight.to(hidden.dtype)).float().argmax(dim=-1)
            if number:
                word = word.masked_fill(texts[:, -1:] == end, end)
            texts = torch.cat([texts, word], dim=1)
            if (word == end).all():
                break
        return texts

    def value_layers(self) -> list[tuple[int, int]]:
        attentions = [layer.self_attn for layer in self._language_model.layers]
        return [(module.k_proj.out_features // module.head_dim, module.head_dim) for module in attentions]

    def layers(self) -> Iterable[nn.Module]:
        vlm = self.policy.model.paligemma_with_expert
        return (
            *vlm.paligemma.model.vision_tower.vision_model.encoder.layers,
            *self._language_model.layers[:-1],  # only keys and values of the last layer are computed
            *vlm.gemma_expert.model.layers,
        )

    def attentions(self, cameras: int, prompts: Iterable[int]) -> list[tuple[nn.Module, Shape]]:
        vlm = self.policy.model.paligemma_with_expert
        language, expert = self._language_model.layers[0], vlm.gemma_expert.model.layers[0]
        before = self.before_actions
        images, steps = cameras * image_tokens(self.policy.config), before + self.policy.config.chunk_size
        return [
            attention
            for prompt in prompts
            for attention in (
                (language.self_attn, Shape("prefix", images + prompt, images, prompt, 0, self._prefix_trains)),
                (expert.self_attn, Shape("suffix", steps, images, prompt, steps, True, before)),
            )
        ]

    def _run_prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        # LeRobot also masks the queries of padded tokens, whose results are never read.
        cameras = [key for key in self.policy.config.image_features if key in batch]
        embedded = {key: batch[key] for key in cameras if batch[key].ndim == 3} or self.features(batch)
        words = self.policy.model.paligemma_with_expert.embed_language_tokens(batch[OBS_LANGUAGE_TOKENS])
        hidden = torch.cat([*(embedded[key] for key in cameras), words], dim=1)
        hidden = hidden.to(self._prefix_dtype or hidden.dtype)

        mask = F.pad(batch[OBS_LANGUAGE_ATTENTION_MASK], (hidden.shape[1] - words.shape[1], 0), value=True)
        mask_absent(mask, batch, {key: embedded[key].shape[1] for key in cameras})
        bias = torch.where(mask, 0.0, OPENPI_ATTENTION_MASK_VALUE)[:, None, None, :]
        rotation = self._rotation(hidden, torch.cumsum(mask, dim=1) - 1)
        keys_values, recompute = [], not self._checkpointing
        *layers, last = self._language_model.layers
        for layer in layers:
            hidden, key, value = self._run(self._prefix_layer, layer, hidden, rotation, bias, self.attention, recompute)
            keys_values.append((key, value))
        keys_values.append(self._call(self._last_keys_values, last, hidden, rotation))
        return Prefix(keys_values, bias, mask.sum(dim=1, keepdim=True))

    def features(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute image features by vision tower and projector, the inputs of the language model, by camera.

        The loss and predictions take a camera's features, (N, tokens, width), in place of its images.
        """
        cameras = [key for key in self.policy.config.image_features if key in batch]
        # LeRobot appends blank images for absent cameras.
        images = self.policy._preprocess_images(batch)[0][: len(cameras)]
        embedded = self._embed_images(torch.cat(images)).split(len(images[0]))
        return dict(zip(cameras, embedded, strict=True))

    def _embed_images(self, images: Tensor) -> Tensor:
        """Compute LeRobot's `embed_image` layer by layer: float32 (N, 3, H, W) to (N, tokens, width)."""
        paligemma = self.policy.model.paligemma_with_expert.paligemma.model
        vision = paligemma.vision_tower.vision_model
        # The convolution leaves a transposed view. Without `contiguous` every layer would keep that memory layout, and
        # every norm and residual would copy (transformers 5.5).
        hidden = vision.embeddings(images).contiguous()
        for layer in vision.encoder.layers:
            hidden = self._run(self._vision_layer, layer, hidden, not self._checkpointing)
        return paligemma.multi_modal_projector(vision.post_layernorm(hidden)).to(images.dtype)

    def velocity(self, noisy_actions: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        core = self.policy.model
        expert = core.paligemma_with_expert.gemma_expert.model
        config = self.policy.config
        embedded_time = create_sinusoidal_pos_embedding(
            time.flatten(), core.action_in_proj.out_features, config.min_period, config.max_period, device=time.device
        )
        embedded_time = embedded_time.to(time.dtype).unflatten(0, time.shape)
        with in_float32(noisy_actions):
            hidden, condition = self._suffix_tokens(noisy_actions, embedded_time, prefix)
        hidden = hidden.to(self._suffix_dtype or hidden.dtype)

        steps, draws = hidden.shape[1], len(time) // len(prefix.length)
        positions = prefix.length + torch.arange(steps, device=hidden.device)
        rotation = self._rotation(hidden, repeat_rows(positions, draws))
        bias = repeat_rows(self._suffix_bias(prefix, steps), draws)
        settings = self.attention, not self._checkpointing, condition
        for layer, (key, value) in zip(expert.layers, prefix.keys_values, strict=True):
            hidden = self._run(self._suffix_layer, layer, hidden, rotation, bias, key, value, *settings)
        hidden, _ = norm(expert.norm, hidden, condition)
        with in_float32(hidden):
            return core.action_out_proj(hidden[:, self.before_actions :].to(torch.float32))

    def _suffix_tokens(
        self, noisy_actions: Tensor, embedded_time: Tensor, prefix: Prefix
    ) -> tuple[Tensor, Tensor | None]:
        """Return the expert's input tokens (B*K, tokens, width) and its norms' condition (B*K, [tokens,] width)."""
        core = self.policy.model
        condition = F.silu(core.time_mlp_out(F.silu(core.time_mlp_in(embedded_time))))
        return core.action_in_proj(noisy_actions), condition

    def _suffix_bias(self, prefix: Prefix, tokens: int) -> Tensor:
        """Return the attention bias of the suffix, float32 (B, 1, 1, P + tokens); its tokens see each other."""
        return F.pad(prefix.bias, (0, tokens))

    def _rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, 1, tokens, head_dim) of the rotary embedding at these positions."""
        dtype = _autocast_dtype(hidden) or hidden.dtype
        rotary = self._language_model.rotary_emb
        # Gemma's code is a matrix product, which `set_float32_matmul_precision("high")` computes in TF32: wrong by 0.2
        # rad at position 900 (transformers 5.5, #48428).
        angles = positions[:, None, :, None].float() * rotary.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        cosines, sines = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        return cosines.to(dtype), sines.to(dtype)


# SmolVLA uses these functions too. `recompute`: whether backward recomputes activations of the MLP (`feed_forward`).


def _vision_layer(layer: Any, hidden: Tensor, recompute: bool) -> Tensor:
    normed = cast_for(layer.layer_norm1(hidden), layer.self_attn.q_proj)
    hidden = hidden + layer.self_attn(normed, attention_mask=None)[0]
    normed = cast_for(layer.layer_norm2(hidden), layer.mlp.fc1)
    return hidden + (feed_forward(layer.mlp, normed) if recompute else layer.mlp(normed))


def prefix_layer(
    layer: Any,
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor],
    bias: Tensor,
    attention: Kernel,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a layer of the language model from hidden (B, P, width): return hidden, keys and values."""
    normed, _ = norm(layer.input_layernorm, hidden)
    normed = cast_for(normed, layer.self_attn.q_proj)
    key, value = _keys_values(layer.self_attn, normed, rotation)
    attended = attend_rotated(layer.self_attn, normed, rotation, key, value, bias, attention)
    return finish_layer(layer, hidden, attended, recompute), key, value


def keys_values_of(layer: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    normed = cast_for(norm(layer.input_layernorm, hidden)[0], layer.self_attn.k_proj)
    return _keys_values(layer.self_attn, normed, rotation)


def suffix_layer(layer: Any, hidden: Tensor, *inputs: Any) -> Tensor:
    return later_layer(layer, hidden, *inputs)[0]


def later_layer(
    layer: Any,
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor],
    bias: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    attention: Kernel,
    recompute: bool = False,
    condition: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a layer for tokens after the prefix, which attend to the prefix and to each other.

    Args:
        hidden: (B*K, T, width).
        prefix_key, prefix_value: (B, KV heads, P, head_dim).
        condition: condition of the norms of PI0.5's action expert, (B*K, width).
    Returns:
        hidden, and keys and values of prefix and tokens (B*K, KV heads, P + T, head_dim).
    """
    normed, gate = norm(layer.input_layernorm, hidden, condition)
    normed = cast_for(normed, layer.self_attn.q_proj)
    key, value = _keys_values(layer.self_attn, normed, rotation)
    draws = len(hidden) // len(prefix_key)
    key = torch.cat([repeat_rows(prefix_key, draws), key], dim=2)
    value = torch.cat([repeat_rows(prefix_value, draws), value], dim=2)
    attended = attend_rotated(layer.self_attn, normed, rotation, key, value, bias, attention)
    return finish_layer(layer, hidden, attended, recompute, gate, condition), key, value


def norm(layer: Any, hidden: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Normalise; compute `PiGemmaRMSNorm` by `F.rms_norm`.

    `F.rms_norm` is one CUDA kernel in place of LeRobot's seven and saves only its input for backward.

    Args:
        hidden: (N, tokens, width).
        condition: (N, width), or (N, tokens, width).
    Returns:
        The normalised tensor in the dtype of `hidden`; and with a condition the gate of the residual, else None.
    """
    if not isinstance(layer, PiGemmaRMSNorm):
        return layer(hidden), None
    if condition is None:
        normed = F.rms_norm(hidden.float(), (layer.dim,), 1.0 + layer.weight.float(), layer.eps)
        return normed.type_as(hidden), None
    modulation = layer.dense(condition)
    scale, shift, gate = (modulation[:, None] if modulation.ndim == 2 else modulation).chunk(3, dim=-1)
    normed = F.rms_norm(hidden.float(), (layer.dim,), None, layer.eps) * (1 + scale.float()) + shift.float()
    return normed.type_as(hidden), gate.to(hidden.dtype)


def _keys_values(module: Any, normed: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rotated(heads_of(module.k_proj, normed, module), rotation), heads_of(module.v_proj, normed, module)


def attend_rotated(module: Any, normed: Tensor, rotation: tuple[Tensor, Tensor], *tail: Any) -> Tensor:
    """Compute attention of `normed` (B, tokens, width): (B, tokens, heads * head_dim). tail: arguments of `attend`."""
    return attend(module, rotated(heads_of(module.q_proj, normed, module), rotation), *tail)


def finish_layer(
    layer: Any,
    hidden: Tensor,
    attended: Tensor,
    recompute: bool = False,
    gate: Tensor | None = None,
    condition: Tensor | None = None,
) -> Tensor:
    projected = layer.self_attn.o_proj(cast_for(attended, layer.self_attn.o_proj))
    hidden = _gated_residual(hidden, projected, gate)
    normed, gate = norm(layer.post_attention_layernorm, hidden, condition)
    normed = cast_for(normed, layer.mlp.up_proj)
    return _gated_residual(hidden, feed_forward(layer.mlp, normed) if recompute else layer.mlp(normed), gate)


def cast_for(hidden: Tensor, projection: Any) -> Tensor:
    """Cast `hidden` once to the dtype in which several linear layers multiply it.

    Autocast would cast it for each layer and save each result for backward.
    """
    return hidden.to(_autocast_dtype(hidden) or projection.weight.dtype)


def in_float32(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast in the block: openpi computes the projections of actions and time in float32.

    Their inputs are the noise of the action itself, and their products are small.
    """
    autocasts = _autocast_dtype(tensor) is not None
    return torch.autocast(tensor.device.type, enabled=False) if autocasts else contextlib.nullcontext()


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of the active autocast on the tensor's device; None if autocast is off."""
    device_type = tensor.device.type
    # The meta device, on which operations are counted, has no autocast.
    on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


# --- the family -------------------------------------------------------------------------------------------


class PI05(Family):
    """PI0.5 and the demo's tiny policy: every feature but exact means."""

    loss_class: ClassVar[LossClass] = PI05Loss
    modes = {
        "heads": frozenset({"heads"}),
        "expert": frozenset({"heads", "action expert"}),
        "full": frozenset({"heads", "action expert", "language model", "vision"}),
    }
    train_options = frozenset({"mask_padding", "noise_draws", "attention", "activation_checkpointing", "compile"})
    ignored_options = {
        "train_expert_only": "--train.mode expert",
        "freeze_vision_encoder": "--train.mode heads or expert, in which the whole backbone is frozen",
        "compile_model": "--train.compile",
        "compile_mode": "--train.compile",
        "gradient_checkpointing": "--train.activation_checkpointing",
    }
    row_losses = flow = masks_cameras = fits_images = from_config = True
    # Modules of the part "heads"; number of suffix tokens before the actions.
    heads: ClassVar[tuple[str, ...]] = ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out")
    before_actions: ClassVar[int] = 0

    def freezes(self, config: Any, training: Collection[str]) -> dict[str, bool]:
        backbone = {"language model", "vision"}
        return {"train_expert_only": backbone.isdisjoint(training), "freeze_vision_encoder": "vision" not in training}

    def parts(self, policy: PreTrainedPolicy) -> Mapping[str, str]:
        """Assign parameters to heads, action expert, language model and vision.

        Training uses neither the two language heads nor the language model's final norm. Of its last layer it uses only
        the key and value projections and their norm. (LeRobot's AdamW decays that layer's unused `q_proj`.)
        """
        language = "model.paligemma_with_expert.paligemma.model.language_model."
        depth = len(policy.model.paligemma_with_expert.paligemma.model.language_model.layers)
        last = f"{language}layers.{depth - 1}."
        unused = (
            "model.paligemma_with_expert.paligemma.lm_head.",
            "model.paligemma_with_expert.gemma_expert.lm_head.",
            f"{language}norm.",
            f"{last}self_attn.q_proj.",
            f"{last}self_attn.o_proj.",
            f"{last}post_attention_layernorm.",
            f"{last}mlp.",
        )
        prefixes = (
            *((prefix, UNUSED) for prefix in unused),
            *((f"model.{module}.", "heads") for module in self.heads),
            ("model.paligemma_with_expert.gemma_expert.", "action expert"),
            (language, "language model"),
            ("model.paligemma_with_expert.paligemma.model.", "vision"),
        )
        return parts_by_prefix(policy, prefixes)

    def draw(self, config: PreTrainedConfig, rows: int, seed: int, step: int, device: torch.device | str) -> Draws:
        return sample_noise_and_time(config, rows, seed, step, device)

    def prompt_lengths(self, config: Any, cameras: int) -> tuple[int, ...]:
        steps = self.before_actions + config.chunk_size
        return prompt_lengths(config.tokenizer_max_length, cameras * image_tokens(config), steps)

    def own_keys(self, policy: PreTrainedPolicy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename keys as LeRobot's `PI05Policy.from_pretrained` does.

        Published checkpoints store the word embedding only under the name of the tied language head, from which LeRobot
        copies it. LeRobot does so even if the file has both names, and the file's order decides. Here the embedding's
        own weights win.
        """

        def prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {key if key.startswith("model.") else f"model.{key}": tensor for key, tensor in tensors.items()}

        # LeRobot's function does not change these keys, but warns about each in every process.
        plain = {key: tensor for key, tensor in weights.items() if "patch_embedding" in key}
        rest = {key: tensor for key, tensor in weights.items() if key not in plain}
        renamed = prefixed({**policy._fix_pytorch_state_dict_keys(rest, policy.config), **plain})
        return {**renamed, **{key: tensor for key, tensor in prefixed(weights).items() if key in renamed}}

    def image_sizes(self, config: Any) -> list[tuple[int, int]]:
        """Return (height, width) of each camera's input of the vision tower; one pair for all."""
        return [config.image_resolution]

    def with_cameras(self, config: Any, cameras: int, prompt: int | None = None) -> Any:
        config = self.without_downloads(copy.deepcopy(config))
        config.tokenizer_max_length = config.tokenizer_max_length if prompt is None else prompt
        sizes = (self.image_sizes(config) * cameras)[:cameras]
        images = {f"{OBS_IMAGES}.{i}": PolicyFeature(FeatureType.VISUAL, (3, *size)) for i, size in enumerate(sizes)}
        state = {key: feature for key, feature in (config.input_features or {}).items() if key == OBS_STATE}
        config.input_features = images | state
        config.empty_cameras = 0
        config.gradient_checkpointing = config.compile_model = False
        return config

    def empty_inputs(
        self, config: Any, rows: int, draws: int, device: torch.device | str
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return a batch, and noise (B*K, T, max_action_dim) and time (B*K, [T, 2]) as of `sample_noise_and_time`."""
        with torch.device(device):
            tokens = (rows, config.tokenizer_max_length)
            batch = {key: torch.empty(rows, *image.shape) for key, image in config.image_features.items()}
            batch[OBS_LANGUAGE_TOKENS] = torch.empty(tokens, dtype=torch.int64)
            batch[OBS_LANGUAGE_ATTENTION_MASK] = torch.empty(tokens, dtype=torch.bool)
            batch[ACTION] = torch.empty(rows, config.chunk_size, config.output_features[ACTION].shape[0])
            return (
                batch,
                torch.empty(rows * draws, config.chunk_size, config.max_action_dim),
                torch.empty(rows * draws, *((config.chunk_size, 2) if getattr(config, MAX_DELAY, 0) else ())),
            )

    def tokens(self, config: Any, cameras: int, draws: int = 1, prompt: int | None = None) -> int:
        language = config.tokenizer_max_length if prompt is None else prompt
        return cameras * image_tokens(config) + language + draws * (self.before_actions + config.chunk_size)


def image_tokens(config: Any) -> int:
    patch = getattr(config, "patch_size", SIGLIP_PATCH)  # the tiny policy has its own
    return (config.image_resolution[0] // patch) * (config.image_resolution[1] // patch)


FAMILIES = (PI05("pi05", as_lerobot=True, chunk_draws="noise", tokenizer="google/paligemma-3b-pt-224"),)
