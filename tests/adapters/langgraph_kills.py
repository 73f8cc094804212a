"""``python -m tests.adapters.langgraph_kills``: SIGKILL amid a graph's run, again and again.

A worker runs turns of a graph in one thread, and says so when LangGraph has returned. It is killed
at any moment. Then everything that it had said must be there, every checkpoint must be readable
with its parent and the writes that led to it, and the next worker goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from perdure.adapters import PerdureSaver

STEPS = 3
"""Answers of a turn, each a superstep."""
CONFIG: Any = {"configurable": {"thread_id": "t"}}
DURABILITIES = ("async", "sync", "exit")


class Chat(TypedDict):
    """What the graph keeps."""

    messages: Annotated[list[AnyMessage], add_messages]


def graph_of(saver: PerdureSaver) -> Any:
    """A graph whose turns have `STEPS` answers."""

    async def answer(state: Chat) -> dict[str, Any]:
        number = len(state["messages"])
        return {"messages": [AIMessage(f"{number} " + "x" * 200, id=f"m{number}")]}

    def then(state: Chat) -> str:
        return "answer" if len(state["messages"]) % (STEPS + 1) else END

    builder = StateGraph(Chat)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_conditional_edges("answer", then)
    return builder.compile(checkpointer=saver)


async def work(url: str, durability: Any) -> None:
    """Run turns for ever, and print how many messages there are when one has returned."""
    config = {**CONFIG, "metadata": {"durability": durability}}
    async with PerdureSaver.from_conn_string(url) as saver:
        graph = graph_of(saver)
        state = await graph.aget_state(CONFIG)
        if state.tasks:  # also one that had returned, and whose writes are in no checkpoint yet
            await graph.ainvoke(None, config, durability=durability)
        while True:
            number = len((await graph.aget_state(CONFIG)).values.get("messages", ()))
            message = HumanMessage(f"{number}", id=f"m{number}")
            values = await graph.ainvoke({"messages": [message]}, config, durability=durability)
            print(len(values["messages"]), flush=True)


async def check(url: str, said: int) -> int:
    """Return how many messages there are; raise if anything is not as it was said."""
    async with PerdureSaver.from_conn_string(url, on_held="steal", wait=60.0) as saver:
        found = [each async for each in saver.alist(CONFIG)]
        ids = {each.checkpoint["id"]: each for each in found}
        for each in found:
            if each.parent_config is not None:
                parent = ids[each.parent_config["configurable"]["checkpoint_id"]]
                wrote = {channel for _, channel, _ in parent.pending_writes or ()}
                is_step = each.metadata["source"] == "loop" and each.metadata["step"] > 0
                is_next = each.metadata["step"] == parent.metadata["step"] + 1
                # "exit" stores the last state of a run, and none of the writes before it.
                if is_step and is_next and each.metadata["durability"] != "exit":
                    assert "messages" in wrote, "a checkpoint without the writes before it"
        messages = found[0].checkpoint["channel_values"].get("messages", []) if found else []
        assert [message.id for message in messages] == [f"m{at}" for at in range(len(messages))]
        assert len(messages) >= said, f"{len(messages)} messages, of {said} that were said"
        return len(messages)


def kill(url: str, durability: str, seconds: float) -> int:
    """Run a worker, kill it, and return what it had said."""
    command = [sys.executable, "-m", __spec__.name, "--work", url, "--durability", durability]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    first = worker.stdout.readline()  # it has begun
    try:
        worker.wait(seconds)
    except subprocess.TimeoutExpired:
        worker.send_signal(signal.SIGKILL)
    rest = worker.communicate()[0]
    assert worker.returncode == -signal.SIGKILL, "the worker failed"
    return max(int(line) for line in (first + rest).splitlines() if line.strip())


def run(url: str, kills: int, seed: int) -> int:
    """Kill so many workers of one thread; return the messages that it has then."""
    random = Random(seed)
    count = 0
    for number in range(kills):
        said = kill(url, DURABILITIES[number % len(DURABILITIES)], random.uniform(0, 0.3))
        count = asyncio.run(check(url, max(said, count)))
    return count


def main() -> None:
    """Kill, check, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="the store (default: files in a temporary folder)")
    parser.add_argument("--work", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--durability", choices=DURABILITIES, default="async")
    given = parser.parse_args()
    if given.work:
        asyncio.run(work(given.work, given.durability))
        return
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        count = run(given.url or str(Path(folder) / "store"), given.kills, given.seed)
    print(f"{given.kills} kills, {count} messages: nothing that was said was lost")


if __name__ == "__main__":
    main()
