"""The training objective: LeRobot's PI0.5 loss with nothing computed that the loss does not need.

`PolicyLoss` is the module that a training loop wraps in DDP and calls. For PI0.5 (`PI05Policy` and what
derives from it) it calls LeRobot's own layers in an order of its own; loss and gradients are those of
`PI05Policy.forward`, and these things are left out:

* In PI0.5 no image or language token (the *prefix*) attends to an action token (the *suffix*). So the
  prefix runs alone, one layer after the other, and hands its keys and values to the suffix. Where nothing
  before the action expert trains, the prefix runs without autograd.
* Of the prefix's last layer only keys and values are ever used: its query, attention output, MLP and final
  norm are not computed, and `choose_trainable` freezes their weights along with the two language heads.
* A camera that is not in the batch is masked out of every attention in LeRobot: here its tokens do not exist.
* Nothing is read back from the device and nothing is copied to it: noise and times come in as arguments,
  masks are made from the batch on the device, and no dictionary of Python numbers is built.
* Attention weights need not be stored: PyTorch's fused attention gives the same result (`attention`).

Everything here runs in the training worker. Legend: B batch, K draws of noise and time per row, T chunk, A action,
L language tokens, P prefix tokens.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.policies.pi_gemma import _gated_residual, layernorm_forward
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import (
    ACTION,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    OPENPI_ATTENTION_MASK_VALUE,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING
from transformers.models.gemma.modeling_gemma import rotate_half

from vla_finetuning.policies.attention import Kernel, Shape, attend
from vla_finetuning.policies.processors import DeviceHalf, normalization_mode

# --- noise and time ---------------------------------------------------------------------------------------


def sample_noise_and_time(
    config: PreTrainedConfig, global_batch_size: int, seed: int, step: int, device: torch.device | str
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Draw the flow matching noise and times of one optimizer step, for all its rows.

    They depend on (seed, step, global batch size) alone, so every worker can draw them all and take its
    rows, and the run does not change with the number of workers or accumulation steps that share a global
    batch. Drawn on the device, without a host sync; CPU and CUDA generators give different numbers.

    Args:
        config: the policy's; gives T, the padded action width and the distribution of the time, which is LeRobot's
            (`PI05Pytorch.sample_time`): `Beta(alpha, beta) * scale + offset`.
        global_batch_size: rows of the step, G.
    Returns:
        noise float32 (G, T, max_action_dim), standard normal; time float32 (G,). For other policies than
        PI0.5, which draw what they need themselves, None and None.
    """
    if not isinstance(config, PI05Config):
        return None, None
    generator = torch.Generator(device=device)
    digest = hashlib.blake2b(struct.pack("<qq", seed, step), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    noise = torch.randn((global_batch_size, config.chunk_size, config.max_action_dim), **options)
    alpha, beta = config.time_sampling_beta_alpha, config.time_sampling_beta_beta
    if beta == 1.0:
        fraction = torch.rand((global_batch_size,), **options) ** (1.0 / alpha)  # the inverse of its CDF, x**alpha
    else:
        concentration = torch.empty((global_batch_size, 2), device=device)
        concentration[:, 0].fill_(alpha)
        concentration[:, 1].fill_(beta)
        fraction = torch._sample_dirichlet(concentration, generator=generator)[:, 0]
    return noise, fraction * config.time_sampling_scale + config.time_sampling_offset


# --- the loss ---------------------------------------------------------------------------------------------


def check_batch(batch: Mapping[str, Tensor], config: PreTrainedConfig) -> None:
    """Check the first batch of a run as it is about to enter `PolicyLoss`. Reads values from its device.

    Expects cameras uint8 (B, H, W, 3), or float32 (B, 3, H, W) and in [0, 1] unless the policy normalises
    images; `action` float32 (B, T, A) with the policy's T and A, finite; for PI0.5 tokens int64 (B, L) and
    their mask bool (B, L), of any L.

    Raises:
        ValueError: naming the key, what was found and what was expected.
    """

    def require(key: str, condition: bool, expected: str) -> None:
        if not condition:
            value = batch[key]
            raise ValueError(f"{key} is {value.dtype} {tuple(value.shape)}, expected {expected}")

    if ACTION not in batch:
        raise ValueError(f"the batch has no {ACTION!r}; its keys are {sorted(batch)}")
    rows = len(batch[ACTION])
    chunk, width = len(config.action_delta_indices or [0]), config.output_features[ACTION].shape[0]
    shape = (rows, chunk, width) if config.action_delta_indices is not None else (rows, width)
    action = batch[ACTION]
    require(ACTION, action.dtype == torch.float32 and tuple(action.shape) == shape, f"float32 {shape}")
    if not torch.isfinite(action).all():
        raise ValueError(f"{ACTION} holds values that are not finite; look at the dataset's actions and statistics")

    present = [key for key in config.image_features if key in batch]
    if config.image_features and not present:
        raise ValueError(f"the batch has none of the policy's cameras {list(config.image_features)}: {sorted(batch)}")
    plain = normalization_mode(config, FeatureType.VISUAL) is NormalizationMode.IDENTITY
    for key in present:
        image = batch[key]
        channels = {torch.uint8: -1, torch.float32: -3}.get(image.dtype)
        fits = channels is not None and image.ndim >= 4 and len(image) == rows and image.shape[channels] == 3
        require(key, fits, f"uint8 ({rows}, H, W, 3) or float32 ({rows}, 3, H, W)")
        if plain and image.dtype == torch.float32:
            low, high = image.min().item(), image.max().item()
            if not 0.0 <= low <= high <= 1.0:
                raise ValueError(f"{key} has values in [{low:g}, {high:g}], expected [0, 1]")

    if isinstance(config, PI05Config):
        # Prompts may have been cut (`prompts.cut_prompts`): mask and tokens alike.
        mask = batch.get(OBS_LANGUAGE_ATTENTION_MASK)
        shape = (rows, config.tokenizer_max_length if mask is None or mask.ndim != 2 else mask.shape[1])
        for key, dtype in ((OBS_LANGUAGE_TOKENS, torch.int64), (OBS_LANGUAGE_ATTENTION_MASK, torch.bool)):
            if key not in batch:
                raise ValueError(f"the batch has no {key!r}; its keys are {sorted(batch)}")
            require(key, batch[key].dtype == dtype and tuple(batch[key].shape) == shape, f"{dtype} {shape}")


@dataclass
class Prefix:
    """What the action expert needs of images and language.

    Attributes:
        keys_values: for each layer, keys and values (B, KV heads, P, head_dim), rotated.
        bias: float32 (B, 1, 1, P), added to attention scores: 0 where a token counts, else hugely negative.
        length: int64 (B, 1), tokens that count.
    """

    keys_values: list[tuple[Tensor, Tensor]]
    bias: Tensor
    length: Tensor


class PolicyLoss(nn.Module):
    """A policy's training loss as a module: what DDP wraps. Parameters are named `policy.` + LeRobot's names.

    For PI0.5 loss and gradients are those of `PI05Policy.forward` with the same noise and time. Gradients
    flow into images and language only if something there trains, which is decided at construction:
    `choose_trainable` first. Other policies: their own `forward`, whose loss is its first result; the options
    below that are for PI0.5 are refused.

    Args:
        policy: the policy, in train mode or not; PI0.5 has no dropout.
        images: makes floats of uint8 cameras; needed for policies that normalise images.
        mask_padding: leave padded action steps (`action_is_pad`) out of PI0.5's loss. They become zeros and
            still count in the mean's denominator, so that the loss of a batch is the mean of its
            micro-batches' losses. Off: they count as any other step, as in LeRobot's PI0.5 and openpi.
        attention: PI0.5's language model and expert attend as LeRobot computes it, or by PyTorch's
            `scaled_dot_product_attention`: equal up to rounding, without the weights in memory. May be changed later,
            to what `attention.choose_kernel` says.
        checkpointing: keep only what enters each of PI0.5's layers, and compute the layer again in backward. The
            same numbers from less memory. Also on if PI0.5's configuration asks for `gradient_checkpointing`.
        compile: what to make of a layer's function before it is used, e.g. a `compiling.Compiler`.
    """

    def __init__(
        self,
        policy: PreTrainedPolicy,
        *,
        images: DeviceHalf | None = None,
        mask_padding: bool = False,
        attention: Kernel = "eager",
        checkpointing: bool = False,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ):
        super().__init__()
        config = policy.config
        if images is None:
            if normalization_mode(config, FeatureType.VISUAL) is not NormalizationMode.IDENTITY:
                raise ValueError(f"this '{config.type}' policy normalises images: give a DeviceHalf as `images`")
            images = DeviceHalf(None, config)
        self._is_pi05 = isinstance(policy, PI05Policy)
        if not self._is_pi05:
            given = {"mask_padding": mask_padding, "checkpointing": checkpointing, "compile": compile is not None}
            for name, on in given.items():
                if on:
                    raise ValueError(f"{name} is for PI0.5; this policy is of type '{config.type}'")
        self.policy = policy
        self.images = images
        self.mask_padding = mask_padding
        self.attention = attention
        if self._is_pi05:
            paligemma = policy.model.paligemma_with_expert.paligemma
            self._prefix_trains = any(parameter.requires_grad for parameter in paligemma.parameters())
            self._checkpointing = checkpointing or config.gradient_checkpointing
            # Now, because FSDP2 may gather in bfloat16 what is float32 between steps.
            self._prefix_dtype, self._suffix_dtype = (
                torch.bfloat16 if projection.weight.dtype == torch.bfloat16 else None
                for projection in (
                    paligemma.model.language_model.layers[0].self_attn.k_proj,
                    policy.model.paligemma_with_expert.gemma_expert.model.layers[0].self_attn.q_proj,
                )
            )
            self._units: dict[nn.Module, Unit] = {}
            layers: list[Callable[..., Any]] = [_vision_layer, _prefix_layer, _suffix_layer]
            self._vision_layer, self._prefix_layer, self._suffix_layer = map(compile, layers) if compile else layers

    def forward(
        self,
        batch: Mapping[str, Tensor],
        noise: Tensor | None = None,
        time: Tensor | None = None,
        *,
        per_row: bool = False,
    ) -> Tensor:
        """Compute the mean loss of a batch as a 0-d float32 tensor on the device.

        Args:
            batch: as `check_batch` describes it, on the device of the policy. For `mask_padding` also
                `action_is_pad` bool (B, T). Optional: `row_weight` float32 (B,), what a row's loss is multiplied
                by; the mean's denominator stays the number of rows.
            noise, time: for PI0.5, rows of what `sample_noise_and_time` returns: float32 (B*K, T,
                max_action_dim) and float32 (B*K,), the K draws of a row one after the other. Images and language
                are computed once for all K, and the loss is the mean over the draws: another estimator of the
                same expectation than K = 1, with less variance per row. Other policies draw their own.
            per_row: of PI0.5, the loss of each draw of each row instead, float32 (B*K,), whose mean that is.
        Raises:
            ValueError: PI0.5 without noise or time, with draws that are no multiple of the rows, or without any
                camera in the batch.
        """
        batch = self.images(batch)
        if not self._is_pi05:
            return self.policy.forward(batch)[0]
        if noise is None or time is None:
            raise ValueError("PI0.5's loss needs noise and time; sample_noise_and_time draws them")
        actions = self.policy.prepare_action(batch)
        draws, rest = divmod(len(time), len(actions))
        if rest or not draws:
            raise ValueError(f"{len(time)} draws of noise and time for {len(actions)} rows: not the same for each row")
        actions = _repeat_rows(actions, draws)
        mix = time[:, None, None]
        noisy_actions = mix * noise + (1 - mix) * actions
        velocity = self.velocity(noisy_actions, time, self.prefix(batch))
        losses = F.mse_loss(noise - actions, velocity, reduction="none")
        losses = losses[:, :, : self.policy.config.output_features[ACTION].shape[0]]
        if self.mask_padding:
            losses = losses.masked_fill(_repeat_rows(batch["action_is_pad"], draws).unsqueeze(-1), 0.0)
        if "row_weight" in batch:
            losses = losses * _repeat_rows(batch["row_weight"], draws)[:, None, None]
        return losses.mean(dim=(1, 2)) if per_row else losses.mean()

    def prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """PI0.5: what the action expert needs of images (floats, as `images` makes them) and language."""
        with torch.set_grad_enabled(self._prefix_trains and torch.is_grad_enabled()):
            return self._run_prefix(batch)

    def velocity(self, noisy_actions: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """PI0.5: the velocity, noise - actions, at noisy actions float32 (B*K, T, max_action_dim) and time (B*K,)."""
        return self._run_suffix(noisy_actions, time, prefix)

    def make_units(self) -> list[nn.Module]:
        """Have each layer of PI0.5 in which something trains run inside of a module that holds its matrices: these.

        For hooks that gather and give up parameters around a layer (FSDP2's). A layer is not called as a module here,
        nor by LeRobot (0.6.1, #3767), so its own hooks never fire; those of modules in it would, in the middle of what
        is compiled. Names of parameters stay what they are. Other policies: none.
        """
        if self._is_pi05 and not self._units:
            vlm = self.policy.model.paligemma_with_expert
            # The language model's last layer is none: of it only keys and values are made.
            layers = (
                *vlm.paligemma.model.vision_tower.vision_model.encoder.layers,
                *vlm.paligemma.model.language_model.layers[:-1],
                *vlm.gemma_expert.model.layers,
            )
            for layer in layers:
                if any(parameter.requires_grad for parameter in layer.parameters()):
                    self._units[layer] = Unit(module for module in layer.modules() if isinstance(module, nn.Linear))
            self.units = nn.ModuleList(self._units.values())
        return list(self._units.values()) if self._is_pi05 else []

    def attentions(self, cameras: int, prompts: Iterable[int]) -> list[tuple[nn.Module, Shape]]:
        """PI0.5's attentions in steps with so many cameras and such prompts: a layer, and the shape it is given."""
        vlm = self.policy.model.paligemma_with_expert
        language, expert = vlm.paligemma.model.language_model.layers[0], vlm.gemma_expert.model.layers[0]
        images, steps = cameras * image_tokens(self.policy.config), self.policy.config.chunk_size
        return [
            attention
            for prompt in prompts
            for attention in (
                (language.self_attn, Shape("prefix", images + prompt, images, prompt, 0, self._prefix_trains)),
                (expert.self_attn, Shape("suffix", steps, images, prompt, steps, True)),
            )
        ]

    def _run_prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """Images and language through the vision tower and the language model.

        LeRobot also masks the rows of padded tokens, which nothing reads; masking their columns is enough.
        """
        vlm = self.policy.model.paligemma_with_expert
        language_model = vlm.paligemma.model.language_model
        cameras = [key for key in self.policy.config.image_features if key in batch]
        # Those present come first; LeRobot appends blank images for the others.
        images = self.policy._preprocess_images(batch)[0][: len(cameras)]
        rows = len(images[0])
        # One call for all cameras: the vision tower sees them as one batch of C*B images.
        embedded = self._embed_images(torch.cat(images))
        embedded = embedded.unflatten(0, (len(cameras), rows)).transpose(0, 1).flatten(1, 2)
        words = vlm.embed_language_tokens(batch[OBS_LANGUAGE_TOKENS])
        hidden = torch.cat([embedded, words], dim=1)
        hidden = hidden.to(self._prefix_dtype or hidden.dtype)

        counts = F.pad(batch[OBS_LANGUAGE_ATTENTION_MASK], (embedded.shape[1], 0), value=True)
        bias = torch.where(counts, 0.0, OPENPI_ATTENTION_MASK_VALUE)[:, None, None, :]
        rotation = self._rotation(hidden, torch.cumsum(counts, dim=1) - 1)
        keys_values = []
        for layer in language_model.layers[:-1]:
            hidden, key, value = self._run(self._prefix_layer, layer, hidden, rotation, bias, self.attention)
            keys_values.append((key, value))
        normed, _ = layernorm_forward(language_model.layers[-1].input_layernorm, hidden)
        keys_values.append(_keys_values(language_model.layers[-1].self_attn, normed, rotation))
        return Prefix(keys_values, bias, counts.sum(dim=1, keepdim=True))

    def _embed_images(self, images: Tensor) -> Tensor:
        """LeRobot's `embed_image`, layer by layer: float32 (N, 3, H, W) to (N, tokens, width)."""
        paligemma = self.policy.model.paligemma_with_expert.paligemma.model
        vision = paligemma.vision_tower.vision_model
        hidden = vision.embeddings(images)
        for layer in vision.encoder.layers:
            hidden = self._run(self._vision_layer, layer, hidden)
        return paligemma.multi_modal_projector(vision.post_layernorm(hidden)).to(images.dtype)

    def _run_suffix(self, noisy_actions: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """The action expert: noisy actions float32 (B*K, T, max_action_dim) to velocities of the same shape."""
        core = self.policy.model
        expert = core.paligemma_with_expert.gemma_expert.model
        config = self.policy.config
        embedded_time = create_sinusoidal_pos_embedding(
            time, core.action_in_proj.out_features, config.min_period, config.max_period, device=time.device
        ).to(time.dtype)
        condition = F.silu(core.time_mlp_out(F.silu(core.time_mlp_in(embedded_time))))
        hidden = core.action_in_proj(noisy_actions)
        hidden = hidden.to(self._suffix_dtype or hidden.dtype)

        steps, draws = hidden.shape[1], len(time) // len(prefix.length)
        positions = prefix.length + torch.arange(steps, device=hidden.device)
        rotation = self._rotation(hidden, _repeat_rows(positions, draws))
        bias = _repeat_rows(F.pad(prefix.bias, (0, steps)), draws)  # action steps all see each other
        for layer, (key, value) in zip(expert.layers, prefix.keys_values, strict=True):
            hidden = self._run(self._suffix_layer, layer, hidden, condition, rotation, bias, key, value, self.attention)
        hidden, _ = layernorm_forward(expert.norm, hidden, condition)
        return core.action_out_proj(hidden.to(torch.float32))

    def _rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding for queries and keys made of `hidden`: cosines and sines (B, 1, tokens, head_dim)."""
        kind = hidden.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
        rotary = self.policy.model.paligemma_with_expert.paligemma.model.language_model.rotary_emb
        cosines, sines = rotary(hidden.new_empty(0, dtype=dtype), positions)
        return cosines.unsqueeze(1), sines.unsqueeze(1)

    def _run(self, function: Any, layer: nn.Module, *arguments: Any) -> Any:
        """Call for a layer; with checkpointing, keep only the arguments and call again in backward."""
        if self._checkpointing and torch.is_grad_enabled():
            function = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        unit = self._units.get(layer)
        return unit(function, layer, *arguments) if unit else function(layer, *arguments)


class Unit(nn.Module):
    """Some modules of a layer, as a module whose hooks fire around whatever is called through it."""

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__()
        self.modules_of_layer = nn.ModuleList(modules)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def _vision_layer(layer: nn.Module, hidden: Tensor) -> Tensor:
    """A layer of the vision tower: hidden (N, tokens, width) to hidden."""
    return layer(hidden, attention_mask=None)


def _prefix_layer(
    layer: nn.Module, hidden: Tensor, rotation: tuple[Tensor, Tensor], bias: Tensor, attention: Kernel
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer of the language model: hidden (B, P, width) to hidden, and its keys and values."""
    normed, gate = layernorm_forward(layer.input_layernorm, hidden)
    key, value = _keys_values(layer.self_attn, normed, rotation)
    attended = _attend(layer.self_attn, normed, rotation, key, value, bias, attention)
    return _finish_layer(layer, hidden, attended, gate, None), key, value


def _suffix_layer(
    layer: nn.Module,
    hidden: Tensor,
    condition: Tensor,
    rotation: tuple[Tensor, Tensor],
    bias: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    attention: Kernel,
) -> Tensor:
    """A layer of the action expert: hidden (B*K, T, width) to hidden, attending to prefix (B rows) and action steps."""
    normed, gate = layernorm_forward(layer.input_layernorm, hidden, condition)
    key, value = _keys_values(layer.self_attn, normed, rotation)
    draws = len(hidden) // len(prefix_key)
    key = torch.cat([_repeat_rows(prefix_key, draws), key], dim=2)
    value = torch.cat([_repeat_rows(prefix_value, draws), value], dim=2)
    attended = _attend(layer.self_attn, normed, rotation, key, value, bias, attention)
    return _finish_layer(layer, hidden, attended, gate, condition)


def _repeat_rows(rows: Tensor, times: int) -> Tensor:
    """Each row (of the first dimension) `times` times in a row; without a copy if that is once."""
    return rows.unsqueeze(1).expand(-1, times, *rows.shape[1:]).flatten(0, 1)


def _keys_values(module: Any, normed: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return _rotate(_heads(module.k_proj, normed, module), rotation), _heads(module.v_proj, normed, module)


def _attend(
    module: Any,
    normed: Tensor,
    rotation: tuple[Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    attention: Kernel,
) -> Tensor:
    """Attention of `normed` (B, tokens, width) to keys and values: (B, tokens, heads * head_dim)."""
    return attend(module, _rotate(_heads(module.q_proj, normed, module), rotation), key, value, bias, attention)


def _finish_layer(
    layer: Any, hidden: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None
) -> Tensor:
    """The half of a layer after attention, with the casts of LeRobot's `compute_layer_complete`."""
    projected = layer.self_attn.o_proj(attended.to(layer.self_attn.o_proj.weight.dtype))
    hidden = _gated_residual(hidden, projected, gate)
    normed, gate = layernorm_forward(layer.post_attention_layernorm, hidden, condition)
    if layer.mlp.up_proj.weight.dtype == torch.bfloat16:
        normed = normed.to(torch.bfloat16)
    return _gated_residual(hidden, layer.mlp(normed), gate)


def _heads(projection: nn.Module, normed: Tensor, module: Any) -> Tensor:
    """Project (B, tokens, width) to (B, heads, tokens, head_dim)."""
    return projection(normed).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = rotation
    return heads * cosines + rotate_half(heads) * sines


def image_tokens(config: PI05Config) -> int:
    """Positions that a camera's image takes: its patches."""
    # LeRobot 0.6.1 leaves SigLIP's patches as transformers has them; the tiny policy chooses its own.
    patch = getattr(config, "patch_size", CONFIG_MAPPING["paligemma"]().vision_config.patch_size)
    return (config.image_resolution[0] // patch) * (config.image_resolution[1] // patch)
