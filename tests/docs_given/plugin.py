"""A conftest.py with perdure's plugin, as docs/testing.md says."""

pytest_plugins = ["perdure.testing.plugin"]
