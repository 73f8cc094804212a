from __future__ import annotations

import anyio
import pytest

from perdure import Message, SessionQuarantinedError
from perdure.testing import Sandbox, assert_saved, wait_saved


@pytest.fixture
async def sandbox():
    async with Sandbox(autosave=None) as sandbox:
        yield sandbox


async def test_what_is_durable_passes(sandbox):
    one, other = [await sandbox.sessions.open(name) for name in ("one", "other")]
    one.append(Message.user("Hello"))
    await one.save()
    assert_saved(one, other)
    await wait_saved(one, other)
    assert one.durable_version == one.version


async def test_what_is_not_is_named_with_its_numbers(sandbox):
    one, other = [await sandbox.sessions.open(name) for name in ("one", "other")]
    await one.save()
    other.append(Message.user("private"), Message.user("private"))
    with pytest.raises(AssertionError) as caught:
        assert_saved(one, other)
    said = str(caught.value)
    assert "session other has 2 records that are not durable" in said
    assert "version 3, durable up to 1" in said
    assert "one" not in said
    assert "private" not in said


async def test_the_reason_of_a_failed_save_is_named(sandbox):
    session = await sandbox.sessions.open("mia")
    session.append(Message.user("Hello"))
    sandbox.store.fail_next(how="permanent")
    with pytest.raises(SessionQuarantinedError):
        await session.save()
    with pytest.raises(AssertionError, match="the last save failed: append_many was made to fail"):
        assert_saved(session)
    await session.discard_unsaved()


async def test_wait_saved_waits_for_autosave_to_do_it(sandbox):
    session = await sandbox.sessions.open("mia")
    session.append(Message.user("Hello"))
    async with anyio.create_task_group() as group:
        group.start_soon(wait_saved, session)
        await anyio.wait_all_tasks_blocked()
        assert session.durable_version < session.version
        await session.save()
    assert session.durable_version == session.version


async def test_wait_saved_gives_up_with_the_facts(sandbox):
    session = await sandbox.sessions.open("mia")
    session.append(Message.user("Hello"))
    with pytest.raises(AssertionError, match="1 records that are not durable"):
        await wait_saved(session, timeout=0)
    await session.save()
