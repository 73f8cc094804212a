"""Log lines have their facts in the text, and in fields of the record."""

from __future__ import annotations

import ast
import logging

import pytest

from perdure import StoreUnavailableError
from perdure._lib.logs import log_facts
from tests.source_tree import SRC

LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
log = logging.getLogger("perdure.test")


def test_facts_are_in_the_text_and_in_fields(caplog: pytest.LogCaptureFixture) -> None:
    message = "session %(session)s is damaged"
    log_facts(log, logging.WARNING, message, session="ada", bytes=7, took=0.51234)
    (record,) = caplog.records
    assert record.getMessage() == "session ada is damaged (bytes=7, took=0.512)"
    assert (record.__dict__["session"], record.__dict__["took"]) == ("ada", 0.51234)
    assert record.msg == "session %(session)s is damaged (bytes=%(bytes)s, took=%(took)s)"
    assert record.filename == "test_logs.py"


def test_what_is_a_control_character_elsewhere_is_none_in_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_facts(log, logging.WARNING, "it is damaged", path="a\x1b[2J%(b)s")
    log_facts(log, logging.WARNING, "it is 7 % damaged")
    assert caplog.messages == ["it is damaged (path=a\\x1b[2J%(b)s)", "it is 7 % damaged"]


def test_an_outage_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perdure")
    outage, other = StoreUnavailableError("it is down"), ValueError("other")
    log_facts(log, logging.WARNING, "not saved", outage, session="ada")
    log_facts(log, logging.WARNING, "not saved", other, session="ada")
    first, second = caplog.records
    assert (first.getMessage(), first.exc_info) == ("not saved (session=ada): it is down", None)
    assert second.getMessage() == "not saved (session=ada)"
    assert second.exc_info is not None
    assert second.exc_info[1] is other


def test_there_is_no_other_way_to_log_fields() -> None:
    found = [
        f"{path.relative_to(SRC)}:{node.lineno}"
        for path in sorted((SRC / "perdure").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") in LOGS
        and any(one.arg == "extra" for one in node.keywords)
    ]
    assert {place.partition(":")[0] for place in found} == {"perdure/_lib/logs.py"}
