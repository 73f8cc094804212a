"""Code that type checkers must accept: contexts for providers. It is checked, never run."""

# pyright: strict
from __future__ import annotations

from typing import Any, assert_type

from perdure import Message, Session, SessionView
from perdure.providers import (
    FORMATS,
    Format,
    Issuer,
    ReasoningPolicy,
    RenderedContext,
    anthropic,
    groups,
    newest,
    parse,
    render,
)
from perdure.sync import Session as BlockingSession


def the_way_out(session: Session, view: SessionView, blocking: BlockingSession) -> None:
    assert_type(session.context(), list[Message])
    assert_type(session.context("openai", to="deepseek"), list[Any])
    assert_type(session.context("openai-responses", reasoning="strip_all"), list[Any])
    assert_type(session.context("anthropic"), RenderedContext)
    assert_type(view.context("gemini", to=Issuer("gemini", "gemini-4-pro")), RenderedContext)
    assert_type(blocking.context("anthropic"), RenderedContext)
    assert_type(blocking.context("openai"), list[Any])
    context = session.context("anthropic")
    assert_type(context.messages, list[dict[str, Any]])
    assert_type(context.system, str | list[dict[str, Any]] | None)
    assert_type(context.request, dict[str, Any])
    assert_type(context.format, Format)


def the_way_in(reply: dict[str, Any], sdk_object: object) -> None:
    assert_type(parse(reply, "anthropic"), Message)
    assert_type(parse(sdk_object, "openai", issuer="deepseek"), Message)
    assert_type(anthropic.parse(reply, issuer=Issuer("anthropic", model=None)), Message)


def pure(messages: list[Message], format: Format, policy: ReasoningPolicy) -> None:
    assert_type(FORMATS, tuple[Format, ...])
    assert_type(render(messages, format, reasoning=policy), RenderedContext)
    assert_type(newest(messages, 1 << 20, size=lambda one: len(one.text)), tuple[Message, ...])
    assert_type(groups(messages), list[tuple[Message, ...]])
