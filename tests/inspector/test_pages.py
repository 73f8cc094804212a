"""Each page shows what the library says, as text; and its JSON says the same."""

from __future__ import annotations

import itertools
import re
from functools import partial
from html.parser import HTMLParser
from typing import Any

import anyio
import httpx
import pytest

import perdure
from perdure import Message, Shutdown
from perdure.inspector import conversation, pages
from perdure.records.keys import SessionKey
from perdure.stores.delegate import DelegatingStore
from perdure.stores.memory import MemoryBacking, MemoryStore
from tests.inspector.conftest import PNG, client, connected, fill, home_of

SESSION_PAGES = [
    "/session?agent=ada",
    "/session?agent=ada&view=timeline",
    "/session?agent=ada&view=raw",
    "/context?agent=ada",
    "/context?agent=ada&target=anthropic",
    "/states?agent=ada",
    "/checkpoints?agent=ada&a=1&b=2&verify=1",
    "/restore?agent=ada&target=gemini",
    "/delivery?agent=ada",
    "/delivery?agent=bob",
]
PAGES = ["/", "/?q=lovelace", "/inbox", "/session?agent=nobody", "/session", *SESSION_PAGES]


class Elements(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


async def test_stored_content_stays_text_and_no_script_is_inline(
    inspector: httpx.AsyncClient,
) -> None:
    texts = [(await inspector.get(path)).text for path in PAGES]
    assert not any("\u202e" in text for text in texts)
    for tag, attributes in itertools.chain.from_iterable(Elements(text).found for text in texts):
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert tag != "style"
        if tag == "script":
            assert (attributes["src"] or "").startswith("/static/")
        if tag == "img":
            assert (attributes["src"] or "").startswith("/image?")
        if tag in {"a", "link"}:
            assert (attributes["href"] or "").startswith(("/", "?", "#"))


async def test_every_page_has_its_json(inspector: httpx.AsyncClient) -> None:
    for path in PAGES:
        shown = await inspector.get(path)
        answer = await inspector.get(path, params={**httpx.URL(path).params, "format": "json"})
        assert answer.status_code == shown.status_code
        assert answer.headers["content-type"] == "application/json"
        assert isinstance(answer.json(), dict)


async def get(inspector: httpx.AsyncClient, path: str, **params: Any) -> Any:
    answer = await inspector.get(path, params={**params, "format": "json"})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_conversation_shows_tools_reasoning_and_images(
    inspector: httpx.AsyncClient,
) -> None:
    page = await get(inspector, "/session", agent="ada")
    parts = [(p["kind"], p["name"]) for item in page["items"] for p in item["parts"]]
    assert parts == [
        ("text", ""),
        ("reasoning", ""),
        ("text", ""),
        ("call", "add"),
        ("result", "add"),
        ("text", ""),
        ("text", ""),
        ("image", ""),
    ]
    seq = page["items"][-1]["seq"]
    image = await inspector.get("/image", params={"agent": "ada", "seq": seq, "part": 1})
    assert image.headers["content-type"] == "image/png"
    assert image.content == b"\x89PNG\r\n\x1a\n"
    assert PNG not in str(page)


async def test_only_images_are_served_as_images() -> None:
    evil = {"type": "image_url", "image_url": {"url": "data:text/html;base64,PGI+"}}
    svg = {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zz4="}}
    link = {"type": "image_url", "image_url": {"url": "javascript:alert(1)"}}
    async with connected() as sessions, client(sessions) as http:
        async with sessions.open("eve") as eve:
            eve.append(Message.user([evil, svg, link]))
            await eve.save()
        page = await http.get("/session?agent=eve")
        assert "<img" not in page.text
        assert 'href="javascript' not in page.text
        for part in range(3):
            answer = await http.get(f"/image?agent=eve&seq=2&part={part}")
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/json"


async def test_a_long_text_is_cut_and_fetched_on_demand(inspector: httpx.AsyncClient) -> None:
    page = await get(inspector, "/session", agent="ada")
    long = next(i for i in page["items"] if i["parts"][0]["size"] > conversation.LONGEST)
    assert len(long["parts"][0]["text"]) == conversation.LONGEST
    whole = await get(inspector, "/part", agent="ada", seq=long["seq"], part=0)
    assert len(whole["text"]) == long["parts"][0]["size"]
    assert whole["text"].startswith("<script>")


async def test_paging_a_conversation_shows_every_message_once_in_both_directions() -> None:
    async with connected() as sessions, client(sessions) as http:
        async with sessions.open("ada") as ada:
            for turn in range(20):
                async with ada.turn():
                    ada.append(Message.user(f"q{turn}"), Message.assistant(f"a{turn}"))
        for view in ("compact", "timeline", "raw"):
            key = "rows" if view == "timeline" else "items"
            seen: list[int] = []
            page = await get(http, "/session", agent="ada", view=view, limit=7)
            assert page["newer"] is None
            while True:
                items = [row.get("item", row)["seq"] for row in page[key]]
                seen = items + seen
                if page["older"] is None:
                    break
                before = page["older"]
                page = await get(http, "/session", agent="ada", view=view, limit=7, before=before)
            history = await (await load(sessions)).history(limit=1000)
            expected = [item.seq for item in history] if view == "compact" else seen
            assert seen == expected
            assert view == "compact" or seen == list(range(1, seen[-1] + 1))
            forward = set(items)
            while page["newer"] is not None:
                before = page["newer"]
                page = await get(http, "/session", agent="ada", view=view, limit=7, before=before)
                forward |= {row.get("item", row)["seq"] for row in page[key]}
            assert forward == set(seen)


async def load(sessions: Any) -> Any:
    return await sessions.load("ada")


async def test_a_timeline_leaves_idle_time_out() -> None:
    async with connected() as sessions, client(sessions) as http:
        async with sessions.open("ada") as ada:
            for at in (1000.0, 1010.0, 1010.0 + 7200, 1020.0 + 7200):
                ada.append(Message(role="user", content="hi", created_at=at))
            await ada.save()
        page = await get(http, "/session", agent="ada", view="timeline")
        rows = page["rows"][-4:]
        assert [row["idle"] for row in rows] == [0, 0, 7200, 0]
        assert [row["width"] for row in rows] == [0, 50, 0, 50]
        shown = (await http.get("/session?agent=ada&view=timeline")).text
        assert "idle for 2 h" in shown


async def test_the_context_is_told_from_the_log() -> None:
    async with connected(limits=small()) as sessions, client(sessions) as http:
        async with sessions.open("ada") as ada:
            for number in range(200):
                ada.append(Message.user(f"{number} " + "x" * 100))
            await ada.save()
        context = await get(http, "/context", agent="ada")
        assert context["is_cut"] is True
        assert context["head"]["messages"] == 200
        assert 0 < context["messages"] < 200
        oldest = await get(http, "/session", agent="ada", before=10)
        newest = await get(http, "/session", agent="ada")
        assert not any(item["in_context"] for item in oldest["items"])
        assert newest["items"][-1]["in_context"] is True


def small() -> Any:
    from perdure import Limits

    return Limits(context_bytes=8192)


async def test_states_memory_and_what_changed_between_checkpoints(
    inspector: httpx.AsyncClient,
) -> None:
    states = await get(inspector, "/states", agent="ada")
    assert [state["key"] for state in states["states"]] == ["app"]
    assert [entry["key"] for entry in states["memory"]] == ["harbor"]
    value = await get(inspector, "/value", agent="ada", kind="memory", name="harbor")
    assert "<script>" in value["text"]
    page = await get(inspector, "/checkpoints", agent="ada", a=1, b=2, verify=1)
    assert page["difference"]["changed"] == {"/state/app/page": {"before": 1, "after": 2}}
    assert page["verified"]["problems"] == []
    missing = await inspector.get("/checkpoints?agent=ada&a=1&b=9")
    assert missing.status_code == 404


async def test_what_waits_and_who_holds_it(inspector: httpx.AsyncClient) -> None:
    inbox = await get(inspector, "/inbox")
    assert [key["agent"] for key in inbox["waiting"]] == ["bob"]
    bob = await get(inspector, "/delivery", agent="bob")  # nobody has opened it
    assert (bob["head"], [post["post"] for post in bob["waiting"]]) == (None, ["post-1"])
    shown = await inspector.get("/delivery?agent=bob")
    assert "There is no session of this id yet" in shown.text
    assert "hello" in shown.text
    assert (await inspector.get("/delivery?agent=nobody")).status_code == 404
    ada = await get(inspector, "/delivery", agent="ada")
    assert ada["head"]["is_open_here"] is True
    assert ada["head"]["holder"]["released"] is False


async def test_sessions_are_filtered_and_searched() -> None:
    async with connected() as sessions, client(sessions) as http:
        async with sessions.open("ada", owner="lovelace", tags=["x"]) as ada:
            ada.describe(title="The engine")
        for params, found in (
            ({"owner": "lovelace"}, True),
            ({"owner": "love"}, False),
            ({"tag": "x"}, True),
            ({"prefix": "ad"}, True),
            ({"prefix": "da"}, False),
            ({"q": "ENGINE"}, True),
            ({"q": "nothing"}, False),
            ({"tenant": "other"}, False),
        ):
            page = await get(http, "/", **params)
            assert [info["key"]["agent"] for info in page["sessions"]] == ["ada"] * found, params
        assert await get(http, "/complete", prefix="a") == ["ada"]
        assert (await http.get("/?prefix=%00")).status_code == 400


async def test_sessions_that_were_used_last_come_first() -> None:
    async with connected() as sessions, client(sessions) as http:
        for at, name in enumerate(("a", "c", "b", "d")):
            async with sessions.open(name) as session:
                session.append(Message(role="user", content="x", created_at=4_000_000_000.0 + at))
        page = await get(http, "/", limit=3)
        assert [info["key"]["agent"] for info in page["sessions"]] == ["d", "b", "c"]
        place = {"after": page["next"]["agent"], "after_at": page["next_at"]}
        page = await get(http, "/", limit=3, **place)
        assert [info["key"]["agent"] for info in page["sessions"]] == ["a"]
        assert (page["searched"], page["next"]) == (1, None)
        assert 'id="older"' in (await http.get("/?limit=3")).text
        page = await get(http, "/", order="id", limit=2)
        assert [info["key"]["agent"] for info in page["sessions"]] == ["a", "b"]
        assert (await http.get("/?order=size")).status_code == 400


async def test_the_list_knows_sessions_that_another_process_uses() -> None:
    backing, quiet = MemoryBacking(), Shutdown(signals=False)
    async with (
        perdure.connect(MemoryStore(backing=backing), shutdown=quiet) as elsewhere,
        perdure.connect(MemoryStore(backing=backing), shutdown=quiet) as sessions,
        client(sessions) as http,
    ):
        for name in ("ada", "bob"):
            async with elsewhere.open(name, owner="lovelace", tags=["x"]) as session:
                session.describe(title=f"Of {name}")
                async with session.turn():
                    session.append(Message.user("Hello"))
        page = await get(http, "/", owner="lovelace", tag="x")
        shown = [(one["key"]["agent"], one["title"], one["turns"]) for one in page["sessions"]]
        assert shown == [("bob", "Of bob", 1), ("ada", "Of ada", 1)]


async def test_a_search_that_takes_long_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "BUDGET", -1.0)
    async with connected() as sessions, client(sessions) as http:
        for number in range(25):
            async with sessions.open(f"agent-{number:02}") as session:
                session.describe(title="even" if number % 2 == 0 else "odd")
                await session.aclose()
        found: list[str] = []
        where: dict[str, str] = {}
        requests = 0
        while True:
            page = await get(http, "/", q="even", order="id", limit=10, **where)
            requests += 1
            found += [info["key"]["agent"] for info in page["sessions"]]
            if page["next"] is None:
                break
            where = {"after": page["next"]["agent"], "after_session": page["next"]["session"]}
        assert found == [f"agent-{number:02}" for number in range(0, 25, 2)]
        assert requests > 1


async def test_ids_of_any_kind_have_pages() -> None:
    strange = "../a/b?c=d&e#f \u202e<b>é"
    async with connected() as sessions, client(sessions) as http:
        async with sessions.open(strange, session="x/y", tenant="t&t") as session:
            session.append(Message.user("hi"))
            await session.aclose()
        listed = (await http.get("/", params={"tenant": "t&t"})).text
        (link,) = set(re.findall(r'href="(/session\?[^"]*)"', listed))
        page = await http.get(link.replace("&amp;", "&"))
        assert page.status_code == 200
        assert "hi" in page.text


async def test_it_works_mounted_in_an_application() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    import perdure.inspector
    from tests.inspector.conftest import TOKEN

    async with connected() as sessions:
        await fill(sessions)
        inside = perdure.inspector.app(lambda: sessions, token=TOKEN)
        app = Starlette(routes=[Mount("/perdure", inside)])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            home = home_of(await http.get(f"/perdure/?token={TOKEN}"))
            assert home.startswith("/perdure/")
            page = await http.get(f"{home}session?agent=ada")
            assert page.status_code == 200
            for _, attributes in Elements(page.text).found:
                for name in ("href", "src"):
                    where = attributes.get(name) or "#"
                    assert where.startswith((home, "?", "#"))
            assert (await http.get("/perdure/static/inspector.css")).status_code == 200


async def test_a_page_of_many_messages_is_bounded() -> None:
    async with connected() as sessions, client(sessions) as http:
        async with sessions.open("long") as long:
            long.append(*[Message.user(f"message {number}") for number in range(2000)])
            await long.save()
        for path in ("/session?agent=long&before=1000&limit=100000", "/context?agent=long"):
            assert (await http.get(path)).text.count("<article") <= pages.MOST


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_session_of_the_openai_agents_sdk_is_shown_with_its_source() -> None:
    pytest.importorskip("agents")
    from perdure.adapters import PerdureSession

    async with connected() as sessions, client(sessions) as http:
        async with PerdureSession("ada", sessions) as session:
            await session.add_items(
                [
                    {"role": "user", "content": "When is low tide?"},
                    {
                        "type": "function_call",
                        "call_id": "c1",
                        "name": "tide",
                        "arguments": '{"place": "Cuxhaven"}',
                    },
                    {"type": "function_call_output", "call_id": "c1", "output": "14:20"},
                ]
            )
            page = await get(http, "/session", agent="ada")
        parts = [(part["kind"], part["text"]) for i in page["items"] for part in i["parts"]]
        assert parts == [
            ("text", "When is low tide?"),
            ("call", '{"place": "Cuxhaven"}'),
            ("result", "14:20"),
        ]
        assert {item["source"] for item in page["items"]} == {"openai-agents"}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_conversation_of_pydantic_ai_is_shown_with_its_source() -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.conversation import Conversation
    from pydantic_ai.models.test import TestModel

    from perdure.adapters import PerdureConversationStore

    async with connected() as sessions, client(sessions) as http:
        store = PerdureConversationStore(sessions)
        agent = Agent(TestModel(custom_output_text="At noon."))
        conversation = Conversation(conversation_id="ada")
        await store.save(await agent.run("When is low tide?", conversation=conversation))
        page = await get(http, "/session", agent="ada")
        texts = [part["text"] for item in page["items"] for part in item["parts"]]
        assert texts == ["When is low tide?", "At noon."]
        assert {item["source"] for item in page["items"]} == {"pydantic-ai"}
        for path in ("/session?agent=ada&view=timeline", "/states?agent=ada"):
            assert (await http.get(path)).status_code == 200


class SlowLook(DelegatingStore):
    """A store that looks for what waits only when it may."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.go = anyio.Event()

    async def sessions_with_pending_items(self, *, dead_letters: bool = False) -> list[SessionKey]:
        await self.go.wait()
        return await self.inner.sessions_with_pending_items(dead_letters=dead_letters)


async def test_a_page_does_not_wait_for_a_long_look_at_all_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "PATIENCE", 0.0)
    store = SlowLook()
    async with perdure.connect(store, shutdown=Shutdown(signals=False)) as sessions:
        await sessions.post("bob", Message.user("x"))
        async with client(sessions) as inspector:
            first = await get(inspector, "/inbox")
            assert (first["looking"], first["waiting"], first["at"]) == (True, [], None)
            assert "All sessions are being looked at" in (await inspector.get("/inbox")).text
            store.go.set()
            await anyio.wait_all_tasks_blocked()
            after = await get(inspector, "/inbox")
            assert [key["agent"] for key in after["waiting"]] == ["bob"]
            assert not after["looking"]
            again = await get(inspector, "/inbox")  # a new look; what the one before has seen
            assert (again["looking"], again["waiting"]) == (True, after["waiting"])
            monkeypatch.setattr(pages, "FRESH", -1.0)
            await anyio.wait_all_tasks_blocked()
            late = await get(inspector, "/inbox")
            assert late["looking"]


async def read(http: httpx.AsyncClient, path: str) -> httpx.Response:
    """Ask for a page until what it shows has been read; a thread may be at it."""
    with anyio.fail_after(60):
        while True:
            answer = await http.get(path)
            if "Look again" not in answer.text and '"looking":true' not in answer.text:
                return answer
            await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/checkpoints?agent=ada&a=1&b=2", "difference"),
        ("/checkpoints?agent=ada&verify=1", "verified"),
        ("/change?agent=ada&change=forget", "consequences"),
        ("/change?agent=ada&change=rebuild", "consequences"),
    ],
)
async def test_a_page_does_not_wait_until_a_whole_log_is_read(
    path: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PATIENCE", 0.0)
    async with connected() as sessions, client(sessions, allow_changes=True) as http:
        await fill(sessions)
        first = await http.get(path)
        assert first.status_code == 200
        assert "Look again" in first.text
        assert 'method="post"' not in first.text  # nothing is confirmed unseen
        page = (await read(http, f"{path}&format=json")).json()
        assert page[shown]


async def test_what_a_long_read_has_failed_with_is_told_to_the_next_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "PATIENCE", 0.0)
    async with connected() as sessions, client(sessions) as http:
        await fill(sessions)
        path = "/checkpoints?agent=ada&a=1&b=99"
        assert (await http.get(path)).status_code == 200
        answer = await read(http, path)
        assert (answer.status_code, "no checkpoint 99" in answer.text) == (404, True)


async def test_the_results_of_few_long_reads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "READS", 2)
    read: list[int] = []
    async with connected() as sessions:
        reads = pages.LongReads(sessions)

        async def number(value: int) -> int:
            read.append(value)
            return value

        for value in (1, 2, 3):
            assert await reads.result(value, partial(number, value)) == (value, False)
        assert read == [1, 2, 3]
        assert list(reads._reads) == [2, 3]
