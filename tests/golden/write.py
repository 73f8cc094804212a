"""``python -m tests.golden.write``: add to the golden store what it has not yet.

A golden store is what an earlier release has written, and what every later one has to read. So
this never writes a session anew: a session that is in the store stays as it is, byte for byte.
Whoever adds a kind of record adds a session to `SESSIONS` that holds it, runs this, looks at
what it says of the new session in expected.json, and commits both.
"""

from __future__ import annotations

import base64
import contextlib
import contextvars
import datetime
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import msgspec

import perdure
from perdure import EncodedRecord, Message, Shutdown, ToolCall, ToolResult
from perdure.memory.compaction import EpisodicItem, SemanticItem, item_entry
from perdure.memory.ledger import OVER, Admitted, Approval, Effect, change_entry
from perdure.records.json import encode
from perdure.records.keys import SessionKey
from perdure.records.messages import encode_message
from perdure.records.records import ADMITTED, APPROVAL, EFFECT, ENDING, EVENT, Entry
from perdure.restore.rebuild import context_entry
from perdure.session.internals import accept
from perdure.session.session import Session
from perdure.store import Batch, Status, take_after
from perdure.stores.file import FileStore
from tests.golden.reader import BLOBS, GOLDEN, copy_of, seen

START = 1_767_225_600.0
"""The first of January 2026, in seconds since 1970."""

Writing = Callable[[Path], Awaitable[None]]
SESSIONS: dict[SessionKey, Writing] = {}


def session(
    agent: str, *, session: str = "default", tenant: str = ""
) -> Callable[[Writing], Writing]:
    """Name the session that a function writes."""

    def keep(write: Writing) -> Writing:
        SESSIONS[SessionKey(agent, session, tenant)] = write
        return write

    return keep


def connected(root: Path | FileStore, owner: str = "") -> Any:
    store = FileStore(root, owner=owner) if isinstance(root, Path) else root
    return perdure.connect(store, autosave=None, shutdown=Shutdown(signals=False))


@session("everything")
async def everything(root: Path) -> None:
    """Every kind of record that a session, an agent and an application append."""
    async with connected(root, "first") as sessions:
        opened = await sessions.open("everything", owner="ada", tags=["golden", "v1"])
        opened.describe(title="All of it", color="blue", api_key="is left out")
        await _talk(opened)
        await _remember(opened)
        await opened.attach(_Plugin({"notes": ["one", "two"]}))
        opened.append(EncodedRecord("app:rating", b'{"stars": 5}'))
        accept(opened, (Entry(EVENT, b'{"event":"something happened"}'),))
        await opened.save()
    async with connected(root, "second") as sessions:
        opened = await sessions.open("everything")
        async with opened.turn("by-request-id"):
            opened.append(Message.user("And now?"), Message.assistant("Now it is another process."))
        await opened.save()


async def _talk(opened: Session) -> None:
    async with opened.turn():
        start = opened.append(
            Message.system("You are kind."),
            Message.user([{"type": "text", "text": "Look:"}, {"type": "later", "of": 2**60}]),
        )
        opened.append(
            Message(
                role="assistant", reasoning="a sum", tool_calls=(ToolCall("c1", "add", {"a": 1}),)
            ),
            Message(role="tool", tool_result=ToolResult("c1", "add", {"sum": 1})),
        )
        opened.append(
            Message(
                role="assistant",
                content="It is 1 — 世界",
                image_urls=("https://example.invalid/1.png",),
                extra={"x_unknown": msgspec.Raw(b'{"kept": 1.10}')},
            )
        )
    try:
        async with opened.turn():
            opened.append(Message.user("This is cut"))
            raise _OnPurposeError
    except _OnPurposeError:
        pass
    opened.append(Message.user("A mistake"))
    await opened.retract(after=start)
    accept(
        opened,
        (
            context_entry(
                [Message.system("You are kind."), Message.user("A summary of it")],
                epoch_id=1,
                last_compaction_ts=START,
                system_prompt_sha256=None,
                reason="compaction",
            ),
        ),
    )


async def _remember(opened: Session) -> None:
    opened.memory.set("city", {"name": "Oosthaven"}, description="where the harbor is")
    opened.memory.set("gone", 1)
    opened.memory.drop("gone")
    opened.state.set("plan", {"step": 2})
    opened.state.set(
        "native",
        {
            "when": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
            "sum": Decimal("1.10"),
            "bytes": b"\x00\xff",
            "id": uuid.UUID(int=7),
            "pair": (1, 2),
        },
    )
    accept(
        opened,
        (
            item_entry(
                EpisodicItem(id="e1", ts=START, turn_ids=("turn_0001",), summary="They met.")
            ),
            item_entry(SemanticItem(id="s1", ts=START, fact="The harbor is in Oosthaven.")),
        ),
    )


class _OnPurposeError(Exception):
    pass


class _Plugin:
    name = "in_context_memory"
    version = 1

    def __init__(self, value: Any) -> None:
        self.value = value

    async def capture(self) -> Any:
        return self.value

    async def restore(self, state: Any, context: Any) -> None:
        self.value = state


@session("everything", session="a tail")
async def tail(root: Path) -> None:
    """Records that no fold has seen, of an owner that never released the session."""
    key = SessionKey("everything", "a tail")
    store = FileStore(root, owner="gone")
    await store.open()
    grant = await take_after(store, key, after=0)
    said = [encode_message(Message.user(f"number {number}"), now=START) for number in range(3)]
    group = (said[1]._replace(end=False), said[2])
    for first, records in ((grant.head + 1, said[:1]), (grant.head + 2, group)):
        (outcome,) = await store.append_many([Batch(key, grant.epoch, first, tuple(records))])
        assert outcome.status is Status.OK, outcome
    await store.aclose()


@session("Größe & *?", session="Ünïcode", tenant="ACME / Inc.")
async def strange_names(root: Path) -> None:
    """Names that no file may have, in a tenant with blobs."""
    store = FileStore(root, owner="third")
    async with connected(store) as sessions:
        blobs = {hashlib.sha256(data).hexdigest(): data for data in BLOBS}
        await store.put_blobs("ACME / Inc.", blobs)
        opened = await sessions.open("Größe & *?", session="Ünïcode", tenant="ACME / Inc.")
        opened.append(Message.user("Hello"))
        await opened.save()


@session("tried again")
async def tried_again(root: Path) -> None:
    """A turn that was cut, amid which another task appended, and its next attempt."""
    async with connected(root, "fifth") as sessions:
        opened = await sessions.open("tried again")
        elsewhere = contextvars.copy_context()
        with contextlib.suppress(_OnPurposeError):
            async with opened.turn("request-17", request="How deep?"):
                opened.append(Message.user("How deep?"))
                elsewhere.run(opened.append, Message.user("paid"))
                opened.append(Message.assistant("It is"))
                raise _OnPurposeError
        async with opened.turn("request-17", request="How deep?"):
            opened.append(Message.user("How deep?"), Message.assistant("It is 7 m deep"))


@session("pictures")
async def pictures(root: Path) -> None:
    """Images in blobs: a user's and a tool's."""
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1280).to_bytes(4, "big") + (800).to_bytes(4, "big")
    one, other = (base64.b64encode(head + bytes([number]) * 66_000).decode() for number in range(2))
    source = {"type": "base64", "media_type": "image/png", "data": other}
    async with connected(root, "seventh") as sessions:
        opened = await sessions.open("pictures")
        opened.append(Message.user("Look", image_urls=[f"data:image/png;base64,{one}"]))
        await opened.save()
    async with connected(root, "eighth") as sessions:
        opened = await sessions.open("pictures")
        opened.append(Message.assistant(tool_calls=[ToolCall("c1", "shot")]))
        opened.append(Message.tool("c1", [{"type": "image", "source": source}], name="shot"))
        await opened.save()


@session("torn")
async def torn(root: Path) -> None:
    """A log whose last write was cut in its middle, and a cache that is gone."""
    async with connected(root, "fourth") as sessions:
        opened = await sessions.open("torn")
        opened.append(Message.user("This is whole"))
        await opened.save()
    folder = root / "agents" / "torn"
    with (folder / "log" / "1-0.jsonl").open("ab") as file:
        file.write(b'{"half of a rec')
    (folder / "working_context_snapshot.json").unlink()


@session("segments")
async def segments(root: Path) -> None:
    """A log in several files of one epoch, and of the next."""
    with mock.patch("perdure.stores.file.log.SEGMENT_BYTES", 1000):
        for owner in ("fifth", "sixth"):
            async with connected(root, owner) as sessions:
                opened = await sessions.open("segments")
                for number in range(8):
                    opened.append(Message.user(f"{owner} says {number} {'x' * 200}"))
                    await opened.save()


@session("deleted")
async def deleted(root: Path) -> None:
    """A session that was removed: its epochs may not start again."""
    async with connected(root, "seventh") as sessions:
        opened = await sessions.open("deleted")
        opened.append(Message.user("secret"))
        await opened.save()
        await sessions.delete("deleted")


@session("parent")
async def parent(root: Path) -> None:
    """A conversation that others go on with: from its middle, and as a copy of all of it."""
    async with connected(root, "eighth") as sessions:
        opened = await sessions.open("parent")
        for number in range(4):
            async with opened.turn(f"turn-{number}"):
                opened.append(Message.user(f"Question {number}"), Message.assistant("An answer"))
        opened.memory.set("known", "to all of them")
        await opened.save()
        await sessions.fork("parent", "fork", at="turn-1")
        await sessions.copy("parent", "copy")
        for name in ("parent", "fork", "copy"):
            one = await sessions.open(name)
            async with one.turn():
                one.append(Message.user(f"{name} goes on by itself"))


@session("fork")
@session("copy")
async def written_with_their_parent(root: Path) -> None:
    """Nothing left to write."""


@session("half deleted")
async def half_deleted(root: Path) -> None:
    """A session whose holder was killed when it began to delete it."""
    async with connected(root, "ninth") as sessions:
        opened = await sessions.open("half deleted")
        opened.append(Message.user("still here"))
        accept(opened, (Entry(ENDING, b"{}"),))
        await opened.save()


@session("waiting")
async def waiting(root: Path) -> None:
    """Two posts that were taken, and two that wait in the inbox of a session that nobody has."""
    async with connected(root, "tenth") as sessions:
        await sessions.post("waiting", Message.user("the first"), key="post-1")
        await sessions.post("waiting", EncodedRecord("app:rating", b'{"stars": 4}'), key="post-2")
        opened = await sessions.open("waiting")
        await opened.save()
        while list(root.glob("agents/waiting/inbox-*/*.json")):  # what was taken is removed later
            await anyio.sleep(0.01)
        await opened.aclose()
        await sessions.post("waiting", Message.user("the third"), key="post-3")
        await sessions.post("waiting", Message.user("the first again"), key="post-1")


@session("remembers")
async def remembers(root: Path) -> None:
    """A working memory with values of every size and standing, changed and dropped."""
    async with connected(root, "eleventh") as sessions:
        opened = await sessions.open("remembers")
        opened.memory.set("small", 1, description="a number", scope="session")
        opened.memory.set("large", {"text": "x" * 5000}, priority="high", pinned=True)
        opened.memory.set("dropped", "y" * 5000)
        await opened.save()
        opened.memory.drop("dropped")
        opened.memory.set("small", 2)
        await opened.save()
    async with connected(root, "twelfth") as sessions:
        opened = await sessions.open("remembers")
        opened.memory.set("behind the fold", "z" * 3000)
        await opened.save()


@session("checkpointed")
async def checkpointed(root: Path) -> None:
    """Checkpoints of the session and of states that were given, one pruned, one gone back to."""
    async with connected(root, "thirteenth") as sessions:
        opened = await sessions.open("checkpointed")
        await _talk(opened)
        opened.events.emit("custom", "plan", {"goal": "draft"})
        await opened.checkpoints.create("of the session")
        opened.memory.set("later", "gone again")
        await _remember(opened)
        await opened.checkpoints.create("small", {"memory": "vector://xyz"})
        await opened.checkpoints.create("large", {"text": "Oosthaven " * 1000})
        await opened.checkpoints.rollback(1)
        await opened.checkpoints.prune(keep=[1, 3, 4])
    async with connected(root, "fourteenth") as sessions:
        opened = await sessions.open("checkpointed")
        await opened.checkpoints.create("behind the fold")


@session("begun")
async def begun(root: Path) -> None:
    """What an agent has begun and not ended: two messages, an effect, an approval; and some over."""
    admitted = encode_message(Message.user("Book a berth.")).payload
    async with connected(root, "fifteenth") as sessions:
        opened = await sessions.open("begun")
        for name in ("first", "second", "answered"):
            entry = Admitted(id=name, message=msgspec.Raw(admitted), at=START, asked=f"{name} turn")
            accept(opened, (Entry(ADMITTED, encode(entry)),))
        for name in ("mail", "sent"):
            effect = Effect(
                id=f"key-{name}", turn="t-1", call=name, tool="send_mail", policy="ask", at=START
            )
            accept(opened, (Entry(EFFECT, encode(effect)),))
        approval = Approval(id="ask-1", turn="t-1", call="c-9", tool="open_door", at=START)
        accept(opened, (Entry(APPROVAL, encode(approval)),))
        accept(opened, (change_entry(ADMITTED, "first", turn="t-1", attempts=1),))
        accept(opened, (change_entry(EFFECT, "key-mail", state="begun"),))
        await opened.save()
    async with connected(root, "sixteenth") as sessions:
        opened = await sessions.open("begun")
        accept(opened, (change_entry(ADMITTED, "answered", state=OVER),))
        accept(opened, (change_entry(EFFECT, "key-sent", state=OVER),))
        accept(opened, (change_entry(EFFECT, "key-mail", state="unknown"),))
        await opened.save()


async def write(golden: Path) -> list[str]:
    """Write the sessions that are missing, and what is to be expected of them."""
    path = golden / "expected.json"
    expected = json.loads(path.read_text("utf-8")) if path.exists() else {}
    missing = [key for key in SESSIONS if str(key) not in expected]
    root = golden / "store"
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o700)
    for key in missing:
        with _still():
            await SESSIONS[key](root)
    shutil.rmtree(root / "owners", ignore_errors=True)  # of processes, not of sessions
    with tempfile.TemporaryDirectory() as folder:
        expected |= await seen(copy_of(golden, Path(folder)), missing)
    text = json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", "utf-8")
    return [str(key) for key in missing]


def _still() -> Any:
    """Make times, names and ids the same in every run."""
    ticks = itertools.count()
    stack = contextlib.ExitStack()
    for name, value in (
        ("time.time", lambda: START + next(ticks)),
        ("time.time_ns", lambda: int(START + next(ticks)) * 10**9),
        ("os.getpid", lambda: 4242),
        ("perdure.stores.file.leases.host_name", lambda: "golden"),
        ("perdure.stores.file.leases.boot_id", lambda: "golden-boot"),
    ):
        stack.enter_context(mock.patch(name, value))
    return stack


def main() -> int:
    for name in anyio.run(write, GOLDEN):
        print(f"written: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
