import pytest


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The tiny PI0.5 that runs of grpo.py start from."""
    from tests.rl.test_learning import make_base

    return make_base(tmp_path_factory.mktemp("grpo") / "base")


@pytest.fixture(scope="module")
def loss():
    """The loss of a tiny PI0.5."""
    from tests.tiny import make_policy
    from vla_finetuning.policies.families.pi05 import PI05Loss

    return PI05Loss(make_policy())
