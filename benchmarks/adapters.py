"""What an SDK's sessions cost in perdure, over what they cost in the SDK's own store.

A LangGraph thread of a chat: each turn is a question and an answer of one node, both of about 400
characters, and a run of its own, with LangGraph's default ``durability="async"``. `PerdureSaver`
has a file store, `AsyncSqliteSaver` its database; ``bytes`` counts what each has written, ``disk``
what is left of it. ``_delta`` compares with AsyncSqliteSaver under a ``DeltaChannel``, while
perdure's graph has the usual channel. Each runs once, in this process, after a few turns that do
not count.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from benchmarks.figures import Report, Row
from benchmarks.timing import kernel_count

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

__all__ = ["Options", "run"]

TEXT = "The tide is low at noon, so we leave the harbor at eleven. " * 7
WARM_UP = 5


class Options(NamedTuple):
    """How much to measure, and where."""

    turns: int = 1000
    folder: Path | None = None


class Cost(NamedTuple):
    """What a thread has cost."""

    seconds: float
    written: float
    disk: float


MEANINGS = {
    "adapters.langgraph.bytes": "bytes written for a LangGraph thread, over AsyncSqliteSaver's",
    "adapters.langgraph.bytes_delta": "the same, over AsyncSqliteSaver's with a DeltaChannel",
    "adapters.langgraph.disk": "the size of its store, over AsyncSqliteSaver's",
    "adapters.langgraph.disk_delta": "the same, over AsyncSqliteSaver's with a DeltaChannel",
    "adapters.langgraph.time": "the time that it takes, over AsyncSqliteSaver's",
    "adapters.langgraph.turn_ms": "a turn",
    "adapters.langgraph.turn_bytes": "bytes written for a turn",
}


def run(options: Options) -> Report:
    """Measure one thread in each."""
    with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
        costs = {
            name: asyncio.run(_cost(name, Path(folder) / name, options.turns))
            for name in ("perdure", "sqlite", "delta")
        }
    own, sqlite, delta = costs["perdure"], costs["sqlite"], costs["delta"]
    found = {
        "adapters.langgraph.bytes": own.written / sqlite.written,
        "adapters.langgraph.bytes_delta": own.written / delta.written,
        "adapters.langgraph.disk": own.disk / sqlite.disk,
        "adapters.langgraph.disk_delta": own.disk / delta.disk,
        "adapters.langgraph.time": own.seconds / sqlite.seconds,
        "adapters.langgraph.turn_ms": 1000 * own.seconds / options.turns,
        "adapters.langgraph.turn_bytes": own.written / options.turns,
    }
    rows = [Row(name, found[name], meaning) for name, meaning in MEANINGS.items()]
    details = {name: cost._asdict() for name, cost in costs.items()}
    return Report(rows, {"turns": options.turns, **details})


async def _cost(name: str, folder: Path, turns: int) -> Cost:
    folder.mkdir()
    async with _saver(name, folder) as saver:
        turn = _chat(saver, is_delta=name == "delta")
        for number in range(WARM_UP):
            await turn("warm up", number)
        began, before = perf_counter(), kernel_count() or 0
        for number in range(turns):
            await turn("measured", number)
        seconds = perf_counter() - began
        written = (kernel_count() or 0) - before
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Cost(seconds, written, disk)


@asynccontextmanager
async def _saver(name: str, folder: Path) -> AsyncIterator[Any]:
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    from perdure.adapters import PerdureSaver

    if name == "perdure":
        async with PerdureSaver.from_conn_string(folder) as saver:
            yield saver
    else:
        async with AsyncSqliteSaver.from_conn_string(str(folder / "threads.db")) as saver:
            yield saver


def _chat(saver: Any, *, is_delta: bool) -> Callable[[str, int], Awaitable[Any]]:
    """Return what runs a turn of a thread."""
    from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
    from langgraph.channels.delta import DeltaChannel
    from langgraph.graph import START, StateGraph
    from langgraph.graph.message import _messages_delta_reducer, add_messages
    from typing_extensions import TypedDict

    channel = DeltaChannel(_messages_delta_reducer) if is_delta else add_messages
    shape: Any = TypedDict("Chat", {"messages": Annotated[list[AnyMessage], channel]})  # type: ignore[operator, misc, valid-type]

    async def model(state: dict[str, Any]) -> dict[str, Any]:
        number = len(state["messages"])
        return {"messages": [AIMessage(f"{number} {TEXT}", id=f"answer {number}")]}

    builder = StateGraph(shape)
    builder.add_node("model", model)
    builder.add_edge(START, "model")
    graph = builder.compile(checkpointer=saver)

    async def turn(thread: str, number: int) -> None:
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        message = HumanMessage(f"{number} {TEXT}", id=f"question {number}")
        await graph.ainvoke({"messages": [message]}, config)

    return turn
