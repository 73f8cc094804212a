"""The inspector as an ASGI application: routes, and one value for a page and its JSON."""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final
from urllib.parse import parse_qsl, urlencode

import msgspec

from perdure._lib.logs import visible, visible_json
from perdure.errors import (
    InvalidArgumentError,
    MissingExtraError,
    PerdureError,
)
from perdure.lease import held_by
from perdure.records.keys import DEFAULT_SESSION, SessionKey, require_list
from perdure.session.manager import SessionManager

try:
    import jinja2
    import markdown_it  # noqa: F401  # of `perdure.inspector.markdown`
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
except ModuleNotFoundError as _error:
    _package = (_error.name or "").partition(".")[0]
    if _package not in {"jinja2", "markdown_it", "starlette"}:
        raise
    raise MissingExtraError(
        f"the inspector needs {_package}: pip install 'perdure[inspector]'", extra="inspector"
    ) from _error

from perdure.asgi.browsers import LOOPBACK
from perdure.asgi.responses import problem_of
from perdure.inspector import pages
from perdure.inspector.changes import Changes, requested
from perdure.inspector.guard import FORM_TOKEN, Guard
from perdure.inspector.live import Live
from perdure.inspector.markdown import markdown
from perdure.inspector.query import Page, Query

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
        InvalidArgumentError: The token is too short, or the hosts are one text.
        MissingExtraError: Starlette or Jinja2 is not installed.

    """
    if len(token) < SHORTEST_TOKEN:
        raise InvalidArgumentError(
            f"the token has {len(token)} characters, and at least {SHORTEST_TOKEN} are needed: "
            "secrets.token_urlsafe() makes one",
            option="token",
        )
    require_list("hosts", hosts)
    inspector = _Inspector(
        sessions if callable(sessions) else lambda: sessions, allow_changes=allow_changes
    )
    return Guard(Starlette(routes=inspector.routes()), token=token, hosts={*LOOPBACK, *hosts})


Handler = Callable[[Request], Awaitable[Response]]
Read = Callable[[pages.LongReads, Query], Awaitable[Any]]
"""Reads the content of a page, by the parameters of its address."""
K = TypeVar("K", pages.LongReads, Live, Changes)


@final
class _Inspector:
    """The routes' functions over one manager."""

    def __init__(self, sessions: Callable[[], SessionManager], *, allow_changes: bool) -> None:
        self._manager = sessions
        self._allow_changes = allow_changes
        self._kept: dict[type, Any] = {}
        self._templates = _templates()

    def routes(self) -> list[Route | Mount]:
        """Return all routes."""
        shown: dict[str, tuple[str, Read]] = {
            "/": ("sessions.html", pages.sessions_page),
            "/session": ("conversation.html", pages.conversation_page),
            "/context": ("context.html", pages.context_page),
            "/states": ("states.html", pages.states_page),
            "/checkpoints": ("checkpoints.html", pages.checkpoints_page),
            "/restore": ("restore.html", pages.restore_page),
            "/delivery": ("delivery.html", pages.delivery_page),
            "/inbox": ("inbox.html", pages.inbox_page),
            "/live": ("live.html", self._sampled),
            "/complete": ("", pages.completions),
            "/part": ("", pages.whole_part),
            "/value": ("", pages.named_value),
            "/status": ("", pages.status_page),
            "/revision": ("", pages.revision),
            "/workers": ("workers.html", pages.workers_page),
        }
        changes = [
            Route("/change", self._page("change.html", self._preview), methods=["GET"]),
            Route("/change", self._change, methods=["POST"]),
            Route("/actions", self._page("actions.html", self._actions)),
        ]
        return [
            *(changes if self._allow_changes else ()),
            *(Route(path, self._page(*page)) for path, page in shown.items()),
            Route("/image", self._image),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]

    def _of_manager(self, kind: type[K]) -> K:
        """Return what is kept of the manager; it is made again for another manager."""
        sessions = self._manager()
        kept: K | None = self._kept.get(kind)
        if kept is None or kept.sessions is not sessions:
            kept = self._kept[kind] = kind(sessions)
        return kept

    def _page(self, template: str, read: Read) -> Handler:
        """Return the function of a route whose value is shown by a template, or as JSON."""

        async def handle(request: Request) -> Response:
            query = Query(request.query_params)
            status = 200
            shown = template
            try:
                value = await read(self._of_manager(pages.LongReads), query)
            except PerdureError as error:
                value, shown = _error_page(error), template and "error.html"
                status = value["status"]
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
        response = Response(
            text.encode(errors="backslashreplace"), status, media_type="text/html; charset=utf-8"
        )
        if template == "change.html":  # else its form would be sent with an Origin of null
            response.headers["referrer-policy"] = "same-origin"
        return response

    async def _sampled(self, _: pages.LongReads, query: Query) -> Page:
        return await self._of_manager(Live).page(query.decimal("after"))

    async def _actions(self, *_: object) -> Page:
        return self._of_manager(Changes).page()

    async def _preview(self, reads: pages.LongReads, query: Query) -> Page:
        return await self._of_manager(Changes).preview(requested(query), reads)

    async def _change(self, request: Request) -> Response:
        """Make a change that a form of this inspector asks for."""
        try:
            form = await _form(request)
            given = form.get("form_token", "").encode()
            if not hmac.compare_digest(given, request.scope[FORM_TOKEN].encode()):
                raise InvalidArgumentError("the form is not one of this inspector's: load it again")
            by = request.client.host if request.client else "nowhere"
            await self._of_manager(Changes).make(requested(Query(form)), by=by)
        except PerdureError as error:
            value = _error_page(error)
            return self._html(request, "error.html", value, value["status"])
        where = f"{request.scope.get('root_path', '')}/actions"
        return Response(status_code=303, headers={"location": where})

    async def _image(self, request: Request) -> Response:
        try:
            query = Query(request.query_params)
            found = await pages.image(self._of_manager(pages.LongReads), query)
        except PerdureError as error:
            value = _error_page(error)
            return _json(value, value["status"])
        return Response(found.data, media_type=found.media_type)


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


def _error_page(error: PerdureError) -> Page:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "status": problem_of(error).status,
    }


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
        "held_by": held_by,
        "markdown": markdown,
        "size": _size,
    }
    # In all that is printed: a direction mark in a stored text cannot reorder what is around it.
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
    if at is None:
        return ""
    return "now" if now - at < 1 else f"{duration(now - at)} ago"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
