"""A list reads the directory alone; statuses, leases and what is unsaved are asked for."""

from __future__ import annotations

from typing import Any

import anyio

import perdure
from perdure import Autosave, Message, Shutdown
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryStore
from tests.inspector.conftest import client, connected
from tests.inspector.test_pages import get


class Counting(DelegatingStore):
    """A store that counts the calls that read a session."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.read: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in {"read_log", "holder", "head", "read_documents", "read_for_restore", "receive"}:
            self.read.append(name)
        return super().__getattribute__(name)


async def test_a_list_reads_no_session_however_many_there_are() -> None:
    store = Counting(MemoryStore())
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        for number in range(120):
            async with sessions.open(f"agent-{number}") as session:
                session.append(Message.user("x"))
                await session.aclose()
        async with client(sessions) as http:
            store.read.clear()
            page = await get(http, "/")
            revision = await get(http, "/revision")
            assert revision == await get(http, "/revision")
            assert store.read == []
    assert len(page["sessions"]) == 100
    assert page["sessions"][0]["key"]["agent"] == "agent-119"


async def test_a_session_says_its_status_what_is_unsaved_and_when_it_saves() -> None:
    autosave = Autosave(debounce=50.0, max_delay=60.0)
    async with connected(autosave=autosave) as sessions, client(sessions) as http:
        async with sessions.open("ada") as ada:
            async with ada.turn():
                ada.append(Message.user("?"))
                await ada.save()
                running = await get(http, "/status", agent="ada")
                listed = await get(http, "/")
            ada.append(Message.assistant("!"))
            head = (await get(http, "/session", agent="ada"))["head"]
            text = (await http.get("/session?agent=ada")).text
            workers = await http.get("/workers")
            await ada.save()
            saved = await get(http, "/status", agent="ada")
            holders = (await get(http, "/workers"))["workers"]
        await ada.aclose()
        nobody = (await get(http, "/workers"))["workers"]
        missing = await http.get("/status?agent=nobody")
    assert running["status"] == {"name": "running", "detail": "turn 1"}
    assert [status["name"] for status in listed["statuses"]] == ["running"]
    assert head["status"]["name"] == "idle"
    assert head["saving"]["unsaved_records"] == 1
    assert head["saving"]["intervals"] == {"debounce": 50.0, "max_delay": 60.0}
    assert "50 s after the last change, at most 60 s after the first" in text
    assert "1 record, " in text
    assert "1 record, " in workers.text
    assert saved["saving"]["unsaved_records"] == 0
    assert saved["revision"] != running["revision"]
    (worker,) = holders
    assert (worker["is_here"], [one["key"]["agent"] for one in worker["sessions"]]) == (
        True,
        ["ada"],
    )
    assert nobody == []
    assert missing.status_code == 404


async def test_a_turn_that_ended_with_an_error_is_marked() -> None:
    async with connected() as sessions, client(sessions) as http:
        async with sessions.open("ada") as ada:
            try:
                async with ada.turn("order-7"):
                    ada.append(Message.user("?"))
                    raise TimeoutError
            except TimeoutError:
                pass
            try:
                with anyio.fail_after(0):
                    async with ada.turn():
                        ada.append(Message.user("?"))
                        await anyio.sleep_forever()
            except TimeoutError:
                pass
            await ada.save()
        page = await get(http, "/session", agent="ada")
        text = (await http.get("/session?agent=ada")).text
    turns = [item["turn"] for item in page["items"] if item["turn"]]
    assert [(turn["number"], turn["name"], turn["status"]) for turn in turns] == [
        (1, "order-7", "failed"),
        (2, "", "interrupted"),
    ]
    assert "TimeoutError" in text
    assert page["head"]["status"]["name"] == "interrupted"
