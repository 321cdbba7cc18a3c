import pytest

from tests import in_process


@pytest.fixture(scope="session")
def setting(tmp_path_factory):
    """A folder, a dataset and a tiny base policy for it."""
    return in_process.make_setting(tmp_path_factory.mktemp("diagnostics"))


@pytest.fixture(scope="session")
def run(setting):
    return in_process.resolved(setting)
