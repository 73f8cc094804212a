"""The HTTP API of an agent: routes above `perdure.asgi`, and the agents that answer.

An agent is opened by its first request, kept warm, and given away when asked. One whose session
another process has taken over is opened again, which asks for it back. A message has its turn's
id, so trying it again doubles nothing.
"""

from __future__ import annotations

import contextlib
import heapq
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, Final, final

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from perdure._lib.ids import random_id
from perdure.agent import Agent, AgentConfig, AgentFactory
from perdure.agent.events import AgentStopped, Segment, TurnEnded, TurnFailed, TurnStarted
from perdure.asgi.app import AppSessions
from perdure.asgi.feed import Channel, message_fields
from perdure.asgi.responses import (
    ASGIApp,
    Problem,
    Receive,
    Scope,
    Send,
    answered,
    json_response,
    problem_response,
)
from perdure.asgi.runs import Run, RunOutcome
from perdure.errors import (
    LeaseLostError,
    SessionClosedError,
    SessionError,
)
from perdure.records.keys import SessionKey, session_key
from perdure.records.messages import Message
from perdure.serve.access import Access, Token, not_found
from perdure.serve.openapi import AgentListed, AgentPage, AgentShown, Answered, PostedBody, describe
from perdure.session.internals import contents_of
from perdure.session.manager import SessionManager
from perdure.session.session import SessionView
from perdure.store import SessionInfo

TRIES: Final = 3
"""The number of times that a message is given to an agent whose session was taken over."""

Source = AgentConfig | Callable[[str], AgentConfig | Awaitable[AgentConfig]]
"""The configuration of an agent: the same for all, or by the agent's id."""


class _Warm:
    """An agent that runs, and who uses it."""

    def __init__(self, agent: Agent, owner: str | None) -> None:
        self.agent = agent
        self.owner = owner
        self.users = 0
        self.idle_since = anyio.current_time()


@final
class AgentPool:
    """The agents of one process.

    Args:
        app: The application's sessions.
        source: What an agent is made of.
        keep: Seconds for which an unused agent stays open.
        most: How many agents stay open; those that wait for the next message longest are closed.

    """

    def __init__(
        self, app: AppSessions, source: Source, *, keep: float, most: int | None = None
    ) -> None:
        self._app = app
        self._source = source
        self._keep = keep
        self._most = most
        self._warm: dict[SessionKey, _Warm] = {}
        self._locks: dict[SessionKey, anyio.Lock] = {}

    async def config(self, id: str, tenant: str) -> AgentConfig:
        """Return what an agent is made of, for a tenant."""
        source = self._source
        made = source if isinstance(source, AgentConfig) else source(id)
        config = await made if inspect.isawaitable(made) else made
        return msgspec.structs.replace(config, tenant=tenant)

    async def owner_for(self, key: SessionKey, token: Token) -> str | None:
        """Return who owns an agent: as it is stored, or the token's, whose request makes it.

        Raises:
            Problem: It is another's.

        """
        warm = self._warm.get(key)
        if warm is not None:
            owner = warm.owner
        else:
            view = await stored(self._app.manager, key)
            owner = token.owner if view is None else view.info.metadata.owner
        if not token.opens(owner):
            raise not_found(key.agent)
        return owner

    def is_warm(self, key: SessionKey) -> bool:
        """Return whether an agent runs here."""
        return key in self._warm

    async def work(
        self, run: Run, channel: Channel, *, message: Message, config: AgentConfig, token: Token
    ) -> None:
        """Answer a message in a turn: what a `Run` does."""
        for tries_left in range(TRIES - 1, -1, -1):
            try:
                async with self._agent(run, config, token) as agent:
                    await _answer(agent, run, channel, message)
                    return
            except (LeaseLostError, SessionClosedError):
                if not tries_left or self._app.draining:
                    raise
                # The text that was shown is in no log: the next try shows its own.
                channel.clear()

    @contextlib.asynccontextmanager
    async def _agent(
        self, run: Run, config: AgentConfig, token: Token
    ) -> AsyncGenerator[Agent, None]:
        key = run.key
        # One at a time: two first requests open one agent.
        async with self._locks.setdefault(key, anyio.Lock()):
            warm = self._warm.get(key)
            if warm is not None and not _is_usable(warm.agent):
                await self._stop(key, finish=False)
                warm = None
            if warm is None:
                await self._make_room()
                warm = self._warm[key] = await self._opened(key, config, token)
            # Made since its owner was looked for. This token may open it, but tokens that have
            # joined the run may not: so the run's owner counts.
            if run.owner not in (None, warm.owner):
                raise not_found(key.agent)
            warm.users += 1
        try:
            yield warm.agent
        finally:
            warm.users -= 1
            warm.idle_since = anyio.current_time()

    async def _opened(self, key: SessionKey, config: AgentConfig, token: Token) -> _Warm:
        owner = await self.owner_for(key, token)
        async with self._app.manager.open(
            key.agent,
            session=key.session,
            tenant=key.tenant,
            owner=owner,
            on_held=config.on_held,
            wait=config.wait,
        ):  # the agent pins it too
            factory = AgentFactory(self._app.manager)
            agent = await factory.create_agent(config, agent_id=key.agent)
        try:
            await agent.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await agent.stop(finish=False)
            raise
        return _Warm(agent, agent.session.info.metadata.owner)

    async def _make_room(self) -> None:
        if self._most is None or len(self._warm) < self._most:
            return
        unused = [(warm.idle_since, key) for key, warm in self._warm.items() if not warm.users]
        for _, key in sorted(unused)[: len(self._warm) - self._most + 1]:
            lock = self._locks.setdefault(key, anyio.Lock())
            with contextlib.suppress(anyio.WouldBlock):  # just used again
                lock.acquire_nowait()
                try:
                    await self._stop(key, finish=True)
                finally:
                    lock.release()

    async def forget(self, key: SessionKey) -> None:
        """Stop an agent, whose session is removed."""
        async with self._locks.setdefault(key, anyio.Lock()):
            await self._stop(key, finish=False)

    async def _stop(self, key: SessionKey, *, finish: bool) -> None:
        warm = self._warm.pop(key, None)
        if warm is not None:
            # What it cannot save any more is in the manager's report, or another process's.
            with contextlib.suppress(SessionError, LeaseLostError):
                await warm.agent.stop(finish=finish)

    async def tend(self) -> None:
        """Close unused agents; runs for ever."""
        while True:
            await anyio.sleep(min(self._keep, 5.0))
            for key, warm in tuple(self._warm.items()):
                async with self._locks.setdefault(key, anyio.Lock()):
                    # Under its lock: it may have been used, or replaced, while this waited.
                    idle = anyio.current_time() - warm.idle_since
                    if not warm.users and idle >= self._keep and self._warm.get(key) is warm:
                        await self._stop(key, finish=True)
            for key in set(self._locks) - set(self._warm):
                if not self._locks[key].statistics().locked:
                    del self._locks[key]

    async def stop(self) -> None:
        """Stop all agents: a turn that runs is cut, what came is kept, and it is unfinished."""
        async with anyio.create_task_group() as group:
            for key in tuple(self._warm):
                group.start_soon(self.forget, key, name="perdure:forget agent")


def _is_usable(agent: Agent) -> bool:
    return agent.runtime.is_running and agent.session.is_writable


async def _answer(agent: Agent, run: Run, channel: Channel, message: Message) -> None:
    run.after = agent.session.version
    async for event in agent.stream(message, turn_id=run.turn):
        match event:
            case TurnStarted():
                run.begin(turn=event.turn_id, replayed=False)
            case Segment() if event.text:
                channel.add(agent.session, event.text)
            case Segment():
                pass
            case TurnEnded():
                run.begin(turn=event.turn_id, replayed=event.replayed)
                run.outcome = RunOutcome(
                    event.turn_id, event.text, event.version, replayed=event.replayed
                )
            case TurnFailed():
                raise event.error
            case AgentStopped(error=Exception() as error):
                raise error
            case _:
                channel.clear()


MAX_BODY: Final = 1024 * 1024
"""Bytes of a request's body."""
MAX_PAGE: Final = 200
MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Bytes of messages on a page; a larger message is a page of its own."""
MAX_TURN: Final = 255
"""Characters of an Idempotency-Key."""
PROBES: Final = ("/healthz", "/readyz")
DESCRIPTION: Final = "/openapi.json"
ORDERS: Final = ("newest", "id")
CORS: Final[dict[str, Any]] = {
    "allow_methods": ["GET", "POST", "DELETE"],
    "allow_headers": ["authorization", "content-type", "idempotency-key", "last-event-id"],
    "expose_headers": ["retry-after", "www-authenticate"],
}
"""The methods and headers for pages of other sites, if they are let in at all."""


@final
class AgentServer:
    """An agent's HTTP API, as an ASGI application: ``AgentServer(config).app``.

    Args:
        source: What an agent is made of: an `AgentConfig`, or a function of the agent's id that
            returns one.
        url: Where sessions are kept: as for `perdure.connect`.
        access: Who may do what.
        keep: Seconds for which an unused agent stays open.
        max_body: Bytes that a request's body may have.
        max_requests: How many requests are answered at a time, and how many agents stay open;
            probes are answered beyond that. None: no limit.
        options: Everything else that `AppSessions` takes.

    """

    def __init__(
        self,
        source: Source,
        url: Any = None,
        *,
        access: Access | None = None,
        keep: float = 30.0,
        max_body: int = MAX_BODY,
        max_requests: int | None = None,
        **options: Any,
    ) -> None:
        self.sessions: AppSessions = AppSessions(url, **options)
        self._access = access or Access()
        self._pool = AgentPool(self.sessions, source, keep=keep, most=max_requests)
        self._max_body = max_body
        self._max_requests = max_requests
        self._requests = 0
        self.sessions.at_drain.append(self._pool.stop)
        routes = [
            Route("/agents", self._list),
            Route("/agents/{id}", self._get),
            Route("/agents/{id}", self._delete, methods=["DELETE"]),
            Route("/agents/{id}/messages", self._post, methods=["POST"]),
            Route("/agents/{id}/messages", self._history),
            Route("/agents/{id}/events", self._events),
            Route("/metrics", self.sessions.metrics),
            Route(DESCRIPTION, self._describe),
        ]
        inner = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _answer_http, ClientDisconnect: _answer_nobody},
            # Starlette itself would answer such an error in text, and raise it again.
            middleware=[Middleware(ExceptionMiddleware, handlers={Exception: _answer_problem})],
        )
        opened = self._opened(self.sessions.middleware(inner))
        if self._access.origins:
            opened = CORSMiddleware(opened, allow_origins=self._access.origins, **CORS)
        self.app: ASGIApp = self._guarded(opened)
        """The ASGI application."""

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncGenerator[None, None]:
        async with self.sessions.lifespan(app), anyio.create_task_group() as group:
            group.start_soon(self._pool.tend, name="perdure:tend agents")
            yield
            group.cancel_scope.cancel()

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        """Check a request before anything else looks at it."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            try:
                self._access.check_browser(scope)
                if _path(scope) in PROBES:
                    await self.sessions.probes(scope, receive, send)
                    return
            except Problem as problem:
                await problem_response(problem)(scope, receive, send)
                return
            if self._requests == self._max_requests:
                busy = Problem(503, "Busy", "too many requests are open here", retry_after=1)
                await problem_response(busy)(scope, receive, send)
                return
            self._requests += 1
            try:
                await app(scope, receive, send)
            finally:
                self._requests -= 1

        return guarded

    def _opened(self, app: ASGIApp) -> ASGIApp:
        """Let in who has a token."""

        async def opened(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and _path(scope) != DESCRIPTION:  # the same for everybody
                headers = Headers(scope=scope)
                try:
                    is_metrics = _path(scope) == "/metrics"
                    token = self._access.token_of(headers, for_metrics=is_metrics)
                except Problem as problem:
                    await problem_response(problem)(scope, receive, send)
                    return
                scope = {**scope, "perdure.token": token}
            await app(scope, receive, send)

        return opened

    # routes

    async def _post(self, request: Request) -> Response:
        token: Token = request.scope["perdure.token"]
        self._access.check_content(request.headers)
        message = Message.user((await self._body(request)).text)
        agent = request.path_params["id"]
        config = await self._pool.config(agent, token.tenant)
        key = session_key(agent, config.session, token.tenant)
        owner = await self._pool.owner_for(key, token)
        turn = request.headers.get("idempotency-key") or f"http-{random_id()}"
        if len(turn) > MAX_TURN:
            raise Problem(400, "Invalid", f"Idempotency-Key has at most {MAX_TURN} characters")
        work = partial(self._pool.work, message=message, config=config, token=token)
        run = self.sessions.start(key, turn, work, request=message.text, owner=owner)
        if "text/event-stream" in request.headers.get("accept", ""):
            return self.sessions.respond(run)
        try:
            outcome = await run.wait()
        except Exception as error:
            raise answered(error) from error
        return json_response(Answered(agent=agent, **msgspec.structs.asdict(outcome)))

    async def _history(self, request: Request) -> Response:
        view = await self._view(request)
        limit = _number(request, "limit", 50, most=MAX_PAGE)
        before = min(_number(request, "before", view.seq + 1), view.seq + 1)
        contents = contents_of(view)
        page = await contents.page(before=before, limit=limit, max_bytes=MAX_PAGE_BYTES)
        shown = [
            message_fields(item.seq, item.value)
            for item in reversed(page.items)
            if isinstance(item.value, Message)
        ]
        older = page.items[-1].seq if page.is_full else None
        return json_response({"messages": shown, "before": older})

    async def _get(self, request: Request) -> Response:
        view = await self._view(request)
        info = view.info
        return json_response(
            AgentShown(
                agent=request.path_params["id"],
                title=info.metadata.title,
                owner=info.metadata.owner,
                tags=list(info.metadata.tags),
                turns=info.turns,
                open=self._pool.is_warm(view.key),
            )
        )

    async def _list(self, request: Request) -> Response:
        token: Token = request.scope["perdure.token"]
        limit = _number(request, "limit", 50, most=MAX_PAGE)
        order = request.query_params.get("order", "newest")
        if order not in ORDERS:
            raise Problem(400, "Invalid", f"order is one of {', '.join(ORDERS)}")
        is_newest = order == "newest"
        after, place = None, request.query_params.get("after")
        if place and is_newest:
            after = _last_of(place, token.tenant)
        elif place:
            config = await self._pool.config(place, token.tenant)
            after = SessionInfo(key=SessionKey(place, config.session, token.tenant))
        found: list[SessionInfo] = []
        for owner in token.owners or (None,):
            found += await self.sessions.manager.list(
                tenant=token.tenant,
                owner=owner,
                prefix=request.query_params.get("prefix", ""),
                after=after,
                limit=limit + 1,
                newest_first=is_newest,
            )
        if is_newest:
            shown = heapq.nlargest(limit, found, key=lambda info: info.last_used)
        else:
            shown = heapq.nsmallest(limit, found, key=lambda info: info.key)
        more = None
        if len(found) > limit:
            at, key = shown[-1].last_used
            more = key.agent
            if is_newest:
                more = msgspec.json.encode((at, key.agent, key.session)).decode()
        return json_response(AgentPage(agents=[_listed(info) for info in shown], after=more))

    async def _delete(self, request: Request) -> Response:
        key = (await self._view(request)).key
        await self._pool.forget(key)
        await self.sessions.manager.delete(key.agent, session=key.session, tenant=key.tenant)
        return Response(status_code=204)

    async def _events(self, request: Request) -> Response:
        view = await self._view(request)
        key = view.key
        return self.sessions.events(
            key.agent, session=key.session, tenant=key.tenant, owner=view.info.metadata.owner
        )

    async def _describe(self, request: Request) -> Response:
        document = describe(is_open=self._access.is_open, max_page=MAX_PAGE, max_turn=MAX_TURN)
        # Behind a proxy, the paths are below what it leaves out.
        document["servers"] = [{"url": request.scope.get("root_path") or "/"}]
        return json_response(document)

    # what a request says

    async def _view(self, request: Request) -> SessionView:
        """Return the session that a request names, if its token opens it.

        Raises:
            Problem: There is none.

        """
        token: Token = request.scope["perdure.token"]
        agent = request.path_params["id"]
        config = await self._pool.config(agent, token.tenant)
        key = session_key(agent, config.session, token.tenant)
        view = await stored(self.sessions.manager, key)
        if view is None or not token.opens(view.info.metadata.owner):
            raise not_found(agent)
        return view

    async def _body(self, request: Request) -> PostedBody:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                raise Problem(413, "Too large", f"the body is larger than {self._max_body} bytes")
        try:
            return msgspec.json.decode(bytes(body), type=PostedBody)
        except msgspec.DecodeError as error:
            raise Problem(400, "Invalid", f'send {{"text": "…"}}: {error}') from None


async def stored(manager: SessionManager, key: SessionKey) -> SessionView | None:
    """Return a session without its working context, which may be large and is not shown."""
    return await manager.load(key.agent, session=key.session, tenant=key.tenant, context=False)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _number(request: Request, name: str, default: int, *, most: int = 2**62) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 19 and 0 < int(text) <= most):
        raise Problem(400, "Invalid", f"{name} is a number from 1 to {most}")
    return int(text)


def _last_of(place: str, tenant: str) -> SessionInfo:
    """Return the last session of a page by last use, as its ``after`` names it.

    Raises:
        Problem: It names none.

    """
    try:
        at, agent, session = msgspec.json.decode(place, type=tuple[float, str, str])
        return SessionInfo(key=SessionKey(agent, session, tenant), updated_at=at)
    except ValueError:
        raise Problem(400, "Invalid", "after is what the page before has as after") from None


def _listed(info: SessionInfo) -> AgentListed:
    return AgentListed(
        agent=info.key.agent,
        session=info.key.session,
        title=info.title,
        owner=info.owner,
        turns=info.turns,
        updated_at=info.updated_at,
    )


async def _answer_problem(_: Request, error: Exception) -> Response:
    return problem_response(answered(error))


async def _answer_nobody(_: Request, _error: Exception) -> Response:
    return problem_response(Problem(408, "Not received"))  # it went away before its body had come


async def _answer_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return problem_response(Problem(error.status_code, str(error.detail), headers=headers))
