"""The tiny policy of the demo, of rehearsals on a laptop and of benchmarks, without its type's name."""

from vla_finetuning.policies import tiny_pi05
from vla_finetuning.policies.tiny_pi05 import make_tiny_base

__all__ = ["CODE", "make_tiny_base"]

# File with the code of `make_tiny_base`.
CODE = tiny_pi05.__file__
