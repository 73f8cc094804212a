"""Contributors with plain methods: captured, restored, migrated, and free to block."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from perdure import ConfigError, Message, UnsupportedVersionError
from tests.sync.conftest import Connect


class Counter:
    """A plugin that counts, with blocking methods."""

    name = "counter"
    version = 1

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[str] = set()

    def capture(self) -> Any:
        self.threads.add(threading.current_thread().name)
        return {"count": self.count}

    def restore(self, state: Any, context: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.count = state["count"]


class Later(Counter):
    version = 2

    def capture(self) -> Any:
        return {"total": self.count}

    def restore(self, state: Any, context: Any) -> None:
        self.count = state["total"]


class Latest(Later):
    def migrate(self, state: Any, from_version: int) -> Any:
        assert from_version == 1
        return {"total": state["count"]}


def keep(again: Connect, count: int) -> Counter:
    with again(autosave=None) as sessions, sessions.open("mia") as session:
        counter = Counter()
        attachment = session.attach(counter)
        assert attachment.contributor is counter
        counter.count = count
        session.append(Message.user("Hello"))
        session.save()
        return counter


def test_state_is_kept_and_comes_back(again: Connect) -> None:
    assert not keep(again, 7).threads & {"perdure", "MainThread"}
    with again() as sessions, sessions.open("mia") as session:
        counter = Counter()
        session.attach(counter)
        assert counter.count == 7
        assert not counter.threads & {"perdure", "MainThread"}


class Async:
    """A contributor as the async API has them."""

    name = "counter"
    version = 1
    count = 0

    async def capture(self) -> Any:
        await anyio.sleep(0)
        return {"count": self.count}

    async def restore(self, state: Any, context: Any) -> None:
        self.count = state["count"]


def test_an_async_contributor_is_awaited(again: Connect) -> None:
    keep(again, 4)
    with again() as sessions, sessions.open("mia") as session:
        contributor = Async()
        attachment = session.attach(contributor)
        assert attachment.contributor is contributor
        assert contributor.count == 4
        contributor.count = 5
        attachment.changed()
    with again() as sessions, sessions.open("mia") as session:
        session.attach(counter := Counter())
        assert counter.count == 5


def test_the_same_contributor_may_be_attached_twice(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        counter = Counter()
        session.attach(counter)
        session.attach(counter)
        with pytest.raises(ConfigError, match="already"):
            session.attach(Counter())


def test_one_that_was_detached_is_asked_no_more(again: Connect) -> None:
    with again(autosave=None) as sessions, sessions.open("mia") as session:
        counter = Counter()
        session.attach(counter).detach()
        session.append(Message.user("Hello"))
        session.save()
    assert counter.threads == set()


def test_a_change_alone_is_saved(again: Connect) -> None:
    with again() as sessions, sessions.open("mia") as session:
        counter = Counter()
        attachment = session.attach(counter)
        counter.count = 3
        attachment.changed()
    with again() as sessions, sessions.open("mia") as session:
        session.attach(counter := Counter())
        assert counter.count == 3


def test_an_older_state_is_migrated_or_left_alone(again: Connect) -> None:
    keep(again, 5)
    with again() as sessions, sessions.open("mia") as session:
        with pytest.raises(UnsupportedVersionError, match="migrate"):
            session.attach(Later())
        session.attach(latest := Latest())
        assert latest.count == 5
