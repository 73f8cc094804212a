"""``python -m tests.adapters.kills SDK``: SIGKILL amid what an SDK stores, again and again.

A worker stores, and tells what the SDK was told is stored. It is killed at any moment. Then all of
that must be there, once, what was under way as a whole or not at all, and the next worker goes on
from there. Nodes of LangGraph that ran a second time are counted; ``langgraph-sqlite`` counts those
of AsyncSqliteSaver.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from time import monotonic
from typing import Annotated, Any, Final, Protocol

Tell = Callable[[Any], None]
LONGEST: Final = 0.3
"""Seconds that a worker has, after it has begun."""
START: Final = 60.0
"""Seconds that it may take to begin."""


class Subject(Protocol):
    """What is killed, and looked at afterwards."""

    modules: tuple[str, ...]
    """What a worker imports."""

    @staticmethod
    async def work(url: str, seed: int, tell: Tell) -> None:
        """Store for ever, and tell what is stored."""

    async def check(self, url: str, told: list[Any]) -> str:
        """Raise if anything is not as it was told; return what there is."""


# LangGraph

STEPS: Final = 3
"""Answers of a turn, each a superstep."""
THREAD: Any = {"configurable": {"thread_id": "t"}}
DURABILITIES: Final = ("async", "sync", "exit")
NEWEST: Final = 50
"""Checkpoints that are looked at after a kill."""


class LangGraph:
    """A thread of turns, in all durabilities."""

    modules = ("langgraph.graph", "langchain_core.messages", "perdure.adapters.langgraph")

    def __init__(self) -> None:
        self.messages = 0
        self.ran: dict[str, str] = {}
        """Nodes, and the durability of the run that ran them first."""
        self.again: Counter[str] = Counter()

    @staticmethod
    def saver(url: str) -> Any:
        from perdure.adapters import PerdureSaver

        return PerdureSaver.from_conn_string(url, on_held="steal", wait=60.0)

    @classmethod
    async def work(cls, url: str, seed: int, tell: Tell) -> None:
        from langchain_core.messages import HumanMessage

        durability: Any = DURABILITIES[seed % len(DURABILITIES)]
        config = {**THREAD, "metadata": {"durability": durability}}
        async with cls.saver(url) as saver:
            graph = graph_of(saver, lambda name: tell((durability, name)))
            state = await graph.aget_state(THREAD)
            if state.tasks:  # also one that had returned, and whose writes are in no checkpoint yet
                await graph.ainvoke(None, config, durability=durability)
            while True:
                number = len((await graph.aget_state(THREAD)).values.get("messages", ()))
                tell(number)
                message = HumanMessage(f"{number}", id=f"m{number}")
                values = await graph.ainvoke({"messages": [message]}, config, durability=durability)
                tell(len(values["messages"]))

    async def check(self, url: str, told: list[Any]) -> str:
        async with self.saver(url) as saver:
            listed = [each async for each in saver.alist(THREAD, limit=NEWEST)]
        require_writes(listed)
        newest = listed[0].checkpoint["channel_values"] if listed else {}
        messages = newest.get("messages", [])
        assert [message.id for message in messages] == [f"m{at}" for at in range(len(messages))]
        most = max((each for each in told if isinstance(each, int)), default=0)
        assert len(messages) >= max(most, self.messages), f"{len(messages)} messages, not {most}"
        self.messages = len(messages)
        for durability, name in (each for each in told if isinstance(each, tuple)):
            if name in self.ran:
                self.again[self.ran[name]] += 1
            self.ran[name] = durability
        return f"{self.messages} messages, nodes that ran again by durability: {dict(self.again)}"


class LangGraphSqlite(LangGraph):
    """The same with LangGraph's own saver."""

    @staticmethod
    def saver(url: str) -> Any:
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        return AsyncSqliteSaver.from_conn_string(f"{url}.db")


def graph_of(saver: Any, ran: Callable[[str], None]) -> Any:
    """A graph whose turns have `STEPS` answers."""
    from langchain_core.messages import AIMessage, AnyMessage
    from langgraph.graph import END, START, StateGraph
    from langgraph.graph.message import add_messages
    from typing_extensions import TypedDict

    shape: Any = TypedDict("Chat", {"messages": Annotated[list[AnyMessage], add_messages]})  # type: ignore[operator, misc, valid-type]

    async def answer(state: Any) -> dict[str, Any]:
        name = f"m{len(state['messages'])}"
        ran(name)
        return {"messages": [AIMessage(f"{name} " + "x" * 200, id=name)]}

    def then(state: Any) -> str:
        return "answer" if len(state["messages"]) % (STEPS + 1) else END

    builder = StateGraph(shape)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_conditional_edges("answer", then)
    return builder.compile(checkpointer=saver)


def require_writes(listed: list[Any]) -> None:
    """Require of each checkpoint its parent, and the writes that led to it."""
    checkpoints = {each.checkpoint["id"]: each for each in listed}
    for each in listed[: NEWEST - 1]:
        if each.parent_config is None:
            continue
        parent = checkpoints[each.parent_config["configurable"]["checkpoint_id"]]
        wrote = {channel for _, channel, _ in parent.pending_writes or ()}
        is_step = each.metadata["source"] == "loop" and each.metadata["step"] > 0
        is_next = each.metadata["step"] == parent.metadata["step"] + 1
        # "exit" stores the last state of a run, and none of the writes before it.
        if is_step and is_next and each.metadata["durability"] != "exit":
            assert "messages" in wrote, "a checkpoint without the writes before it"


# OpenAI Agents


class OpenAIAgents:
    """A session whose items are added, popped, replaced and cleared."""

    modules = ("agents.memory", "perdure.adapters.openai_agents")

    def __init__(self) -> None:
        self.seed = 0
        self.items: list[Any] = []

    @staticmethod
    async def work(url: str, seed: int, tell: Tell) -> None:
        from perdure.adapters import PerdureSession

        async with PerdureSession.from_url("a", url, wait=60) as session:
            await session.acquire()
            for number, (change, items) in enumerate(changes(seed), 1):
                await {
                    "add": lambda items=items: session.add_items(items),
                    "pop": session.pop_item,
                    "replace": lambda items=items: session.replace_items(items),
                    "clear": session.clear_session,
                }[change]()
                tell(number)

    async def check(self, url: str, told: list[Any]) -> str:
        from perdure.adapters import PerdureSession

        changed = changes(self.seed)
        for _ in range(told[-1] if told else 0):
            self.items = after(self.items, *next(changed))
        async with PerdureSession.from_url("a", url, wait=60) as session:
            stored = await session.get_items()
        assert stored in (self.items, after(self.items, *next(changed)))
        self.items, self.seed = stored, self.seed + 1
        return f"{len(stored)} items"


def changes(seed: int) -> Iterator[tuple[str, list[Any]]]:
    """What a worker does to a session."""
    order = Random(seed)
    for number in range(100_000):
        count = order.randrange(1, 4)
        items = [{"role": "user", "content": f"{seed} {number} {at}"} for at in range(count)]
        yield order.choice(["add", "add", "add", "pop", "pop", "replace", "clear"]), items


def after(items: list[Any], change: str, new: list[Any]) -> list[Any]:
    """What a session has after a change."""
    if change == "pop":
        return items[:-1]
    return {"add": [*items, *new], "replace": new, "clear": []}[change]


# Pydantic AI


class PydanticAI:
    """A conversation that is saved, and forked now and then."""

    modules = ("pydantic_ai.conversation_store", "perdure.adapters.pydantic_ai")

    def __init__(self) -> None:
        self.messages = 0

    @staticmethod
    async def work(url: str, seed: int, tell: Tell) -> None:
        from pydantic_ai.conversation import Conversation
        from pydantic_ai.messages import ModelRequest, UserPromptPart

        from perdure.adapters import PerdureConversationStore

        async with PerdureConversationStore.from_url(url, wait=60) as store:
            conversation = await store.load("a") or Conversation(conversation_id="a")
            begin = len(conversation.messages)
            for number in range(begin, begin + 100_000, 2):
                for text in (f"{number}", f"{number + 1}"):
                    conversation.messages.append(ModelRequest(parts=[UserPromptPart(text)]))
                await store.save(conversation)
                if number % 20 == 0:
                    await store.fork("a", new_conversation_id=f"fork {number}", at=number + 1)
                tell(number + 2)

    async def check(self, url: str, told: list[Any]) -> str:
        from perdure.adapters import PerdureConversationStore

        acknowledged = told[-1] if told else self.messages
        async with PerdureConversationStore.from_url(url, wait=60) as store:
            texts = await texts_of(store, "a")
            assert texts == [f"{at}" for at in range(len(texts))]
            assert len(texts) in (acknowledged, acknowledged + 2)
            self.messages = len(texts)
            for record in (await store.list_conversations())[:NEWEST]:
                if record.conversation_id != "a":
                    number = int(record.conversation_id.removeprefix("fork "))
                    forked = await texts_of(store, record.conversation_id)
                    assert forked == texts[: number + 1]
        return f"{len(texts)} messages"


async def texts_of(store: Any, name: str) -> list[str]:
    """What a conversation's messages say."""
    conversation = await store.load(name)
    return [message.parts[0].content for message in conversation.messages] if conversation else []


# Google ADK

SESSION: Final = {"app_name": "harbor", "user_id": "ada", "session_id": "s"}


def scoped(seed: object) -> list[str]:
    """The keys of a session's, its user's and its app's state that a worker changes."""
    return [f"{seed}", f"user:{seed}", f"app:{seed}"]


class GoogleADK:
    """A session to which events are appended, with state of its own, of its user and its app."""

    modules = ("google.adk.sessions", "google.genai.types", "perdure.adapters.google_adk")

    def __init__(self) -> None:
        self.returned: list[str] = []
        self.kills = 0

    @staticmethod
    async def work(url: str, seed: int, tell: Tell) -> None:
        from google.adk.errors import StaleSessionError
        from google.adk.events.event import Event
        from google.genai import types

        from perdure.adapters import PerdureSessionService

        service = PerdureSessionService(url, wait=60)
        if await service.get_session(**SESSION) is None:
            await service.create_session(**SESSION)
        for number in range(100_000):
            text = f"{seed} {number}"
            content = types.Content(parts=[types.Part(text=text)])
            event = Event(id=text, author="user", content=content)
            event.actions.state_delta = dict.fromkeys(scoped(seed), number)
            with suppress(StaleSessionError):  # what was under way before has come to be
                await service.append_event(await service.get_session(**SESSION), event)
                tell(text)

    async def check(self, url: str, told: list[Any]) -> str:
        from perdure.adapters import PerdureSessionService

        self.returned += told
        self.kills += 1
        async with PerdureSessionService(url, wait=60) as service:
            session = await service.get_session(**SESSION)
        texts = [event.id for event in session.events] if session else []
        assert len(texts) == len(set(texts))
        known = set(self.returned)
        assert [text for text in texts if text in known] == self.returned
        assert len(texts) <= len(self.returned) + self.kills  # what was under way at a kill
        last = {text.split()[0]: int(text.split()[1]) for text in texts}
        for seed in range(self.kills):
            state = {session.state.get(key) for key in scoped(seed)} if session else {None}
            assert state == {last.get(f"{seed}")}, f"torn: {state} of worker {seed}"
        return f"{len(texts)} events"


# Agent Framework


class AgentFramework:
    """A conversation, and checkpoints of which only the newest are kept."""

    modules = ("agent_framework", "perdure.adapters.agent_framework_checkpoints")
    kept = 5

    def __init__(self) -> None:
        self.newest: dict[str, int] = {}
        """By what was done: the number that was told last."""

    @staticmethod
    def both(url: str) -> tuple[Any, Any]:
        from perdure.adapters import PerdureCheckpointStorage, PerdureHistoryProvider

        return (
            PerdureHistoryProvider.from_url(url, wait=60),
            PerdureCheckpointStorage.from_url("a", url, wait=60),
        )

    @classmethod
    async def work(cls, url: str, seed: int, tell: Tell) -> None:
        from agent_framework import Message, WorkflowCheckpoint

        history, storage = cls.both(url)
        latest = await storage.get_latest(workflow_name="w")
        begin = 0 if latest is None else len(latest.state["numbers"])
        for number in range(begin, begin + 100_000):
            # Those of a killed run whose checkpoint was not stored are told from new ones.
            texts = (f"{2 * number}", f"{2 * number + 1}")
            said = [Message("assistant", [text], message_id=text) for text in texts]
            await history.save_messages("a", said)
            tell(("said", number))
            before = f"c{number - 1}" if number else None
            state = {"numbers": list(range(number + 1)), "text": "x" * 200}
            await storage.save(WorkflowCheckpoint("w", "g", f"c{number}", before, state=state))
            tell(("saved", number))
            listed = await storage.list_checkpoint_ids(workflow_name="w")
            for name in listed[: -cls.kept]:
                assert await storage.delete(name)
                tell(("deleted", int(name[1:])))

    async def check(self, url: str, told: list[Any]) -> str:
        self.newest |= dict(told)
        history, storage = self.both(url)
        async with history, storage:
            texts = [message.text for message in await history.get_messages("a")]
            listed = await storage.list_checkpoints(workflow_name="w")
        assert texts == [f"{at}" for at in range(len(texts))]
        assert len(texts) // 2 - 1 - self.newest.get("said", -1) in (0, 1)
        assert len(texts) % 2 == 0
        numbers = [int(each.checkpoint_id[1:]) for each in listed]
        first, last = (numbers[0], numbers[-1]) if numbers else (0, -1)
        assert numbers == list(range(first, last + 1))
        assert last - self.newest.get("saved", -1) in (0, 1)
        assert len(numbers) in (min(last + 1, self.kept), self.kept + 1)
        assert first > self.newest.get("deleted", -1)
        for number, each in zip(numbers, listed, strict=True):
            assert each.state["numbers"] == list(range(number + 1))
        return f"{len(texts)} messages, checkpoints {first} to {last}"


# Claude Agent SDK

TRANSCRIPT: Final = {"project_key": "harbor", "session_id": "s"}


class ClaudeAgent:
    """A transcript to which batches are appended; a worker begins with what was under way."""

    modules = ("claude_agent_sdk", "perdure.adapters.claude_agent")

    @staticmethod
    async def work(url: str, seed: int, tell: Tell) -> None:
        from perdure.adapters import PerdureSessionStore

        async with PerdureSessionStore.from_url(url, wait=60) as store:
            stored = await store.load(TRANSCRIPT) or [{"batch": 0}]
            # It is there, or not: the newest one again, and then the next.
            for number in range(stored[-1]["batch"], 1_000_000):
                await store.append(TRANSCRIPT, batch(number))
                tell(number)

    async def check(self, url: str, told: list[Any]) -> str:
        from perdure.adapters import PerdureSessionStore

        async with PerdureSessionStore.from_url(url, wait=60) as store:
            stored = await store.load(TRANSCRIPT) or []
            (summary,) = await store.list_session_summaries("harbor") or [{"data": {}}]
        newest = stored[-1]["batch"] if stored else -1
        assert newest in ({told[-1], told[-1] + 1} if told else {-1, 0})
        assert stored == [entry for number in range(newest + 1) for entry in batch(number)]
        assert summary["data"].get("custom_title") == (f"{newest}" if stored else None)
        return f"{newest + 1} batches"


def batch(number: int) -> list[dict[str, Any]]:
    """What is appended by one call."""
    count = Random(number).randrange(1, 4)
    return [
        {"type": "user", "uuid": f"{number} {at}", "batch": number, "customTitle": f"{number}"}
        for at in range(count)
    ]


SUBJECTS: Final[dict[str, Callable[[], Subject]]] = {
    "langgraph": LangGraph,
    "langgraph-sqlite": LangGraphSqlite,
    "openai-agents": OpenAIAgents,
    "pydantic-ai": PydanticAI,
    "google-adk": GoogleADK,
    "agent-framework": AgentFramework,
    "claude-agent-sdk": ClaudeAgent,
}


SHORT: Final = {"adk": "google-adk", "openai": "openai-agents", "pydantic": "pydantic-ai"}
"""Other names on the command line."""


# What kills them


def _work(sdk: str, url: str, seed: int, teller: Connection) -> None:
    asyncio.run(SUBJECTS[sdk]().work(url, seed, teller.send))


def kill(sdk: str, url: str, seed: int, seconds: float) -> list[Any]:
    """Run a worker, kill it, and return what it has told."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *SUBJECTS[sdk]().modules])
    listener, teller = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(sdk, url, seed, teller), daemon=True)
    worker.start()
    teller.close()
    told = []
    with listener, suppress(EOFError):
        until = monotonic() + START
        while listener.poll(max(until - monotonic(), 0)):
            if not told:
                until = monotonic() + seconds
            told.append(listener.recv())
        worker.kill()
        while True:
            told.append(listener.recv())
    worker.kill()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL, "the worker failed"
    assert told, "the worker did not begin"
    return told


def run(sdk: str, url: str, kills: int, seed: int = 0) -> str:
    """Kill so many workers, check after each, and return what there is then."""
    subject, random, result = SUBJECTS[sdk](), Random(seed), ""
    for number in range(kills):
        told = kill(sdk, url, number, random.uniform(0, LONGEST))
        result = asyncio.run(subject.check(url, told))
    return result


def main() -> None:
    """Kill, check, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.adapters.kills", description=__doc__)
    parser.add_argument("sdk", choices=[*SUBJECTS, *SHORT])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="the store (default: files in a temporary folder)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        url = given.url or str(Path(folder) / "store")
        result = run(SHORT.get(given.sdk, given.sdk), url, given.kills, given.seed)
    print(f"{given.sdk}: {given.kills} kills, {result}: all that was told is there, once")


if __name__ == "__main__":
    main()
