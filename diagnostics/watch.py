"""Watch a cluster's object stores and CPUs during a measurement."""

from __future__ import annotations

import threading
from typing import Self

import ray

from vla_finetuning.run.progress import object_store


class ClusterWatch:
    """Poll the cluster every `every_s` seconds while the block runs.

    Attributes:
        peak_bytes: largest memory in use by the object stores.
        spilled_bytes: bytes that the object stores spilled to disks.
        cpus: largest number of CPUs, as nodes may be started during the measurement.
    """

    def __init__(self, every_s: float = 0.25) -> None:
        self.peak_bytes, self.cpus, self._every_s = 0, 0.0, every_s
        self._thread, self._ended = threading.Thread(target=self._watch, daemon=True), threading.Event()

    def __enter__(self) -> Self:
        self._spilled_before = object_store().spilled_bytes_total
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.spilled_bytes = object_store().spilled_bytes_total - self._spilled_before

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, object_store().object_store_bytes_used)
            self.cpus = max(self.cpus, ray.cluster_resources().get("CPU", 0.0))
            if self._ended.wait(self._every_s):
                return
