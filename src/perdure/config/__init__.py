"""Declared configuration of an agent: persistence.yaml, and the values that it declares.

`schema` and `yaml_reader` decide, and are pure. PyYAML is imported only when there is a file to
read. `persistent_config` finds it, and stores the values, in a session or in a folder.
"""

from __future__ import annotations
