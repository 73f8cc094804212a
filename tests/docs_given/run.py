"""Run a snippet of the docs after the module that gives it what it needs: `run.py GIVEN SNIPPET`.

Both share one namespace and, where they await at the top level, one event loop. What the module
calls `after` is awaited last. A snippet of tests is collected by pytest, with the module as its
conftest.py.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import sys
from pathlib import Path
from types import FunctionType

import pytest

TESTS = re.compile(r"^(?:async )?def test_|^class Test", re.MULTILINE)


def run(given: Path, snippet: Path) -> int:
    if TESTS.search(snippet.read_text(encoding="utf-8")):
        Path("conftest.py").write_text(given.read_text(encoding="utf-8"), encoding="utf-8")
        page = Path("test_snippet.py")
        page.write_text(snippet.read_text(encoding="utf-8"), encoding="utf-8")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ["-q", "-p", "no:cacheprovider", "-p", "anyio.pytest_plugin", "--no-header"]
        return int(pytest.main([*options, "-o", "anyio_mode=auto", "--rootdir=.", str(page)]))
    names: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for path in (given, snippet):
            names["__file__"] = str(path)
            source = path.read_text(encoding="utf-8")
            code = compile(source, path.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(FunctionType(code, names)())
            else:
                exec(code, names)  # outside of a running loop: it may call asyncio.run
        after = names.get("after")
        if callable(after):
            runner.run(after())
    return 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # instead of this folder, for the examples
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2])))
