"""What a cluster does while something is measured."""

from __future__ import annotations

import threading
from typing import Self

import ray

from vla_finetuning.run.progress import object_store


class ClusterWatch:
    """Looks at the cluster while the block runs, every so many seconds.

    Attributes:
        peak_bytes: the most that its object stores hold. spilled_bytes: what they spill to disks.
        cpus: the most that it has: nodes that only decode are started when there is work for them.
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
