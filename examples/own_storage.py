"""A storage of your own, such as a bucket or a table: six methods over the agent's whole state.

This one keeps the state as one JSON file. Run it twice, then look into the file: others
can read it, and what they change counts at the next start.
"""

from __future__ import annotations

import asyncio
import datetime
import os
from pathlib import Path

import anyio

from perdure.agent import Agent, EchoModel, PersistentSession
from perdure.formats import FullAgentState, read_state, write_state


class JsonFileStorage:
    """Keep one agent's state in one file; replaced in one step, so that it is never half."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = anyio.Path(path)

    async def save(self, state: FullAgentState) -> None:
        await self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".new")
        async with await anyio.open_file(temporary, "wb") as file:
            await file.write(write_state(state))
            await file.flush()
            await anyio.to_thread.run_sync(os.fsync, file.wrapped.fileno())
        await temporary.replace(self._path)

    async def load(self) -> FullAgentState | None:
        if not await self._path.exists():
            return None
        return read_state(await self._path.read_bytes(), where=str(self._path)).state

    async def exists(self) -> bool:
        return await self._path.exists()

    async def delete(self) -> None:
        await self._path.unlink(missing_ok=True)

    def get_path(self) -> str:
        return str(self._path)

    async def get_last_modified(self) -> datetime.datetime | None:
        if not await self._path.exists():
            return None
        modified = (await self._path.stat()).st_mtime
        return datetime.datetime.fromtimestamp(modified, datetime.UTC)


async def main() -> None:
    path = Path(os.environ.get("PERDURE_HOME", ".")) / "own-storage.json"
    kept = PersistentSession(storage=JsonFileStorage(path))
    async with Agent.create("my-assistant", model=EchoModel(), persistent_session=kept) as agent:
        before = len(agent.session.context())
        await agent.ask("Hello!")
        print(f"{before} messages were there, {len(agent.session.context())} are in {path.name}")


asyncio.run(main())
