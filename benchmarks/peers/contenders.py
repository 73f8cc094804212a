"""The contenders: how each product stores a turn through its public API, and the two raw limits.

A turn is four messages, 7.1 KB, and counts once the contender says that it is durable. Every
contender is used as its own documentation shows, with its defaults: perdure's file and SQLite
stores, the OpenAI Agents SDK's `SQLiteSession`, LangGraph's `AsyncSqliteSaver` under a graph of
one node, and Google ADK's `DatabaseSessionService` on SQLite. The limits are what the disk allows
without a product: JSON lines with one `fdatasync` a turn, and a SQLite thread that commits
whatever has arrived in one transaction. Pydantic AI stores in memory only, and is left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import perdure

__all__ = ["CONTENDERS", "Contender"]

Plain = tuple[dict[str, Any], ...]
"""A turn's messages, as an application has them."""


class Contender(ABC):
    """One way to keep sessions; sessions are named by numbers."""

    @abstractmethod
    async def open(self, folder: Path, sessions: int) -> None:
        """Open, or open again, the store in a folder, and its sessions."""

    @abstractmethod
    async def turn(self, number: int, messages: Plain) -> None:
        """Store a turn; it is durable when this returns."""

    @abstractmethod
    async def newest(self, number: int) -> int:
        """Return how many messages a session has among its newest 50."""

    @abstractmethod
    async def close(self) -> None:
        """Close the store."""


class _Perdure(Contender):
    url: str

    async def open(self, folder: Path, sessions: int) -> None:
        self._stack = AsyncExitStack()
        manager = perdure.connect(self.url.format(folder))
        self._manager = await self._stack.enter_async_context(manager)
        self._sessions = [await self._manager.open(f"s{n}") for n in range(sessions)]

    async def turn(self, number: int, messages: Plain) -> None:
        session = self._sessions[number]
        async with session.turn():  # leaving it waits until it is durable
            for one in messages:
                session.append(_message(one))

    async def newest(self, number: int) -> int:
        return len(await self._sessions[number].history(limit=50))

    async def close(self) -> None:
        await self._stack.aclose()


def _message(plain: dict[str, Any]) -> perdure.Message:
    if plain["role"] == "user":
        return perdure.Message.user(plain["content"])
    if plain["role"] == "tool":
        return perdure.Message.tool(plain["tool_call_id"], plain["content"], name=plain["name"])
    calls = [perdure.ToolCall(**call) for call in plain.get("tool_calls", ())]
    return perdure.Message.assistant(plain["content"], tool_calls=calls)


class PerdureFile(_Perdure):
    url = "{}/store"


class PerdureSqlite(_Perdure):
    url = "sqlite:///{}/store.db"


class OpenAIAgents(Contender):
    async def open(self, folder: Path, sessions: int) -> None:
        from agents import SQLiteSession

        path = folder / "openai.db"
        self._sessions = [SQLiteSession(f"s{n}", path) for n in range(sessions)]

    async def turn(self, number: int, messages: Plain) -> None:
        await self._sessions[number].add_items(list(messages))

    async def newest(self, number: int) -> int:
        return len(await self._sessions[number].get_items(limit=50))

    async def close(self) -> None:
        for session in self._sessions:
            session.close()


class LangGraph(Contender):
    async def open(self, folder: Path, sessions: int) -> None:
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
        from langgraph.graph import END, START, MessagesState, StateGraph

        self._stack = AsyncExitStack()
        saver = AsyncSqliteSaver.from_conn_string(str(folder / "langgraph.db"))
        graph = StateGraph(MessagesState)
        graph.add_node("answer", _nothing)
        graph.add_edge(START, "answer")
        graph.add_edge("answer", END)
        self._graph = graph.compile(checkpointer=await self._stack.enter_async_context(saver))

    async def turn(self, number: int, messages: Plain) -> None:
        from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

        user, wish, result, answer = messages
        (call,) = wish["tool_calls"]
        call = {"id": call["id"], "name": call["name"], "args": call["arguments"]}
        told = [
            HumanMessage(user["content"]),
            AIMessage(wish["content"], tool_calls=[call]),
            ToolMessage(json.dumps(result["content"]), tool_call_id=call["id"]),
            AIMessage(answer["content"]),
        ]
        thread = {"configurable": {"thread_id": f"s{number}"}}
        await self._graph.ainvoke({"messages": told}, thread, durability="sync")

    async def newest(self, number: int) -> int:
        state = await self._graph.aget_state({"configurable": {"thread_id": f"s{number}"}})
        return len(state.values["messages"][-50:])

    async def close(self) -> None:
        await self._stack.aclose()


def _nothing(_state: Any) -> dict[str, Any]:
    return {}


class GoogleADK(Contender):
    async def open(self, folder: Path, sessions: int) -> None:
        from google.adk.sessions import DatabaseSessionService

        path = folder / "adk.db"
        is_new = not path.exists()
        self._service = DatabaseSessionService(f"sqlite+aiosqlite:///{path}")
        who = {"app_name": "bench", "user_id": "u"}
        self._sessions = [
            await self._service.create_session(session_id=f"s{n}", **who)
            if is_new
            else await self._service.get_session(session_id=f"s{n}", **who)
            for n in range(sessions)
        ]

    async def turn(self, number: int, messages: Plain) -> None:
        from google.adk.events import Event
        from google.genai import types

        for one in messages:
            if one["role"] == "tool":
                part = types.Part.from_function_response(name=one["name"], response=one["content"])
            else:
                part = types.Part(text=one["content"])
            parts = [part]
            parts += [
                types.Part.from_function_call(name=call["name"], args=call["arguments"])
                for call in one.get("tool_calls", ())
            ]
            role = "model" if one["role"] == "assistant" else "user"
            event = Event(
                author="bench" if role == "model" else "user",
                invocation_id="i",
                content=types.Content(role=role, parts=parts),
            )
            await self._service.append_event(self._sessions[number], event)

    async def newest(self, number: int) -> int:
        from google.adk.sessions.base_session_service import GetSessionConfig

        found = await self._service.get_session(
            app_name="bench",
            user_id="u",
            session_id=f"s{number}",
            config=GetSessionConfig(num_recent_events=50),
        )
        return len(found.events)

    async def close(self) -> None:
        await self._service.close()


class JsonLines(Contender):
    """One file a session, one write and one `fdatasync` a turn, in a thread."""

    async def open(self, folder: Path, sessions: int) -> None:
        self._paths = [folder / f"s{n}.jsonl" for n in range(sessions)]
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._files = [os.open(path, flags, 0o600) for path in self._paths]

    async def turn(self, number: int, messages: Plain) -> None:
        data = "".join(json.dumps(one) + "\n" for one in messages).encode()
        await asyncio.to_thread(self._write, self._files[number], data)

    @staticmethod
    def _write(file: int, data: bytes) -> None:
        os.write(file, data)
        os.fdatasync(file)

    async def newest(self, number: int) -> int:
        text = await asyncio.to_thread(self._paths[number].read_text)
        return len([json.loads(line) for line in text.splitlines()[-50:]])

    async def close(self) -> None:
        for file in self._files:
            os.close(file)


class GroupCommit(Contender):
    """One SQLite thread: whatever has arrived since the last commit is the next transaction."""

    async def open(self, folder: Path, sessions: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[int, list[bytes], asyncio.Future[None]]] = []
        self._lock, self._arrived, self._ends = threading.Lock(), threading.Event(), False
        self._path = folder / "limit.db"
        self._thread = threading.Thread(target=self._commit)
        self._thread.start()

    async def turn(self, number: int, messages: Plain) -> None:
        done = self._loop.create_future()
        lines = [json.dumps(one).encode() for one in messages]
        with self._lock:
            self._waiting.append((number, lines, done))
        self._arrived.set()
        await done

    def _commit(self) -> None:
        database = sqlite3.connect(self._path, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute(
            "CREATE TABLE IF NOT EXISTS log (id INTEGER PRIMARY KEY, session INT, data BLOB)"
        )
        while self._arrived.wait() and not (self._ends and not self._waiting):
            self._arrived.clear()
            with self._lock:
                batch, self._waiting = self._waiting, []
            database.execute("BEGIN IMMEDIATE")
            rows = [(number, data) for number, lines, _ in batch for data in lines]
            database.executemany("INSERT INTO log (session, data) VALUES (?, ?)", rows)
            database.execute("COMMIT")
            self._loop.call_soon_threadsafe(_resolve, [done for _, _, done in batch])
            if self._waiting or self._ends:
                self._arrived.set()
        database.close()

    async def newest(self, number: int) -> int:
        def read() -> int:
            database = sqlite3.connect(self._path)
            rows = database.execute(
                "SELECT data FROM log WHERE session = ? ORDER BY id DESC LIMIT 50", (number,)
            ).fetchall()
            database.close()
            return len([json.loads(data) for (data,) in rows])

        return await asyncio.to_thread(read)

    async def close(self) -> None:
        self._ends = True
        self._arrived.set()
        await asyncio.to_thread(self._thread.join)


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


CONTENDERS: dict[str, type[Contender]] = {
    "file": PerdureFile,
    "sqlite": PerdureSqlite,
    "openai": OpenAIAgents,
    "langgraph": LangGraph,
    "adk": GoogleADK,
    "jsonl": JsonLines,
    "limit": GroupCommit,
}
"""By the name that figures have; ``limit`` is SQLite's group commit."""
