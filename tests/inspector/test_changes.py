"""Nothing is changed unless it was allowed, asked for by the inspector's own form, and logged."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from perdure import Message
from tests.inspector.conftest import client, connected, fill

CHANGES = ["rollback", "fork", "rebuild", "forget"]


async def form_of(http: httpx.AsyncClient, **fields: Any) -> dict[str, str]:
    """Return the fields of a confirmation, filled in as a browser would."""
    page = await http.get("/change", params=fields)
    assert page.status_code == 200, page.text
    # A browser gives the form's Origin as null under a stricter policy.
    assert page.headers["referrer-policy"] == "same-origin"
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page.text)
    return dict(hidden)


async def test_a_reading_inspector_has_no_way_to_change(inspector: httpx.AsyncClient) -> None:
    for method in ("GET", "POST"):
        assert (await inspector.request(method, "/change?change=forget")).status_code == 404
    for path in ("/session?agent=ada", "/checkpoints?agent=ada"):
        assert "/change?" not in (await inspector.get(path)).text


@pytest.mark.parametrize("change", CHANGES)
async def test_a_form_of_another_site_changes_nothing(change: str) -> None:
    async with connected() as sessions, client(sessions, allow_changes=True) as http:
        await fill(sessions)
        before = await sessions.load("ada")
        fields = {"change": change, "agent": "ada", "checkpoint": "1", "new_id": "eve"}
        fields["confirmed"] = "ada"
        assert (await http.post("/change", data=fields)).status_code == 400
        fields["form_token"] = "é" * 64
        assert (await http.post("/change", data=fields)).status_code == 400
        foreign = {"origin": "http://evil.com"}
        good = await form_of(http, change=change, agent="ada", checkpoint=1)
        answer = await http.post("/change", data={**fields, **good}, headers=foreign)
        assert answer.status_code == 403
        assert (await http.get("/actions?format=json")).json()["actions"] == []
        after = await sessions.load("ada")
        assert before is not None
        assert after is not None
        assert before.seq == after.seq
        assert not await sessions.exists("eve")


async def test_looking_at_a_confirmation_changes_nothing() -> None:
    async with connected() as sessions, client(sessions, allow_changes=True) as http:
        await fill(sessions)
        before = await sessions.load("ada")
        for change in CHANGES:
            await form_of(http, change=change, agent="ada", checkpoint=1)
        after = await sessions.load("ada")
        assert before is not None
        assert after is not None
        assert before.seq == after.seq


async def test_each_change_is_made_once_and_logged() -> None:
    async with connected() as sessions, client(sessions, allow_changes=True) as http:
        await fill(sessions)
        for change, more in (
            ("rollback", {"checkpoint": 1}),
            ("fork", {"new_id": "eve"}),
            ("rebuild", {}),
            ("forget", {"confirmed": "ada"}),
        ):
            form = await form_of(http, change=change, agent="ada", **more)
            done = await http.post("/change", data={**form, **more})
            assert (done.status_code, done.headers.get("location")) == (303, "/actions"), done.text
            if change == "rollback":
                ada = await sessions.load("ada")
                assert ada is not None
                assert await ada.state.get("app") == {"page": 1}
        assert not await sessions.exists("ada")
        eve = await sessions.load("eve")
        assert eve is not None
        assert await eve.state.get("app") == {"page": 1}
        page = (await http.get("/actions?format=json")).json()
        assert [action["done"] for action in page["actions"]] == [True] * 4
        assert page["actions"][0]["text"] == "forget the session"
        assert (await http.get("/actions")).text.count("roll back to checkpoint 1") == 1


async def test_a_change_that_fails_is_logged_as_failed() -> None:
    async with connected() as sessions, client(sessions, allow_changes=True) as http:
        await fill(sessions)
        form = await form_of(http, change="forget", agent="ada")
        refused = await http.post("/change", data={**form, "confirmed": "eve"})
        assert refused.status_code == 400
        assert "type the agent&#39;s id" in refused.text
        assert await sessions.exists("ada")
        (action,) = (await http.get("/actions?format=json")).json()["actions"]
        assert action["done"] is False


async def test_a_fork_begins_at_the_chosen_record() -> None:
    async with connected() as sessions, client(sessions, allow_changes=True) as http:
        async with sessions.open("ada") as ada:
            for number in range(3):
                ada.append(Message.user(f"message {number}"))
            await ada.save()
        page = await http.get("/session?agent=ada")
        at = re.findall(r"change=fork&amp;at=(\d+)|at=(\d+)", page.text)
        form = await form_of(http, change="fork", agent="ada", at=at[0][0] or at[0][1])
        await http.post("/change", data={**form, "new_id": "eve"})
        eve = await sessions.load("eve")
        assert eve is not None
        assert [message.text for message in eve.context()] == ["message 0"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the client leaves its body open on trio
async def test_a_form_that_is_too_large_is_refused() -> None:
    async with connected() as sessions, client(sessions, allow_changes=True) as http:
        answer = await http.post("/change", content=b"a" * 100_000)
        assert answer.status_code == 400
