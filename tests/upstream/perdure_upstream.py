"""A plug-in for pytest that puts perdure in the place of an SDK's own stores.

It is loaded before the SDK's tests, from a folder of its own, since they have a package ``tests``,
too. ``PERDURE_UPSTREAM`` says whose stores they get: ``theirs``, ``ours``, or ``ours-sdk-serde``.
The outcome of each test goes into the file that ``PERDURE_UPSTREAM_REPORT`` names.
"""

from __future__ import annotations

import json
import os
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

WHOSE = os.environ.get("PERDURE_UPSTREAM", "theirs")
SDK = os.environ.get("PERDURE_UPSTREAM_SDK", "")
_numbers = count()
_folder = tempfile.TemporaryDirectory(prefix="perdure-upstream-")
_outcomes: dict[str, str] = {}


def url_of(place: Any) -> str:
    """Return a store of perdure's for what an SDK's own store is given."""
    text = str(place)
    if text.startswith((":memory:", "file::memory:")):
        return f"sqlite:///{_folder.name}/{next(_numbers)}.db"
    return f"sqlite:///{_folder.name}/{text.strip('/').replace('/', '-')}.db"


def in_langgraph() -> None:
    import langgraph.checkpoint.sqlite as saver
    import langgraph.checkpoint.sqlite.aio as aio_saver
    import langgraph.store.sqlite as store
    import langgraph.store.sqlite.aio as aio_store
    import langgraph.store.sqlite.base as base_store
    from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

    from perdure.adapters import PerdureSaver, PerdureStore

    class Saver(PerdureSaver):  # type: ignore[misc]  # final for others
        @classmethod
        def from_conn_string(cls, conn_string: Any = None, **options: Any) -> Any:
            if WHOSE == "ours-sdk-serde":
                options.setdefault("serde", JsonPlusSerializer())
            return super().from_conn_string(url_of(conn_string), **options)

    class Store(PerdureStore):  # type: ignore[misc]
        @classmethod
        def from_conn_string(cls, conn_string: Any = None, **options: Any) -> Any:
            return super().from_conn_string(url_of(conn_string), **options)

    saver.SqliteSaver = aio_saver.AsyncSqliteSaver = Saver  # type: ignore[assignment, misc]
    store.SqliteStore = base_store.SqliteStore = Store  # type: ignore[assignment, misc]
    store.AsyncSqliteStore = aio_store.AsyncSqliteStore = Store  # type: ignore[assignment, misc]


def in_openai_agents() -> None:
    import agents
    import agents.extensions.memory
    import agents.extensions.memory.async_sqlite_session as aio
    import agents.memory
    import agents.memory.sqlite_session as own

    from perdure.adapters import PerdureSession

    class Session(PerdureSession):  # type: ignore[misc]  # final for others
        def __init__(
            self,
            session_id: str,
            db_path: Any = ":memory:",
            *_: Any,
            session_settings: Any = None,
        ) -> None:
            super().__init__(session_id, None, session_settings=session_settings)
            self._connection.url = url_of(db_path)

        def close(self) -> None:
            """Do nothing: theirs is synchronous."""

    class AsyncSession(Session):
        async def close(self) -> None:  # type: ignore[override]
            await self.aclose()

    for module in (agents, agents.memory, own):
        module.SQLiteSession = Session  # type: ignore[attr-defined]
    for module in (agents.extensions.memory, aio):
        module.AsyncSQLiteSession = AsyncSession  # type: ignore[attr-defined]


def in_pydantic_ai_harness() -> None:
    import pydantic_ai_harness.step_persistence as steps

    from perdure.adapters import PerdureStepStore

    class Store(PerdureStepStore):  # type: ignore[misc]  # final for others
        def __init__(
            self, database: Any = ":memory:", *, media_store: Any = None, **of: Any
        ) -> None:
            del media_store  # media are in the messages' own records
            super().__init__(None, **{name: each for name, each in of.items() if each is not None})
            self._connection.url = url_of(database)

    steps.SqliteStepStore = Store  # type: ignore[assignment, misc]


PUT = {
    "langgraph": in_langgraph,
    "langgraph-checkpoint-sqlite": in_langgraph,
    "openai-agents": in_openai_agents,
    "pydantic-ai-harness": in_pydantic_ai_harness,
}


def uses_store(item: Any) -> bool:
    """Whether a test of LangGraph's gets what perdure stands in for."""
    given = getattr(item, "callspec", None)
    return given is not None and any(
        str(value).startswith("sqlite")
        for name, value in given.params.items()
        if name in ("sync_checkpointer", "async_checkpointer")
    )


def pytest_configure(config: Any) -> None:  # noqa: ARG001
    if WHOSE != "theirs":
        PUT[SDK]()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if SDK == "langgraph":
        kept = [item for item in items if uses_store(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        before = _outcomes.get(report.nodeid, "passed")
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        _outcomes[report.nodeid] = before if before == "failed" else outcome


def pytest_sessionfinish(session: Any) -> None:
    if not hasattr(session.config, "workerinput"):
        text = json.dumps(_outcomes, indent=0, sort_keys=True)
        Path(os.environ["PERDURE_UPSTREAM_REPORT"]).write_text(text, encoding="utf-8")
