from __future__ import annotations

import subprocess
import sys

import pytest

import perdure.testing

WITHOUT_PYTEST = """
import sys
import perdure.testing as testing
for name in testing.__all__:
    if name != "conformance":
        getattr(testing, name)
assert "pytest" not in sys.modules
testing.conformance
assert "pytest" in sys.modules
"""


def test_only_the_suite_and_the_plugin_bring_pytest_in():
    command = [sys.executable, "-W", "error", "-c", WITHOUT_PYTEST]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_package_knows_its_names_and_no_others():
    assert dir(perdure.testing) == sorted(perdure.testing.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = perdure.testing.no_such_name
