"""perdure in a notebook: the cells, and a small stand-in for the kernel that runs them.

A notebook awaits at the top level, and all of its cells share one event loop. So `connect()` is
awaited in one cell, used in the next ones, and closed in the last; what a cell ends with is shown,
as HTML where it has some. Restarting the kernel is a new loop in which the conversation goes
on. Whoever would rather not await anything uses `perdure.sync` in the cells.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import types
import warnings
from typing import Any

FIRST = """
import perdure
from perdure import Message

sessions = await perdure.connect()
session = await sessions.open("notebook")
session

# %% a turn
async with session.turn():
    session.append(Message.user("Hello"))
    session.append(Message.assistant("Hello! How can I help?"))
session.context()[-1].text

# %% how it stands
sessions.health()

# %% the end
await sessions.aclose()
"""

SECOND = """
import perdure.sync

sessions = perdure.sync.connect()
view = sessions.load("notebook")
[message.text for message in view.context()]

# %% the end
sessions.close()
"""


async def kernel(notebook: str) -> None:
    """Run the cells in this loop, one after another, and show what each ends with."""
    names: dict[str, Any] = {}
    for cell in notebook.split("# %%"):
        *body, last = ast.parse(cell.partition("\n")[2]).body
        if isinstance(last, ast.Expr):
            shown = ast.Assign([ast.Name("_", ast.Store())], last.value)
            last = ast.fix_missing_locations(shown)
        module = ast.Module([*body, last], type_ignores=[])
        code = compile(module, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = types.FunctionType(code, names)()
        if inspect.isawaitable(result):
            await result
        show(names.pop("_", None))


def show(value: object) -> None:
    """Print what a notebook would show."""
    as_html = getattr(value, "_repr_html_", None)
    print(repr(value), "" if as_html is None else f"({len(as_html())} characters of HTML)")


asyncio.run(kernel(FIRST))
warnings.simplefilter("ignore", RuntimeWarning)  # "blocks the loop": a real kernel is not warned
asyncio.run(kernel(SECOND))  # as after a restart of the kernel
