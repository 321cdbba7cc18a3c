"""Cache the features of a frozen vision tower on each node, and use them in place of frames.

Features are looked up on the host when batches are made. Missing features are computed on the device before the step. A
thread writes them, so no step waits for a disk.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import lerobot
import numpy as np
import torch
import transformers
from torch import Tensor

from util import Batch
from vla_finetuning.columns import FEATURES_MISSING, IS_SKIPPED
from vla_finetuning.data.feature_cache import FeatureCache
from vla_finetuning.policies.family import PolicyLoss
from vla_finetuning.policies.registry import family_of
from vla_finetuning.training.state import Callback, TrainState
from vla_finetuning.training.stream import Columns

# Increase it with every change of the values of `PolicyLoss.features`.
RULES = 1
# Limit of features that wait to be written. Further ones are dropped, and computed again in the next epoch.
WAITING_BYTES = 2**29
# Suffixes of a camera's key in a partly cached batch: cached features, and indices of rows without them.
FOUND, MISSING = ".features_found", ".features_missing"
# NumPy has no bfloat16: its bits are stored.
STORED: dict[torch.dtype, np.dtype] = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.int16)}


class CachedFeatures(Callback):
    """Replace the frames of a rank's rows by cached features of a frozen vision tower (--train.feature_cache)."""

    def __init__(self, state: TrainState):
        folder, job = state.run.config.train.feature_cache, state.run.job
        assert folder is not None
        self._rows, self._cache, self._clock = state.run.rows, FeatureCache(folder, job.feature_cache_gb), state.clock
        self._started = threading.Event()
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "features")
        self._writes: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        self._pending_bytes, self._lock = 0, threading.Lock()

    def on_start(self, state: TrainState) -> None:
        """Open the store of the loss's features. Batches wait for it, because its weights identify the features."""
        loss, autocast = state.loss, state.autocast
        family, config = family_of(loss.policy.config), loss.policy.config
        weight = next(family.vision(loss.policy)[-1].parameters())
        self._loss, self._autocast, self._dtype = loss, autocast, autocast or weight.dtype
        # Layers are compiled for the shapes of a whole batch only.
        self._whole_batches = getattr(loss, "compiler", None) is not None
        self._store = self._rows.feature_store(
            self._cache, family.feature_shapes(config), STORED[self._dtype], made_by(loss, autocast, weight.device)
        )
        self._started.set()

    def on_end(self, state: TrainState) -> None:
        """Wait until all features are written."""
        self._writer.shutdown()
        self._check_writer()

    def on_host_batch(self, columns: Columns) -> Columns:
        """Replace frames by features if all are cached. Several threads may call it.

        Otherwise, add FEATURES_MISSING. A partly cached batch also gets FOUND, (B, tokens, width), and MISSING, int64
        indices of rows without features.
        """
        self._started.wait()
        lookups = {
            key: self._store.read(key, columns["dataset_index"], columns["index"])
            for key in self._store.shapes
            if key in columns
        }
        missing = ~np.stack([present for _, present in lookups.values()], axis=1)
        if not missing.any():
            return {**columns, **{key: features for key, (features, _) in lookups.items()}}
        batch = {**columns, FEATURES_MISSING: missing}
        if not (missing.all() or self._whole_batches):
            for (key, (features, _)), absent in zip(lookups.items(), missing.T, strict=True):
                batch[key + FOUND], batch[key + MISSING] = features, np.flatnonzero(absent)
        return batch

    def on_device_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches with all features in place of frames. Reads nothing from the device."""
        for batch in batches:
            cameras = [key for key in self._store.shapes if key in batch]
            if FEATURES_MISSING not in batch:
                yield {**batch, **{key: batch[key].view(self._dtype) for key in cameras}}
                continue
            self._clock.mark("forward")
            yield self._filled(batch, cameras)

    def _filled(self, batch: Batch, cameras: list[str]) -> Batch:
        batch, missing = dict(batch), batch[FEATURES_MISSING].numpy()
        absent = dict(zip(cameras, missing.T, strict=True))
        if all(key + FOUND in batch for key in cameras):
            rows = {key: batch.pop(key + MISSING) for key in cameras}
            images = {key: batch[key].index_select(0, rows[key]) for key in cameras if absent[key].any()}
            computed = self._compute(images)
            for key in cameras:
                batch[key] = batch.pop(key + FOUND).view(self._dtype)
                if key in computed:
                    batch[key].index_copy_(0, rows[key], computed[key])
            new_rows = {key: np.flatnonzero(absent[key]) for key in computed}
        else:
            computed = self._compute({key: batch[key] for key in cameras})
            batch |= computed
            new_rows = {key: np.arange(len(missing)) for key in computed}
        skipped = batch[IS_SKIPPED].numpy() if IS_SKIPPED in batch else np.zeros(len(missing), bool)
        new = {key: absent[key][indices] & ~skipped[indices] for key, indices in new_rows.items()}
        places = batch["dataset_index"].numpy(), batch["index"].numpy()
        self._keep(computed, new, {key: [column[indices] for column in places] for key, indices in new_rows.items()})
        return batch

    @torch.no_grad()
    def _compute(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(images.values())).device
        with torch.autocast(device.type, self._autocast, enabled=self._autocast is not None):
            computed = self._loss.features(self._loss.images(images))
        for key, features in computed.items():
            assert features.dtype == self._dtype and features.shape[1:] == self._store.shapes[key], (key, features)
        return computed

    def _keep(
        self, computed: Mapping[str, Tensor], new: Mapping[str, np.ndarray], places: Mapping[str, list[np.ndarray]]
    ) -> None:
        """Queue features of rows where `new` is True to be written, by camera, with their `places`."""
        self._check_writer()
        computed = {key: features for key, features in computed.items() if new[key].any()}
        size = sum(features.nbytes for features in computed.values())
        with self._lock:
            if not computed or self._pending_bytes + size > WAITING_BYTES:
                return
            self._pending_bytes += size
        on_gpu = next(iter(computed.values())).is_cuda
        copies, copied = {}, torch.cuda.Event() if on_gpu else None
        for key, features in computed.items():
            copies[key] = torch.empty(features.shape, dtype=features.dtype, pin_memory=on_gpu)
            copies[key].copy_(features, non_blocking=True)
        if copied is not None:
            copied.record()

        def write() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                for key, features in copies.items():
                    bits = features.view(torch.int16) if features.dtype == torch.bfloat16 else features
                    dataset_index, index = (column[new[key]] for column in places[key])
                    self._store.write(key, dataset_index, index, bits.numpy()[new[key]])
            finally:
                with self._lock:
                    self._pending_bytes -= size

        self._writes.append(self._writer.submit(write))

    def _check_writer(self) -> None:
        """Raise an error of the writer. Disk errors are not among them: they only lose cached features."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()


def made_by(loss: PolicyLoss, autocast: torch.dtype | None, device: torch.device) -> str:
    """Identify features apart from the frame: content of weights, processing, precision, device and libraries."""
    config: Any = loss.policy.config
    digest = hashlib.sha256()
    for module in (*family_of(config).vision(loss.policy), loss.images):
        digest.update(repr(module).encode())
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            content = tensor.detach().cpu().contiguous()
            digest.update(f"{name}\0{content.dtype}\0{tuple(content.shape)}\0".encode())
            digest.update(content.reshape(-1).view(torch.uint8).numpy())
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    settings = (
        RULES,
        config.type,
        [(name, str(getattr(config, name))) for name in family_of(config).image_options],
        str(autocast),
        getattr(loss, "compiler", None) is not None,
        gpu,
        torch.get_float32_matmul_precision(),
        (torch.__version__, transformers.__version__, lerobot.__version__),
    )
    return f"{digest.hexdigest()}\0{settings!r}"
