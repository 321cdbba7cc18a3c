"""The policy that is small enough to train on a laptop: for the demo, for rehearsals and for benchmarks."""

from vla_finetuning.policies import tiny_pi05
from vla_finetuning.policies.tiny_pi05 import make_tiny_base

__all__ = ["CODE", "make_tiny_base"]

# The file that decides what `make_tiny_base` writes.
CODE = tiny_pi05.__file__
