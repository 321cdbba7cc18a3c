"""A server of one robot in this process, per test module."""

import pytest

from tests.serving.servers import InProcess, make_export, make_service, served


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    return make_service(make_export(tmp_path_factory.mktemp("serving")))


@pytest.fixture(scope="module")
def handle(service):
    return InProcess(service)


@pytest.fixture(scope="module")
def addresses(service, handle):
    with served(service, handle) as addresses:
        yield addresses
