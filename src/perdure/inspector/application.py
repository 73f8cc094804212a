"""The inspector as an ASGI application: routes, and one value for a page and its JSON."""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, final
from urllib.parse import parse_qsl, urlencode

import msgspec

from perdure._lib.logs import visible, visible_json
from perdure.errors import (
    InvalidArgumentError,
    MissingExtraError,
    PerdureError,
)
from perdure.records.keys import DEFAULT_SESSION, SessionKey
from perdure.session.manager import SessionManager
from perdure.store import SessionInfo

try:
    import jinja2
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
except ModuleNotFoundError as _error:
    _package = (_error.name or "").partition(".")[0]
    if _package not in {"jinja2", "starlette"}:
        raise
    raise MissingExtraError(
        f"the inspector needs {_package}: pip install 'perdure[inspector]'", extra="inspector"
    ) from _error

from perdure.asgi.browsers import LOOPBACK
from perdure.asgi.responses import problem_of
from perdure.inspector import pages
from perdure.inspector.changes import (
    CHANGES,
    ActionsPage,
    Change,
    ChangePage,
    Changes,
    RequestedChange,
)
from perdure.inspector.guard import FORM_TOKEN, Guard
from perdure.inspector.live import Live, LivePage

if TYPE_CHECKING:
    from starlette.types import ASGIApp

HERE: Final = Path(__file__).parent
SHORTEST_TOKEN: Final = 16
LONGEST_FORM: Final = 65536
"""Bytes."""


def app(
    sessions: SessionManager | Callable[[], SessionManager],
    *,
    token: str,
    hosts: Collection[str] = (),
    allow_changes: bool = False,
) -> ASGIApp:
    """Return the inspector of a manager's store, to mount in your application.

    It reads without a lease, and belongs to the event loop of the manager. Open it by the link
    ``…/perdure/?token=TOKEN``, which sets a cookie for pages below a path that only this token
    has; programs send the token as a bearer.

    Args:
        sessions: Whose store; or a function that returns it, if there is none yet.
        token: Who knows it may read every session: at least 16 characters, from ``secrets``.
        hosts: Names that browsers reach it by, without a port; ``localhost`` always is one.
        allow_changes: Whether who has the token may also roll back, fork, rebuild and forget.

    Raises:
        InvalidArgumentError: The token is too short.
        MissingExtraError: Starlette or Jinja2 is not installed.

    """
    if len(token) < SHORTEST_TOKEN:
        raise InvalidArgumentError(
            f"the token has {len(token)} characters, and at least {SHORTEST_TOKEN} are needed: "
            "secrets.token_urlsafe() makes one",
            option="token",
        )
    manager = sessions if callable(sessions) else partial(_same, sessions)
    inspector = _Inspector(manager, allow_changes=allow_changes)
    return Guard(Starlette(routes=inspector.routes()), token=token, hosts={*LOOPBACK, *hosts})


def _same(sessions: SessionManager) -> SessionManager:
    return sessions


class ErrorPage(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no such page."""

    type: str
    message: str
    status: int


Handler = Callable[[Request], Awaitable[Response]]


@final
class _Inspector:
    """The routes' functions over one manager."""

    def __init__(self, sessions: Callable[[], SessionManager], *, allow_changes: bool) -> None:
        self._manager = sessions
        self._allow_changes = allow_changes
        self._live: Live | None = None
        self._long_reads: pages.LongReads | None = None
        self._changes: Changes | None = None
        self._templates = _templates()

    def routes(self) -> list[Route | Mount]:
        """Return all routes."""
        shown: dict[str, tuple[str, Callable[[Query], Awaitable[Any]]]] = {
            "/": ("sessions.html", self._sessions),
            "/session": ("conversation.html", self._conversation),
            "/context": ("context.html", self._context),
            "/states": ("states.html", self._states),
            "/checkpoints": ("checkpoints.html", self._checkpoints),
            "/restore": ("restore.html", self._restore),
            "/delivery": ("delivery.html", self._delivery),
            "/inbox": ("inbox.html", self._inbox),
            "/live": ("live.html", self._sampled),
        }
        values: dict[str, Callable[[Query], Awaitable[Any]]] = {
            "/complete": self._complete,
            "/part": self._part,
            "/value": self._value,
            "/position": self._position,
        }
        changes = [
            Route("/change", self._page("change.html", self._preview), methods=["GET"]),
            Route("/change", self._change, methods=["POST"]),
            Route("/actions", self._page("actions.html", self._actions)),
        ]
        return [
            *(changes if self._allow_changes else ()),
            *(Route(path, self._page(*page)) for path, page in shown.items()),
            *(Route(path, self._page("", value)) for path, value in values.items()),
            Route("/image", self._image),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]

    def _page(self, template: str, read: Callable[[Query], Awaitable[Any]]) -> Handler:
        """Return the function of a route whose value is shown by a template, or as JSON."""

        async def handle(request: Request) -> Response:
            query = Query(request.query_params)
            status = 200
            shown = template
            try:
                value = await read(query)
            except PerdureError as error:
                value, shown = _error_page(error), template and "error.html"
                status = value.status
            if not shown or query.text("format") == "json":
                return _json(value, status)
            return self._html(request, shown, value, status)

        return handle

    def _html(self, request: Request, template: str, value: Any, status: int) -> Response:
        base = request.scope.get("root_path", "")
        text = self._templates.get_template(template).render(
            page=value,
            base=base,
            url=partial(_url, base),
            here=partial(_here, request),
            now=time.time(),
            form_token=request.scope[FORM_TOKEN],
            allow_changes=self._allow_changes,
        )
        data = text.encode(errors="backslashreplace")
        response = Response(data, status, media_type="text/html; charset=utf-8")
        if template == "change.html":  # else its form would be sent with an Origin of null
            response.headers["referrer-policy"] = "same-origin"
        return response

    async def _sessions(self, query: Query) -> pages.SessionsPage:
        names = pages.SessionFilters.__struct_fields__
        given: dict[str, Any] = {name: query.text(name).strip() for name in names}
        given["order"] = query.choice("order", ("", "id"))
        filters = pages.SessionFilters(**given)
        limit = max(1, min(query.number("limit") or pages.LISTED, pages.MOST))
        after = query.text("after")
        last = None
        if after:
            after_session = query.text("after_session") or DEFAULT_SESSION
            key = SessionKey(after, after_session, filters.tenant)
            last = SessionInfo(key=key, updated_at=query.decimal("after_at"))
        return await pages.sessions_page(self._manager(), filters, last, limit)

    async def _complete(self, query: Query) -> list[str]:
        return await pages.completions(self._manager(), query.text("tenant"), query.text("prefix"))

    async def _conversation(self, query: Query) -> pages.ConversationPage:
        view = query.choice("view", ("compact", "timeline", "raw"))
        limit = query.number("limit") or pages.PAGE
        return await pages.conversation_page(
            self._manager(), query.key(), cast("pages.View", view), query.number("before"), limit
        )

    async def _part(self, query: Query) -> Any:
        seq, number = query.number("seq") or 0, query.number("part") or 0
        raw = query.choice("view", ("compact", "timeline", "raw")) == "raw"
        return await pages.whole_part(self._manager(), query.key(), seq, number, raw=raw)

    async def _context(self, query: Query) -> pages.ContextPage:
        target = query.choice("target", ("", *pages.FORMATS))
        return await pages.context_page(self._manager(), query.key(), target, query.number("end"))

    async def _states(self, query: Query) -> pages.StatesPage:
        return await pages.states_page(self._manager(), query.key())

    async def _value(self, query: Query) -> pages.ShownValue:
        kind = cast("Any", query.choice("kind", ("state", "memory")))
        return await pages.named_value(self._manager(), query.key(), kind, query.text("name"))

    async def _checkpoints(self, query: Query) -> pages.CheckpointsPage:
        a, b = query.number("a"), query.number("b")
        pair = None if a is None or b is None else (a, b)
        verify = query.choice("verify", ("", "1")) == "1"
        return await pages.checkpoints_page(self._reads(), query.key(), pair, verify=verify)

    async def _restore(self, query: Query) -> pages.RestorePage:
        target = query.choice("target", ("", *pages.FORMATS))
        return await pages.restore_page(self._manager(), query.key(), target)

    async def _delivery(self, query: Query) -> pages.DeliveryPage:
        return await pages.delivery_page(self._manager(), query.key())

    async def _inbox(self, query: Query) -> pages.InboxPage:
        return await pages.inbox_page(self._manager(), self._reads())

    def _reads(self) -> pages.LongReads:
        sessions = self._manager()
        if self._long_reads is None or self._long_reads.sessions is not sessions:
            self._long_reads = pages.LongReads(sessions)
        return self._long_reads

    async def _position(self, query: Query) -> int:
        return await pages.position(self._manager(), query.key())

    async def _sampled(self, query: Query) -> LivePage:
        sessions = self._manager()
        if self._live is None or self._live.sessions is not sessions:
            self._live = Live(sessions)
        return await self._live.page(query.decimal("after"))

    def _changing(self) -> Changes:
        sessions = self._manager()
        if self._changes is None or self._changes.sessions is not sessions:
            self._changes = Changes(sessions)
        return self._changes

    async def _actions(self, query: Query) -> ActionsPage:
        return self._changing().page()

    async def _preview(self, query: Query) -> ChangePage:
        return await self._changing().preview(query.change(), self._reads())

    async def _change(self, request: Request) -> Response:
        """Make a change that a form of this inspector asks for."""
        try:
            form = await _form(request)
            given = form.get("form_token", "").encode()
            if not hmac.compare_digest(given, request.scope[FORM_TOKEN].encode()):
                raise InvalidArgumentError("the form is not one of this inspector's: load it again")
            by = request.client.host if request.client else "nowhere"
            await self._changing().make(Query(form).change(), by=by)
        except PerdureError as error:
            value = _error_page(error)
            return self._html(request, "error.html", value, value.status)
        where = f"{request.scope.get('root_path', '')}/actions"
        return Response(status_code=303, headers={"location": where})

    async def _image(self, request: Request) -> Response:
        query = Query(request.query_params)
        try:
            seq, number = query.number("seq") or 0, query.number("part") or 0
            found = await pages.image(self._manager(), query.key(), seq, number)
        except PerdureError as error:
            value = _error_page(error)
            return _json(value, value.status)
        return Response(found.data, media_type=found.media_type)


@final
class Query:
    """The parameters of a request: the state of a page, all of it in its URL."""

    def __init__(self, params: Mapping[str, str]) -> None:
        self._params = params

    def text(self, name: str) -> str:
        """Return a parameter, "" if it is not given."""
        return self._params.get(name, "")

    def number(self, name: str) -> int | None:
        """Return a parameter as a number, None if it is not given.

        Raises:
            InvalidArgumentError: It is no number.

        """
        value = self.text(name)
        if not value:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) < 18):
            raise InvalidArgumentError(f"invalid {name}={value!r}: give a number", option=name)
        return int(value)

    def decimal(self, name: str) -> float:
        """Return a parameter as a number, 0 if it is not given.

        Raises:
            InvalidArgumentError: It is no number.

        """
        try:
            return float(self.text(name) or 0)
        except ValueError:
            raise InvalidArgumentError(
                f"invalid {name}={self.text(name)!r}: give a number", option=name
            ) from None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return a parameter that is one of several; the first one if it is not given.

        Raises:
            InvalidArgumentError: It is none of them.

        """
        value = self.text(name) or choices[0]
        if value not in choices:
            named = ", ".join(choice for choice in choices if choice)
            raise InvalidArgumentError(f"invalid {name}={value!r}: choose {named}", option=name)
        return value

    def key(self) -> SessionKey:
        """Return the session that a page is about.

        Raises:
            InvalidArgumentError: A part of it is no id.

        """
        session = self.text("session") or DEFAULT_SESSION
        return SessionKey(self.text("agent"), session, self.text("tenant"))

    def change(self) -> RequestedChange:
        """Return the change that is asked for.

        Raises:
            InvalidArgumentError: Something is missing, or invalid.

        """
        change = self.choice("change", ("", *CHANGES))
        return RequestedChange(
            change=cast("Change", change),
            key=self.key(),
            checkpoint=self.number("checkpoint"),
            at=self.number("at"),
            new_id=self.text("new_id"),
            confirmed=self.text("confirmed"),
        )


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a small form.

    Raises:
        InvalidArgumentError: It is too large, or no form.

    """
    body = bytearray()
    async with aclosing(request.stream()) as stream:
        async for chunk in stream:
            body += chunk
            if len(body) > LONGEST_FORM:
                raise InvalidArgumentError("the form is too large")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, errors="strict"))
    except ValueError:
        raise InvalidArgumentError("the form is not UTF-8") from None


def _error_page(error: PerdureError) -> ErrorPage:
    status = problem_of(error).status
    return ErrorPage(type=type(error).__name__, message=str(error), status=status)


def _json(value: Any, status: int = 200) -> Response:
    data = visible_json(msgspec.json.encode(value, enc_hook=str))
    return Response(data, status, media_type="application/json")


# For the templates


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ago": _ago,
        "as_json": pages.value_text,
        "clock": _clock,
        "duration": duration,
        "size": _size,
    }
    # Whatever is printed: a direction mark in a stored text cannot reorder what is around it.
    environment.finalize = _printable
    return environment


def _printable(value: Any) -> Any:
    return visible(value) if type(value) is str else value


def _url(base: str, path: str, key: SessionKey | None = None, **params: object) -> str:
    """Return the address of a page, with what is not at its default."""
    given = {name: value for name, value in params.items() if value not in (None, "")}
    if key is not None:
        about = {"agent": key.agent}
        about |= {"session": key.session} if key.session != DEFAULT_SESSION else {}
        about |= {"tenant": key.tenant} if key.tenant else {}
        given = {**about, **given}
    return f"{base}{path}" + (f"?{urlencode(given)}" if given else "")


def _here(request: Request, **params: object) -> str:
    """Return this page's address with other parameters."""
    given = {**request.query_params, **params}
    kept = {name: value for name, value in given.items() if value not in (None, "")}
    return f"?{urlencode(kept)}"


def _clock(at: float | None) -> str:
    if at is None or not math.isfinite(at) or abs(at) > 1e11:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> duration(0.25), duration(90), duration(5400), duration(200000)
    ('250 ms', '90 s', '90 min', '2 days')
    """
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    for unit, length, upto in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < upto:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def _ago(at: float | None, now: float) -> str:
    return "" if at is None else f"{duration(max(now - at, 0.0))} ago"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
