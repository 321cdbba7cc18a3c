"""The table of policies is what the tests noted, and no table where one of them failed."""

import pytest

from benchmarks.policies import read

CASE = """
<testcase classname="c" name="test_ten_steps_are_lerobots_own[{kind}]" time="1.0">{properties}{failure}</testcase>"""
NOTED = "<properties>{}</properties>".format('<property name="relative difference" value="{}"/>' * 2)


def written(tmp_path, *cases):
    file = tmp_path / "tests.xml"
    file.write_text(f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>')
    return file


def case(kind, *values, failure=""):
    return CASE.format(kind=kind, properties=NOTED.format(*values) if values else "", failure=failure)


def test_the_largest_difference_of_each_type(tmp_path):
    other = '<testcase classname="c" name="test_something_else[act]" time="1.0"/>'
    found = read(written(tmp_path, case("act", 1e-9, 2e-8), case("vqbet with GroupNorm", 3e-8, 1e-8), other))
    assert found == {"act": {"ten_steps": 2e-8}, "vqbet with GroupNorm": {"ten_steps": 3e-8}}


@pytest.mark.parametrize("bad", [case("act"), case("act", 1, 1, failure='<failure message="no"/>')])
def test_no_table_of_tests_that_failed(tmp_path, bad):
    with pytest.raises(ValueError, match=r"own\[act\] failed or noted no difference"):
        read(written(tmp_path, bad))
