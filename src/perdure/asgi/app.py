"""One manager for an ASGI application: its lifespan, its requests, its streams, its probes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar, final

import anyio
from anyio.abc import TaskGroup

from perdure._connect import connect
from perdure.asgi import responses
from perdure.asgi.feed import Channel, Cursor, Feed
from perdure.asgi.runs import Answer, Run, answer_in
from perdure.autosave.options import Autosave
from perdure.errors import OwnerMismatchError, SessionError
from perdure.formats.state import StateStorage
from perdure.observe import Metrics
from perdure.records.keys import DEFAULT_SESSION, SessionKey, session_key
from perdure.session.base import Turn, turn_reused
from perdure.session.manager import SessionManager
from perdure.session.session import Session
from perdure.store import Store

log: logging.Logger = logging.getLogger("perdure.asgi")
S = TypeVar("S")

NOTICE: Final = 1.0
"""Seconds after the last turn was cut in which the requests that are open should end."""


@final
class AppSessions:
    """The sessions of an ASGI application, kept by one manager for each process.

        sessions = AppSessions()
        app = FastAPI(lifespan=sessions.lifespan)
        app.add_middleware(sessions.middleware)
        app.mount("/health", sessions.probes)
        app.add_route("/metrics", sessions.metrics)

    At SIGTERM the manager saves at once, streams that only listen end, and turns have ``grace``
    seconds; then they are cut, and what came of their answers is kept. The server's own
    handler of the signal runs, too.

    Args:
        url: Where sessions are kept: as for `perdure.connect`.
        grace: Seconds that turns have to end at SIGTERM, or when the lifespan ends.
        poll: Seconds between two looks at a session that another process writes, while a
            client listens to it.
        options: Everything else that `perdure.connect` takes. ``autosave`` is
            ``Autosave.server()`` if it is not given.

    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store | StateStorage | None = None,
        *,
        grace: float = 5.0,
        poll: float = 0.5,
        **options: Any,
    ) -> None:
        self._connect = (url, {"autosave": Autosave.server(), **options})
        self._grace = grace
        self._poll = poll
        self._manager: SessionManager | None = None
        self._feed: Feed | None = None
        self._running: set[Run] = set()
        self._group: TaskGroup | None = None
        self._drained: anyio.Event | None = None
        self._requests: dict[object, str] = {}
        self._metrics: Metrics | None = None
        self.at_drain: list[Callable[[], Awaitable[object]]] = []
        """Awaited when turns have had their time, and before those that still run are cut."""

    @property
    def manager(self) -> SessionManager:
        """The manager.

        Raises:
            SessionError: The lifespan has not begun.

        """
        return _started(self._manager)

    @property
    def feed(self) -> Feed:
        """The events of its sessions.

        Raises:
            SessionError: The lifespan has not begun.

        """
        return _started(self._feed)

    @property
    def metrics(self) -> Metrics:
        """The metrics of this process, as an ASGI application: ``GET /metrics``.

        Nothing is counted before they are asked for: ask where the application is made.
        """
        if self._metrics is None:
            self._metrics = Metrics() if self._manager is None else Metrics(self._manager)
        return self._metrics

    @property
    def draining(self) -> bool:
        """True while the process stops: new sessions are refused."""
        return self._feed is not None and self._feed.draining

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Any = None) -> AsyncGenerator[None, None]:
        """Connect, and close at the end: ``FastAPI(lifespan=sessions.lifespan)``."""
        url, options = self._connect
        async with connect(url, **options) as manager, anyio.create_task_group() as group:
            self._manager, self._group = manager, group
            if self._metrics is not None:
                self._metrics.add(manager)
            self._feed = Feed(manager, poll=self._poll)
            self._drained = anyio.Event()
            forget = manager.on("drain", self._begin_drain)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    manager.drain()
                    await self._begin_drain()
                    await self._drained.wait()
                forget()
                if self._metrics is not None:
                    self._metrics.close()
                group.cancel_scope.cancel()

    async def _begin_drain(self, _: object = None) -> None:
        if not self.feed.draining:
            self.feed.drain()
            _started(self._group).start_soon(self._drain, name="perdure:drain")

    async def _drain(self) -> None:
        drained = _started(self._drained)
        try:
            with anyio.CancelScope(shield=True):
                # 1. Turns have their time.
                with anyio.move_on_after(self._grace):
                    for run in tuple(self._running):
                        await run.done.wait()
                # 2. What was registered is ended, such as agents.
                for end in self.at_drain:
                    await end()
                running = tuple(self._running)
                # 3. Turns that still run are cut, and keep what has come.
                for run in running:
                    run.scope.cancel()
                for run in running:  # what it has left is kept
                    await run.done.wait()
        finally:
            drained.set()
        await anyio.sleep(NOTICE)
        if self._requests:
            log.warning(
                "%d requests are still open (such as %s): the server waits for them; a uvicorn "
                "of your own does so for ever, unless it has --timeout-graceful-shutdown",
                len(self._requests),
                min(self._requests.values()),
            )

    # requests

    def middleware(self, app: responses.ASGIApp) -> responses.ASGIApp:
        """Wrap an application: errors of perdure's become problems in JSON, with their status.

        A URL that is no UTF-8 is refused with 400: a framework would take all of them for one id.
        """

        async def wrapped(
            scope: responses.Scope, receive: responses.Receive, send: responses.Send
        ) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            started = False

            async def sending(message: Any) -> None:
                nonlocal started
                started = True
                await send(message)

            request = object()
            self._requests[request] = scope["path"]
            try:
                responses.check_url(scope)
                await app(scope, receive, sending)
            except Exception as error:
                problem = responses.problem_of(error)
                if started or (problem.status == 500 and not responses.is_logged(error)):
                    raise  # the server logs it
                answer = responses.problem_response(responses.answered(error))
                await answer(scope, receive, send)
            finally:
                del self._requests[request]

        return wrapped

    @contextlib.asynccontextmanager
    async def turn(
        self,
        id: str,
        turn_id: str | None = None,
        *,
        request: str | bytes | None = None,
        **options: Any,
    ) -> AsyncGenerator[tuple[Session, Turn], None]:
        """Open a session for a request, and run a turn in it: ``as (session, turn)``.

        Requests for the same session are answered in the order in which they come. Leaving it
        waits until everything is durable.

        Args:
            id: The agent's id.
            turn_id: The request's own id: of a request that is sent again, ``turn.replayed`` is
                True, and ``turn.messages`` has what was said: there is nothing left to do.
            request: What is asked, such as the request's body: a ``turn_id`` that comes again
                with another one is refused with 422.
            options: As for `SessionManager.open`.

        Raises:
            SessionClosedError: The process stops.
            LeaseHeldError: Another process keeps holding the session.
            TurnReusedError: The turn was begun with another request.

        """
        async with (
            self.manager.open(id, **options) as session,
            session.turn(turn_id, request=request) as turn,
        ):
            yield session, turn

    def stream(
        self,
        id: str,
        answer: Answer,
        *,
        turn_id: str | None = None,
        request: str | bytes | None = None,
        linger: float | None = 10.0,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        owner: str | None = None,
    ) -> responses.FeedResponse:
        """Return a response that streams the answer of a turn as server-sent events.

        The turn's last event is sent when everything is durable. A client that comes back with
        the same ``turn_id``, and with the ``Last-Event-ID`` that it has seen, gets what follows,
        also after a restart.

        Args:
            id: The agent's id.
            answer: Appends the question, and yields the answer in pieces. The answer is appended
                by itself.
            turn_id: The request's own id. One that runs is joined, and one that has ended is not
                run again.
            request: What is asked, such as the request's body: a ``turn_id`` that comes again
                with another one is refused with 422.
            linger: Seconds for which the turn continues when its client has gone away. Then it is
                cut: what came of the answer is kept as an interrupted message. None: it continues
                to its end.
            session: Which of the agent's conversations.
            tenant: Whose it is, where customers share a store.
            owner: Who it belongs to: as for `SessionManager.open`.

        """
        key = session_key(id, session, tenant)

        async def work(run: Run, channel: Channel) -> None:
            opening = self.manager.open(id, session=session, tenant=tenant, owner=owner)
            async with opening as opened:
                run.outcome = await answer_in(opened, run, channel, answer)

        run = self.start(key, turn_id, work, request=request, owner=owner)
        return self.respond(run, linger=linger)

    def start(
        self,
        key: SessionKey,
        turn: str | None,
        work: Callable[[Run, Channel], Awaitable[None]],
        *,
        request: str | bytes | None = None,
        owner: str | None = None,
    ) -> Run:
        """Run a turn in a task of the application, or join the one of this id that runs.

        Args:
            key: The session.
            turn: The turn's id; None: it joins no other.
            work: Does it: checks the session's owner, calls ``run.begin``, and sets
                ``run.outcome``.
            request: What is asked: kept as ``run.request``, for ``session.turn``.
            owner: Whose request it is: kept as ``run.owner``. It joins no turn of another owner's
                request: its own ``work`` is refused as it would be without that turn.

        Raises:
            SessionClosedError: The process stops.
            TurnReusedError: The one that runs has been asked something else.

        """
        group = _started(self._group)
        for run in self._running:
            if turn is not None and (run.key, run.turn, run.owner) == (key, turn, owner):
                if None not in (request, run.request) and run.request != request:
                    raise turn_reused(key, turn)
                return run
        run = Run(self.feed, key, turn, request, owner)
        self._running.add(run)
        group.start_soon(self._run, run, work, name="perdure:turn")
        return run

    async def _run(self, run: Run, work: Callable[[Run, Channel], Awaitable[None]]) -> None:
        with self.feed.channel(run.key) as channel:
            try:
                with run.scope:
                    await work(run, channel)
                if not run.begun.is_set():  # cut while it waited for the turn before it
                    run.error = run.interrupted()
            except Exception as error:  # noqa: BLE001  # raised in the waiter
                responses.answered(error)  # perhaps there is none
                run.error = error
            finally:
                self._running.discard(run)
                if run.begun.is_set():  # else the text there is of the turn that it waited for
                    channel.clear()
                run.begun.set()
                run.done.set()

    def respond(self, run: Run, *, linger: float | None = None) -> responses.FeedResponse:
        """Return a response that streams a turn which `start` has begun.

        Args:
            run: The turn.
            linger: Seconds for which it continues when no one reads it any more; None: to its end.

        """
        group = _started(self._group)
        run.readers += 1
        run.visits += 1

        def leave() -> None:
            run.readers -= 1
            if linger is not None and not run.readers and not run.done.is_set():
                cut = self._cut_unread
                group.start_soon(cut, run, linger, run.visits, name="perdure:cut unread turn")

        return responses.FeedResponse(run.events, leave)

    async def _cut_unread(self, run: Run, linger: float, visits: int) -> None:
        with anyio.move_on_after(linger):
            await run.done.wait()
        # A client that came back during the wait counts from when it leaves, if it has left.
        if run.visits == visits:
            run.scope.cancel()

    def events(
        self,
        id: str,
        *,
        session: str = DEFAULT_SESSION,
        tenant: str = "",
        owner: str | None = None,
    ) -> responses.FeedResponse:
        """Return a response that streams what happens in a session, whichever process writes it.

        It begins after the client's ``Last-Event-ID``, or else now, and needs no lease. It ends
        when the session is deleted, or gets another owner.

        Args:
            id: The agent's id.
            session: Which of the agent's conversations.
            tenant: Whose it is, where customers share a store.
            owner: Who it has to belong to: another's session is 404.

        """
        key = session_key(id, session, tenant)

        async def begin(cursor: Cursor | None) -> responses.Events:
            place = await self.feed.place(key, cursor)
            if owner is not None:  # looked at after the place: the stream reads no other session
                view = await self.manager.load(id, session=session, tenant=tenant, context=False)
                if view is None or view.info.metadata.owner != owner:
                    raise OwnerMismatchError(f"session {key} is not {owner!r}'s", key=str(key))
            return self.feed.events(key, place)

        return responses.FeedResponse(begin)

    # probes

    async def probes(
        self, scope: responses.Scope, receive: responses.Receive, send: responses.Send
    ) -> None:
        """Answer probes: ``/readyz`` says whether to send requests here, ``/healthz`` that it runs.

        Never restart the process because of readiness: what is unsaved exists only there.
        """
        if scope["type"] != "http":
            return
        path = scope["path"].rstrip("/")
        if scope["method"] not in {"GET", "HEAD"}:
            allowed = {"allow": "GET, HEAD"}
            problem = responses.Problem(405, "Method Not Allowed", headers=allowed)
            answer = responses.problem_response(problem)
        elif path.endswith("/healthz"):
            answer = responses.json_response({"status": "ok"})
        elif path.endswith("/readyz"):
            ready, facts = self.readiness()
            answer = responses.json_response(facts, 200 if ready else 503)
        else:
            answer = responses.problem_response(responses.Problem(404, "Not found"))
        await answer(scope, receive, send)

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether requests are taken, and how saving goes."""
        if self._manager is None or self.draining:
            return False, {"ready": False, "status": "draining" if self._manager else "starting"}
        health = self._manager.health()
        ready = health.status != "failing"
        age = round(health.oldest_unsaved_age, 3)
        return ready, {"ready": ready, "status": health.status, "oldest_unsaved_age": age}


def _started(value: S | None) -> S:
    """Return what the lifespan has made.

    Raises:
        SessionError: The lifespan has not begun.

    """
    if value is None:
        raise SessionError(
            "the application's lifespan has not begun: pass `lifespan=sessions.lifespan` to the "
            "framework, and let the server run it"
        )
    return value
