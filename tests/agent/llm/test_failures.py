"""What providers answer, as perdure's errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from perdure import ContextOverflowError, ModelError, ModelUnavailableError
from perdure.agent.llm.failures import Endpoint, failure_of

HOSTED = Endpoint(
    provider="openai",
    model="m",
    url="https://api.openai.com/v1",
    variable="OPENAI_API_KEY",
    key="sk-secret",
)
TOO_LONG = "prompt is too long: 9 tokens > 8 maximum"


class AnsweredError(Exception):
    """What a provider's client raises for an answer that is an error."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status_code = status
        self.response = SimpleNamespace(
            headers={name.replace("_", "-"): value for name, value in headers.items()}
        )


def failure(status: int, message: str, endpoint: Endpoint = HOSTED, **headers: str) -> ModelError:
    error = failure_of(endpoint, AnsweredError(status, message, **headers), begun=False)
    assert error is not None
    assert error.facts["status"] == status
    return error


@pytest.mark.parametrize(
    ("status", "message", "kind", "says"),
    [
        (400, TOO_LONG, ContextOverflowError, "more than its window holds"),
        (500, TOO_LONG, ContextOverflowError, "more than its window holds"),
        (413, "Payload Too Large", ContextOverflowError, "more than its window holds"),
        # A limit of the tier, say: a shorter context would not help.
        (401, TOO_LONG, ModelError, "refused the key"),
        (403, TOO_LONG, ModelError, "refused the key"),
        (404, TOO_LONG, ModelError, "was not found"),
        (429, TOO_LONG, ModelUnavailableError, "limits the rate"),
        (400, "no", ModelError, "refused the request"),
        (422, "no", ModelError, "refused the request"),
        (408, "no", ModelUnavailableError, "ask again"),
        (409, "no", ModelUnavailableError, "ask again"),
        (425, "no", ModelUnavailableError, "ask again"),
        (500, "no", ModelUnavailableError, "ask again"),
        (529, "no", ModelUnavailableError, "ask again"),
    ],
)
def test_a_status_says_whether_to_shorten_to_wait_or_to_give_up(
    status: int, message: str, kind: type[ModelError], says: str
) -> None:
    error = failure(status, message)
    assert type(error) is kind
    assert says in str(error)


@pytest.mark.parametrize(
    ("headers", "seconds", "says"),
    [
        ({"retry_after": "2.5"}, 2.5, "; it asks to wait 2.5 s: "),
        ({"retry_after": "Fri, 31 Dec 1999 23:59:59 GMT"}, None, "(429): "),
        ({}, None, "(429): "),
    ],
)
def test_how_long_a_provider_asks_to_wait_is_passed_on(
    headers: dict[str, Any], seconds: float | None, says: str
) -> None:
    error = failure(429, "too many", **headers)
    assert error.facts["retry_after"] == seconds
    assert says in str(error)


def test_a_refused_key_is_looked_for_where_it_came_from() -> None:
    assert "check the environment variable OPENAI_API_KEY" in str(failure(401, "no"))
    own = Endpoint(provider="openai", model="m", url="", variable="", key="")
    assert "check what the client signs in with" in str(failure(403, "no", own))


def test_no_message_has_a_key_in_it() -> None:
    assert "no such key: <key>" in str(failure(400, "no such key: sk-secret"))
