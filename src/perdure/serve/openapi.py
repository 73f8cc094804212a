"""The description of the API for programs: an OpenAPI document, and the types of its schemas.

The routes make their answers of these types, too. Messages and problems are those of
`perdure.asgi`, which makes them itself: ``ShownMessage`` and ``ProblemShown`` describe their JSON.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

import perdure

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
PROBLEM: Final = "application/problem+json"
_REF: Final = "#/components/schemas/{name}"


class PostedBody(msgspec.Struct, forbid_unknown_fields=True):
    """A message to an agent."""

    text: str


class Answered(msgspec.Struct, kw_only=True):
    """The answer of a turn, which is durable."""

    agent: str
    turn: str
    """Its id: the request's `Idempotency-Key`, or one that the server made."""
    text: str
    version: int
    replayed: bool
    """True if the turn had already ended: this is its stored answer."""


class AgentShown(msgspec.Struct, kw_only=True):
    """An agent."""

    agent: str
    title: str | None
    owner: str | None
    tags: list[str]
    turns: int
    open: bool
    """True if it runs in the process that answers."""


class AgentListed(msgspec.Struct, kw_only=True):
    """An agent in a list."""

    agent: str
    session: str
    title: str | None
    owner: str | None
    turns: int
    updated_at: float | None
    """Seconds since 1970."""


class AgentPage(msgspec.Struct, kw_only=True):
    """A page of a list of agents."""

    agents: list[AgentListed]
    after: str | None
    """Cursor of the next page, to pass as `after`; null on the last page."""


class ShownCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    name: str
    arguments: Any


class ShownResult(msgspec.Struct, kw_only=True):
    """The result of a call of a tool."""

    call_id: str
    result: Any
    error: str | None


class ShownMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of a conversation."""

    seq: int
    role: str
    content: str | list[Any] | None
    """A text, or its parts in the shape of a provider."""
    reasoning: str | None = None
    tool_calls: list[ShownCall] = []
    tool_result: ShownResult | None = None
    created_at: float | None = None
    """Seconds since 1970."""
    interrupted: bool = False
    """True if the answer was cut off."""


class MessagePage(msgspec.Struct, kw_only=True):
    """A page of an agent's messages, oldest first."""

    messages: list[ShownMessage]
    before: int | None
    """Cursor of the page of older messages, to pass as `before`; null on the first page."""


class ProblemShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An error, as in RFC 9457."""

    type: str
    title: str
    status: int
    detail: str = ""
    code: str = ""
    """The name of the error."""


_TYPES: Final = (PostedBody, Answered, AgentShown, AgentPage, MessagePage, ProblemShown)


def _schema(of: type) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=of.__name__)}}


def _answer(description: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"description": description, **({"content": content} if content else {})}


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _header(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"name": name, "in": "header", "schema": schema, "description": description}


def describe(*, is_open: bool, max_page: int, max_turn: int) -> dict[str, Any]:
    """Return the OpenAPI document of a server.

    Args:
        is_open: Whether requests need no token.
        max_page: The most agents or messages on a page.
        max_turn: The most characters of an Idempotency-Key.

    """
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template=_REF)
    schemas["Event"] = {
        "type": "string",
        "description": "Server-sent events: turn, message, text, end, interrupted, retracted and "
        "error.",
    }
    events = {EVENTS: {"schema": {"$ref": _REF.format(name="Event")}}}
    limit = _query(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": max_page, "default": 50},
        "Maximum number on a page.",
    )
    seen = _header("Last-Event-ID", "The id of the last event that was received.")
    turn = _header(
        "Idempotency-Key",
        f"The id of the turn, of at most {max_turn} characters; a retry sends the same one.",
    )
    paths: dict[str, Any] = {
        "/agents": {
            "get": {
                "operationId": "listAgents",
                "summary": "List agents",
                "parameters": [
                    limit,
                    _query("after", {"type": "string"}, "`after` of the previous page."),
                    _query("prefix", {"type": "string"}, "Prefix of their ids."),
                    _query(
                        "order",
                        {"type": "string", "enum": ["newest", "id"], "default": "newest"},
                        "By last save, the newest first, or by id.",
                    ),
                ],
                "responses": {"200": _answer("A page of agents.", {JSON: _schema(AgentPage)})},
            }
        },
        "/agents/{id}": {
            "get": {
                "operationId": "getAgent",
                "summary": "Show an agent",
                "responses": {"200": _answer("The agent.", {JSON: _schema(AgentShown)})},
            },
            "delete": {
                "operationId": "deleteAgent",
                "summary": "Delete an agent",
                "responses": {"204": _answer("It is deleted.")},
            },
        },
        "/agents/{id}/messages": {
            "get": {
                "operationId": "listMessages",
                "summary": "Show the messages of an agent",
                "parameters": [
                    limit,
                    _query(
                        "before",
                        {"type": "integer", "minimum": 1},
                        "Only messages with a smaller seq: `before` of another page.",
                    ),
                ],
                "responses": {"200": _answer("A page of messages.", {JSON: _schema(MessagePage)})},
            },
            "post": {
                "operationId": "postMessage",
                "summary": "Send a message and get the answer",
                "parameters": [turn, seen],
                "requestBody": {
                    "required": True,
                    "content": {JSON: _schema(PostedBody)},
                },
                "responses": {
                    "200": _answer(
                        "The answer, once it is durable; with `Accept: text/event-stream`, the "
                        "events of its turn.",
                        {JSON: _schema(Answered), **events},
                    )
                },
            },
        },
        "/agents/{id}/events": {
            "get": {
                "operationId": "listenToAgent",
                "summary": "Listen to an agent",
                "parameters": [seen],
                "responses": {"200": _answer("The events of all turns, from now on.", events)},
            }
        },
        "/metrics": {
            "get": {
                "operationId": "getMetrics",
                "summary": "Show the metrics of the process, for Prometheus",
                "responses": {
                    "200": _answer("The metrics.", {"text/plain": {"schema": {"type": "string"}}})
                },
            }
        },
    }
    for probe, what in (("/healthz", "is alive"), ("/readyz", "accepts requests")):
        content = {JSON: {"schema": {"type": "object"}}}
        responses = {"200": _answer("Yes.", content)}
        if probe == "/readyz":
            responses["503"] = _answer("No.", content)
        paths[probe] = {
            "get": {
                "operationId": f"get{probe[1:].capitalize()}",
                "summary": f"Check that the process {what}",
                "responses": responses,
                "security": [],
            }
        }
    for path, operations in paths.items():
        for operation in operations.values():
            operation["responses"]["default"] = _answer(
                "An error.", {PROBLEM: _schema(ProblemShown)}
            )
        if "{id}" in path:
            schema = {"type": "string"}
            operations["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": schema}
            ]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "perdure serve", "version": perdure.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if not is_open:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document
