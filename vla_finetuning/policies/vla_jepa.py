"""VLA-JEPA: a Qwen3-VL reads its instructions and images in its forward, and a world model watches what follows."""

from __future__ import annotations

from vla_finetuning.policies.family import Family


class VLAJEPA(Family):
    """VLA-JEPA and types that derive from it."""

    reads_texts = True
