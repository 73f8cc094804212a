"""The package says where to find what, and leaves nothing out."""

from __future__ import annotations

import re
from pathlib import Path

import perdure.session


def test_the_map_of_the_package_names_each_module_once() -> None:
    rows = re.findall(r"^ *\S.*?   *(.+)$", perdure.session.__doc__ or "", re.MULTILINE)
    modules = {path.stem for path in Path(perdure.session.__file__).parent.glob("*.py")}
    named = [word for row in rows for word in re.findall(r"\w+", row) if word in modules]
    assert sorted(named) == sorted(modules - {"__init__"})
