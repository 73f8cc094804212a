"""Ids and filters that mean something to a file system, a pattern or a query: only names here."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import anyio
import pytest

import perdure
from perdure import Message, SessionManager
from perdure.cli import main
from perdure.errors import ConfigError
from perdure.records.keys import SessionKey
from tests.integration.journeys.backends import EACH, store_of, url_of

pytestmark = pytest.mark.deep

COMPOSED = unicodedata.normalize("NFC", "Zoë")
DECOMPOSED = unicodedata.normalize("NFD", "Zoë")

IDS = [
    *("..", ".", "a/b", "a\\b", "/etc/passwd", "../../x", "C:\\x", "*", "?", "[x]", "[!x]", ":"),
    *("{x}", "{", "}", "%", "%2F", "%00", "_", "'", '"', "';--", "`", "$(x)", "\\", "\\x00", " "),
    *(
        " x",
        "x ",
        "CON",
        "con",
        "nul.txt",
        "x.",
        "a",
        "A",
        "~",
        "-x",
        "--",
        "#",
        "@",
        "=",
        "+",
        "&",
    ),
    *(COMPOSED, DECOMPOSED, "\u202e", "\u2028", "\ud7ff", "\U0010ffff", "n" * 1000, "ü" * 512),
    *("default", "tombstone", "blobs", "owners", "s3://x", "http://x?y=z"),
]
REFUSED = {
    "nothing": ("", "empty"),
    "NUL": ("a\0b", "control character"),
    "line break": ("a\nb", "control character"),
    "escape": ("\x1b[2J", "control character"),
    "delete": ("\x7f", "control character"),
    "surrogate": ("\ud800", "surrogate"),
    "10,000 characters": ("x" * 10_000, "10000 bytes"),
    "1,026 bytes": ("ü" * 513, "1026 bytes"),
}
FILTERS = ["%", "_", "*", "?", "'", '"', "\\", "';--", "[x]", "{x}", "a%", ":", "\U0010ffff"]


@pytest.fixture(params=EACH)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


async def listed(sessions: SessionManager, **chosen: str) -> list[SessionKey]:
    """List all pages, short ones."""
    found: list[SessionKey] = []
    page = await sessions.list(limit=20, **chosen)
    while page:
        found += [info.key for info in page]
        page = await sessions.list(limit=20, after=page[-1], **chosen)
    return found


async def test_every_id_is_a_session_of_its_own(kind: str, tmp_path: Path) -> None:
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        for id in IDS:
            session = await sessions.open(id)
            session.append(Message.user(f"I am {id!r}"))
            await session.save()
            await session.aclose()
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        assert await listed(sessions) == sorted(map(SessionKey, IDS))
        for id in IDS:
            view = await sessions.load(id)
            assert view is not None
            assert [message.text for message in view.context()] == [f"I am {id!r}"]
        for prefix in FILTERS:
            wanted = sorted(SessionKey(id) for id in IDS if id.startswith(prefix))
            assert await listed(sessions, prefix=prefix) == wanted, prefix
        gone, left = IDS[::2], IDS[1::2]
        for id in gone:
            await sessions.delete(id)
        assert await listed(sessions) == sorted(map(SessionKey, left))
        for id in left:
            assert await sessions.exists(id), id


async def test_owners_and_tags_are_compared_and_no_patterns(kind: str, tmp_path: Path) -> None:
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        for number, name in enumerate(FILTERS):
            session = await sessions.open(f"s{number:02}", owner=name, tags=[name, f"{name}x"])
            session.append(Message.user("Hello"))
            await session.aclose()
        for number, name in enumerate(FILTERS):
            mine = [SessionKey(f"s{number:02}")]
            assert await listed(sessions, owner=name) == mine, name
            assert await listed(sessions, tag=name) == mine, name
            assert await listed(sessions, tag=f"{name}x") == mine, name
            assert await listed(sessions, owner=f"{name}x") == [], name
        nasty = "' OR '1'='1"
        assert await listed(sessions, owner=nasty) == await listed(sessions, tag=nasty) == []


async def test_a_tenant_is_a_name_as_well(kind: str, tmp_path: Path) -> None:
    tenants = ["..", "a/b", "*", "{x}", "a:b", "%", "'", COMPOSED, DECOMPOSED]
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        for tenant in tenants:
            async with sessions.open("a", session="a/b", tenant=tenant) as session:
                session.append(Message.user(tenant))
        await sessions.flush()
        for tenant in tenants:
            key = SessionKey("a", "a/b", tenant)
            assert await listed(sessions, tenant=tenant) == [key], tenant
            view = await sessions.load("a", session="a/b", tenant=tenant)
            assert view is not None
            assert [message.text for message in view.context()] == [tenant]
        assert await listed(sessions) == []


async def test_an_id_that_fits_nowhere_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """At the door, before any store."""
    async with perdure.connect(store_of("sqlite", tmp_path)) as sessions:
        for id, reason in REFUSED.values():
            with pytest.raises(ConfigError, match=reason):
                await sessions.open(id)
            with pytest.raises(ConfigError, match=reason):
                await sessions.load(id)
            with pytest.raises(ConfigError, match=reason):
                await sessions.post(id, Message.user("x"))
            with pytest.raises(ConfigError, match=reason):
                await sessions.delete(id)
        assert await listed(sessions) == []


NEVER = {
    "owner": ["\ud800"],
    "tag": ["\ud800"],
    "prefix": ["\ud800", "a\0b"],
    "tenant": ["\ud800", "a\0b", "x" * 10_000],
}


async def test_a_filter_that_is_no_text_is_refused(kind: str, tmp_path: Path) -> None:
    async with perdure.connect(store_of(kind, tmp_path)) as sessions:
        async with sessions.open("a", owner="o\0", tags=["t\0"]) as session:
            session.append(Message.user("Hello"))
        await session.aclose()
        for what, values in NEVER.items():
            for bad in values:
                with pytest.raises(ConfigError, match=what):
                    await sessions.list(**{what: bad})
        assert await sessions.list(prefix="x" * 100_000) == []
        assert await sessions.list(owner="x" * 100_000) == []
        assert await listed(sessions, owner="o\0", tag="t\0") == [SessionKey("a")]


@pytest.mark.parametrize("command", [["ls"], ["check"], ["migrate"]])
def test_a_word_of_the_command_line_that_is_no_text_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of("sqlite", tmp_path)

    async def fill() -> None:
        async with perdure.connect(url) as sessions, sessions.open("a") as session:
            session.append(Message.user("Hello"))

    anyio.run(fill)
    where = [url, str(tmp_path / "target")] if command == ["migrate"] else ["--store", url]
    assert main([*command, *where, "--tenant", "\udcff"]) == 2
    assert "tenant '\\udcff' holds a lone surrogate" in capsys.readouterr().err
