"""What the inspector's pages cost: very many sessions in a store, one of them long.

Files and SQLite. Each page is asked for as HTML and as JSON in the server's own process, so that a
figure is server time: from the request to the answer's last byte, in ms. The sessions are as their
programs left them, closed; some have posts that nobody has received. A page's figure is the slower
of the two forms, at the 25th percentile of its rounds; the first request of each page, with nothing
in memory, is a figure of its own. Judged is the slowest page of a store.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import anyio
import httpx

import perdure
import perdure.inspector
from benchmarks.figures import Report, Row
from benchmarks.timing import quartile
from perdure import Message, Session, SessionManager, Shutdown, ToolCall

__all__ = ["Options", "run"]

TOKEN = "a-token-of-the-benchmark"
STORES = {"file": "file:{folder}/files", "sqlite": "sqlite:///{folder}/store.db"}
AT_ONCE = 100
"""Sessions that are filled side by side."""
TURNS = 100
"""Of the long session, in one save."""
CHECKPOINTS = 20
ENTRIES = 200
"""Of the long session's memory."""


class Options(NamedTuple):
    """How many sessions, how long the long one is, and how often each page is asked for."""

    sessions: int = 10_000
    messages: int = 50_000
    rounds: int = 5
    folder: Path | None = None


def run(options: Options) -> Report:
    """Measure both stores, on asyncio."""
    rows: list[Row] = []
    details = {}
    for store, url in STORES.items():
        with tempfile.TemporaryDirectory(prefix="perdure-", dir=options.folder) as folder:
            place = url.format(folder=folder)
            anyio.run(_fill, place, options)
            first, again = anyio.run(_measure, place, options)
        details[store] = {"first": first, "again": again}
        rows += [
            Row(f"inspector.{store}.{page}", taken, f"ms; {first[page]:,.0f} the first time")
            for page, taken in again.items()
        ]
        for name, figures in (("first_ms", first), ("slowest_ms", again)):
            page = max(figures, key=figures.__getitem__)
            rows.append(Row(f"inspector.{store}.{name}", figures[page], f"the slowest: {page}"))
    return Report(rows, {**options._asdict(), "folder": None, **details})


def _manager(url: str) -> SessionManager:
    return perdure.connect(url, autosave=None, shutdown=Shutdown(signals=False, deadline=600))


async def _fill(url: str, options: Options) -> None:
    """Make the sessions, and close them."""
    async with _manager(url) as sessions:
        for start in range(0, options.sessions, AT_ONCE):
            async with anyio.create_task_group() as tasks:
                for number in range(start, min(start + AT_ONCE, options.sessions)):
                    tasks.start_soon(_fill_short, sessions, number)
        async with sessions.open("long", owner="ada") as session:
            await _fill_long(session, options.messages)
        for number in range(0, options.sessions, 100):
            await sessions.post(f"agent-{number:06}", Message.user("a post"), key="post")


async def _fill_short(sessions: SessionManager, number: int) -> None:
    owner, tags = f"owner-{number % 7}", [f"tag-{number % 5}"]
    async with sessions.open(f"agent-{number:06}", owner=owner, tags=tags) as session:
        session.describe(title=f"Conversation {number}")
        async with session.turn():
            session.append(Message.user(f"question {number}"), Message.assistant("an answer"))
    await session.aclose()


async def _fill_long(session: Session, messages: int) -> None:
    for number in range(ENTRIES):
        session.memory.set(f"entry-{number}", {"text": "what was said " * 20})
    for number in range(messages // 4):
        call = ToolCall(f"call-{number}", "tide_table", {"place": "Cuxhaven", "day": number})
        session.append(
            Message.user(f"When is low tide on day {number}, and where do I walk?"),
            Message.assistant(reasoning="The table has it.", tool_calls=[call]),
            Message.tool(call.id, {"low": ["02:05", "14:20"]}, name=call.name),
            Message.assistant("Low tide is at 14:20. " * 5),
        )
        if number % TURNS == TURNS - 1:
            session.state.set("route", {"stage": number})
            await session.save()
        if number % max(messages // 4 // CHECKPOINTS, 1) == 0:
            await session.checkpoints.create(f"stage {number}")


def _pages(options: Options) -> dict[str, str]:
    """Return the addresses that are asked for, by the name of their figure."""
    deep = f"agent-{options.sessions // 2:06}"
    middle, long = options.messages // 2, "agent=long"
    return {
        "sessions": "/",
        "sessions_further": f"/?order=id&after={deep}",
        "sessions_owner": "/?owner=owner-3",
        "sessions_prefix": f"/?prefix={deep[:-2]}",
        "sessions_search": "/?q=found-nowhere",
        "complete": f"/complete?prefix={deep[:-2]}",
        "inbox": "/inbox",
        "live": "/live",
        "short": f"/session?agent={deep}",
        "short_delivery": f"/delivery?agent={deep}",
        "conversation": f"/session?{long}",
        "conversation_middle": f"/session?{long}&before={middle}",
        "conversation_first": f"/session?{long}&before=40",
        "timeline": f"/session?{long}&view=timeline&before={middle}",
        "raw": f"/session?{long}&view=raw&before={middle}&limit=200",
        "part": f"/part?{long}&seq={middle}&part=0",
        "status": f"/status?{long}",
        "revision": "/revision",
        "workers": "/workers",
        "context": f"/context?{long}",
        "context_openai": f"/context?{long}&target=openai",
        "context_anthropic": f"/context?{long}&target=anthropic",
        "states": f"/states?{long}",
        "value": f"/value?{long}&kind=memory&name=entry-7",
        "checkpoints": f"/checkpoints?{long}",
        "checkpoints_diff": f"/checkpoints?{long}&a=1&b={CHECKPOINTS}",
        "checkpoints_verify": f"/checkpoints?{long}&verify=1",
        "restore": f"/restore?{long}",
        "restore_gemini": f"/restore?{long}&target=gemini",
        "delivery": f"/delivery?{long}",
        "change_rollback": f"/change?{long}&change=rollback&checkpoint=1",
        "change_fork": f"/change?{long}&change=fork&at={middle}",
        "change_rebuild": f"/change?{long}&change=rebuild",
        "change_forget": f"/change?{long}&change=forget",
        "actions": "/actions",
    }


async def _measure(url: str, options: Options) -> tuple[dict[str, float], dict[str, float]]:
    """Return what each page takes in ms: the first time, and later."""
    first: dict[str, float] = {}
    later: dict[str, list[list[float]]] = {}
    async with _manager(url) as sessions:
        app = perdure.inspector.app(sessions, token=TOKEN, allow_changes=True)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://localhost",
            headers={"authorization": f"Bearer {TOKEN}"},
        ) as http:
            for number in range(options.rounds + 1):
                for page, address in _pages(options).items():
                    taken = [await _ask(http, address, form) for form in ("html", "json")]
                    if number:
                        later.setdefault(page, []).append(taken)
                    else:
                        first[page] = max(taken)
    again = {page: max(map(quartile, zip(*taken, strict=True))) for page, taken in later.items()}
    return first, again


async def _ask(http: httpx.AsyncClient, address: str, form: str) -> float:
    if form == "json":
        address += ("&" if "?" in address else "?") + "format=json"
    start = perf_counter()
    response = await http.get(address)
    taken = perf_counter() - start
    if response.status_code != 200:
        raise SystemExit(f"{address}: {response.status_code}: {response.text[:500]}")
    return taken * 1e3
