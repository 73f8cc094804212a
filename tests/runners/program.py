"""A user's program, run by one runner: scenarios that work, and two that SIGTERM ends.

    python -m tests.runners.program RUNNER scenarios URL
    python -m tests.runners.program RUNNER sigterm URL    # says what it does until it is told to end
    python -m tests.runners.program RUNNER stubborn URL   # a body that cannot be cancelled

Prints a JSON value a line. Under a server the manager lives in its lifespan, and the
scenarios run in a request.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

if os.environ.get("WITHOUT_SNIFFIO"):
    sys.modules["sniffio"] = None  # type: ignore[assignment]  # as if it were not installed

import anyio

import perdure
from perdure import Autosave, Limits, Message, SessionManager, Shutdown
from tests.runners import SERVERS, run

HANG = 60.0
"""Seconds after which something hangs, on the slowest machine."""
SOON = Autosave(debounce=0.1, max_delay=0.3)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def on_trio() -> bool:
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_run()


def soon() -> Callable[..., object]:
    """Return what calls a function from a bare callback of the loop, from any thread."""
    if on_trio():
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon
    import asyncio

    return asyncio.get_running_loop().call_soon_threadsafe


async def until(true: Callable[[], object], what: str) -> None:
    """Wait for what autosave does by itself."""
    with anyio.move_on_after(HANG):
        while not true():
            await anyio.sleep(0.02)
    assert true(), f"never happened: {what}"


def connect(url: str, **options: Any) -> Any:
    options.setdefault("autosave", SOON)
    options.setdefault("limits", Limits(fold_records=40, fold_ratio=0.1))
    return perdure.connect(url, **options)


# scenarios


async def overlapping_saves(sessions: SessionManager, url: str) -> None:
    """Three tasks append and save on one session; others are saved by themselves."""
    async with sessions.open("busy") as session, sessions.open("calm") as calm:

        async def work(name: int) -> None:
            for n in range(40):
                session.append(Message.user(f"{name} {n}"))
                await session.save()

        calm.append(Message.user("by itself"))
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as group:
                for name in range(3):
                    group.start_soon(work, name)
        assert session.durable_version == session.version
        await until(lambda: calm.durable_version == calm.version, "an autosave")
        calm.append(Message.user("and again"))
        await until(lambda: calm.durable_version == calm.version, "an autosave after saves")


async def bare_callbacks(sessions: SessionManager, url: str) -> None:
    """Records come from callbacks of the loop and from threads, with and without a debounce."""
    for name, autosave in (("late", SOON), ("through", Autosave.write_through())):
        async with sessions.open(name, autosave=autosave) as session:
            call = soon()
            for n in range(5):
                call(session.append, Message.user(f"callback {n}"))
            thread = threading.Thread(target=call, args=(session.append, Message.user("thread")))
            thread.start()
            await until(lambda s=session: s.durable_version >= 6, "a save of what a callback said")
            await until(lambda s=session: s.durable_version == s.version, "all of it")
            thread.join(HANG)


async def folds(sessions: SessionManager, url: str) -> None:
    """A long log is folded while the session goes on."""
    folded: list[object] = []
    off = sessions.on("folded", folded.append)
    async with sessions.open("long") as session:
        for n in range(200):
            session.append(Message.user(f"{n}"))
            if n % 20 == 0:
                await session.save()
        await session.save()
        await until(lambda: folded, "a fold")
        session.append(Message.user("after the fold"))
        await session.save()
    off()


async def hooks(sessions: SessionManager, url: str) -> None:
    """Async hooks are called, and awaited; one that fails does no harm."""
    heard: list[str] = []

    async def before(session: Any) -> None:
        await anyio.sleep(0)
        heard.append("before")

    async def after(event: object) -> None:
        await anyio.sleep(0)
        heard.append("after")

    async def fail(event: object) -> None:
        await anyio.sleep(0)
        raise ValueError("a hook of the user's")

    offs = [
        sessions.on("before_save", before),
        sessions.on("saved", after),
        sessions.on("saved", fail),
    ]
    async with sessions.open("hooked") as session:
        session.append(Message.user("by itself"))
        await until(lambda: "after" in heard, "an async hook after an autosave")
        session.append(Message.user("now"))
        with anyio.fail_after(HANG):
            await session.save()
        await until(lambda: heard.count("after") > 1, "an async hook after a save")
    assert "before" in heard
    for off in offs:
        off()


async def inbox(sessions: SessionManager, url: str) -> None:
    """What others post to a session is taken by its holder."""
    async with sessions.open("posted") as session:
        async with connect(url, shutdown=Shutdown(signals=False)) as others:
            await others.post("posted", Message.user("from elsewhere"))
        texts: Callable[[], list[str]] = lambda: [m.text for m in session.context()]  # noqa: E731
        await until(lambda: "from elsewhere" in texts(), "a post")
        await until(lambda: session.durable_version == session.version, "a save of it")


async def handover(sessions: SessionManager, url: str) -> None:
    """Another manager asks for a session, and gets it with all that was said."""
    async with sessions.open("wanted") as session:
        session.append(Message.user("first"))
    async with connect(url, shutdown=Shutdown(signals=False)) as others:
        with anyio.fail_after(HANG):
            async with others.open("wanted", wait=HANG) as session:
                assert [m.text for m in session.context()] == ["first"]
                session.append(Message.user("second"))
                await session.save()
            async with sessions.open("wanted", wait=HANG) as session:
                assert [m.text for m in session.context()] == ["first", "second"]


async def turns(sessions: SessionManager, url: str) -> None:
    """Turns end durably; a session is closed and comes back."""
    async with sessions.open("turns") as session:
        for n in range(20):
            async with session.turn():
                session.append(Message.user(f"Q{n}"))
                session.append(Message.assistant(f"A{n}"))
            assert session.durable_version == session.version
        with anyio.fail_after(HANG):
            await session.aclose()
    async with sessions.open("turns") as session:
        assert len(session.context()) == 40
    assert sessions.health().status == "ok", sessions.health()


SCENARIOS = (overlapping_saves, bare_callbacks, folds, hooks, inbox, handover, turns)


async def scenarios(sessions: SessionManager, url: str) -> None:
    for scenario in SCENARIOS:
        try:
            await scenario(sessions, url)
        except Exception as error:
            say(scenario=scenario.__name__, ok=False, error=repr(error))
            raise
        say(scenario=scenario.__name__, ok=True)


async def talk(sessions: SessionManager, url: str) -> None:
    """Append without end, and say what was accepted and what is durable."""

    async def drained(_: object) -> None:
        await anyio.sleep(0)
        say(drained=True)

    sessions.on("drain", drained)
    async with sessions.open("talk") as session:
        for n in range(100_000):
            say(sending=n)
            session.append(Message.user(str(n)))
            if n % 7 == 0:
                await session.save()
                say(durable=n)
            await anyio.sleep(0.002)


async def resist(sessions: SessionManager, url: str) -> None:
    """Go on, whatever is cancelled; a turn never ends."""

    async def drained(_: object) -> None:
        await anyio.sleep(0)
        say(drained=True)

    sessions.on("drain", drained)
    async with sessions.open("talk") as session:
        session.append(Message.user("0"))
        say(sending=0)
        await session.save()
        say(durable=0)
        with anyio.CancelScope(shield=True):
            while True:
                try:
                    await anyio.sleep(0.05)
                except BaseException:  # noqa: BLE001  # it is what this body is about
                    say(resisted=True)


WORKS: dict[str, Callable[[SessionManager, str], Awaitable[None]]] = {
    "scenarios": scenarios,
    "sigterm": talk,
    "stubborn": resist,
}
SHUTDOWN = Shutdown(deadline=3.0, turn_grace=0.5, hard_grace=0.5)


async def program(work: str, url: str) -> None:
    async with connect(url, shutdown=SHUTDOWN) as sessions:
        await WORKS[work](sessions, url)
    say(closed=True)


# under a server


@contextmanager
def asked_for(port: int) -> Iterator[None]:
    """Ask the server for the work, from outside, once it runs."""

    def ask() -> None:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/work", timeout=300) as answer:
                    say(answered=json.loads(answer.read()))
                    return
            except (OSError, ValueError):
                if stop.wait(0.1):
                    return

    stop = threading.Event()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()


def serve(loop: str, work: str, url: str) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    @asynccontextmanager
    async def lifespan(app: Any) -> Any:
        async with connect(url, shutdown=SHUTDOWN) as sessions:
            app.state.sessions = sessions
            yield
        say(closed=True)

    async def worked(request: Any) -> JSONResponse:
        await WORKS[work](request.app.state.sessions, url)
        server.should_exit = True
        return JSONResponse({"ok": True})

    import socket

    listening = socket.create_server(("127.0.0.1", 0))
    app = Starlette(lifespan=lifespan, routes=[Route("/work", worked)])
    config = uvicorn.Config(app, loop=loop, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with asked_for(listening.getsockname()[1]):
        server.run(sockets=[listening])


def main(runner: str, work: str, url: str) -> None:
    import logging

    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    if runner in SERVERS:
        serve(SERVERS[runner], work, url)
    else:
        run(runner, lambda: program(work, url))


if __name__ == "__main__":
    main(*sys.argv[1:])
