"""The OpenAPI document: what it says of each route is what the routes do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from perdure import Message, ToolCall, ToolResult
from perdure.asgi.feed import message_fields
from perdure.records.messages import CUT_OFF
from tests.asgi.served import Served
from tests.source_tree import ROOT

SERVE = "perdure serve tests.serve.agents:quick --port {port} --max-body 2000".split()
TOKENS = [
    {"token": "all-token-0123456789"},
    {"token": "ops-token-0123456789", "metrics": True},
]
METHODS = ("get", "post", "put", "patch", "delete")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = f"file:{tmp_path_factory.mktemp('serve') / 'store'}"
    server = Served(*SERVE, store=store, PERDURE_TOKENS=json.dumps(TOKENS))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def document(served: Served) -> Any:
    answer = httpx.get(f"{served.url}/openapi.json")
    assert answer.status_code == 200  # no token is needed
    return answer.json()


def bearer(path: str) -> dict[str, str]:
    who = "ops" if path == "/metrics" else "all"
    return {"authorization": f"Bearer {who}-token-0123456789"}


def send(served: Served, method: str, path: str, **options: Any) -> httpx.Response:
    headers = {**bearer(path), **options.pop("headers", {})}
    path = path.replace("{id}", options.pop("id", "ada"))
    return served.client.request(method, path, headers=headers, **options)


def check(document: Any, path: str, method: str, answer: httpx.Response) -> None:
    """Compare an answer with what is said of it."""
    responses = document["paths"][path][method]["responses"]
    described = responses.get(str(answer.status_code), responses["default"])
    content = described.get("content", {})
    if not answer.content:
        assert content == {}
        return
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in content, (path, method, answer.status_code)
    schema = {**content[kind]["schema"], "components": document["components"]}
    value = answer.json() if kind.endswith("json") else answer.text
    jsonschema.Draft202012Validator(schema).validate(value)


def test_it_is_well_formed(document: Any) -> None:
    assert document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names == set(document["components"]["schemas"])
    operations = [
        operation
        for methods in document["paths"].values()
        for method, operation in methods.items()
        if method in METHODS
    ]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    for path, methods in document["paths"].items():
        named = [one["name"] for one in methods.get("parameters", []) if one["in"] == "path"]
        assert named == re.findall(r"\{(\w+)\}", path)


def test_it_names_the_routes_of_the_page(document: Any) -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`(?:GET|POST|DELETE) .*?) \|", page, re.MULTILINE)
    listed = set()
    for row in rows:
        method = ""
        for text in re.findall(r"`([^`{]\S*(?: \S+)?)`", row):
            verb, _, path = text.rpartition(" ")
            method = verb or method
            listed.add((method.lower(), path.partition("?")[0]))
    listed.discard(("get", "/openapi.json"))
    described = {
        (method, path)
        for path, methods in document["paths"].items()
        for method in methods
        if method in METHODS
    }
    assert described == listed


def test_a_method_that_it_does_not_name_is_refused(served: Served, document: Any) -> None:
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method not in methods:
                answer = send(served, method, path)
                assert answer.status_code == 405, (method, path)


def test_each_answer_is_as_it_says(served: Served, document: Any) -> None:
    asked = send(served, "post", "/agents/{id}/messages", json={"text": "a b c"})
    assert asked.status_code == 200
    check(document, "/agents/{id}/messages", "post", asked)
    events = send(
        served,
        "post",
        "/agents/{id}/messages",
        json={"text": "d e"},
        headers={"accept": "text/event-stream", "idempotency-key": "1"},
    )
    check(document, "/agents/{id}/messages", "post", events)
    paths = ["/agents", "/agents/{id}", "/agents/{id}/messages", "/metrics", "/healthz", "/readyz"]
    for path in paths:
        answer = send(served, "get", path)
        assert answer.status_code == 200, path
        check(document, path, "get", answer)
    listed = send(served, "get", "/agents", params={"limit": 1, "order": "id", "prefix": "a"})
    check(document, "/agents", "get", listed)
    page = send(served, "get", "/agents/{id}/messages", params={"limit": 1})
    assert page.json()["before"] is not None
    check(document, "/agents/{id}/messages", "get", page)
    gone = send(served, "delete", "/agents/{id}")
    assert gone.status_code == 204
    check(document, "/agents/{id}", "delete", gone)


def test_each_kind_of_message_is_as_it_says(document: Any) -> None:
    call = ToolCall("call-1", "tides", {"place": "Cuxhaven"})
    for message in (
        Message.user("When is low tide?"),
        Message(role="assistant", tool_calls=(call,), reasoning="I look it up."),
        Message(role="tool", tool_result=ToolResult("call-1", {"at": "noon"})),
        Message(role="tool", tool_result=ToolResult("call-1", error="no such place")),
        Message(role="assistant", content="At", extra={CUT_OFF: msgspec.Raw(b"true")}),
    ):
        shown = msgspec.json.decode(msgspec.json.encode(message_fields(1, message)))
        names = document["components"]["schemas"]["ShownMessage"]["properties"]
        assert shown.keys() <= names.keys()
        schema = {"$ref": "#/components/schemas/ShownMessage", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(shown)


def test_each_problem_is_as_it_says(served: Served, document: Any) -> None:
    for path, methods in document["paths"].items():
        if "{id}" in path:
            for method in {*methods} & {*METHODS} - {"post"}:
                answer = send(served, method, path, id="nobody")
                assert answer.status_code == 404
                check(document, path, method, answer)
    for status, options in (
        (400, {"json": {"said": "Hi"}}),
        (413, {"content": b"x" * 3000}),
        (400, {"json": {"text": "Hi"}, "headers": {"idempotency-key": "x" * 256}}),
        (401, {"json": {"text": "Hi"}, "headers": {"authorization": ""}}),
    ):
        answer = send(served, "post", "/agents/{id}/messages", **options)
        assert answer.status_code == status
        check(document, "/agents/{id}/messages", "post", answer)
    limits = document["paths"]["/agents"]["get"]["parameters"][0]["schema"]
    for limit, status in ((limits["maximum"], 200), (limits["maximum"] + 1, 400), (0, 400)):
        answer = send(served, "get", "/agents", params={"limit": limit})
        assert answer.status_code == status
        check(document, "/agents", "get", answer)


def test_it_says_which_requests_need_a_token(served: Served, document: Any) -> None:
    assert document["security"] == [{"token": []}]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in METHODS:
                answer = httpx.request(method, f"{served.url}{path.replace('{id}', 'ada')}")
                assert (answer.status_code == 401) == (operation.get("security") != [])
