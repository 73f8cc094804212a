"""``perdure types``: which classes the values of a store are of."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import perdure
from perdure.adapters.thread_log import SDK, SHAPE, Items, Leaf, ThreadRecord, entries_of
from perdure.session.internals import accept
from tests.cli.conftest import Command


@dataclass
class Cart:
    items: list[Any]


@dataclass
class Pear:
    weight: int


def leaf(name: str, kind: str, data: bytes) -> Leaf:
    from base64 import b64encode

    return Leaf(name, kind, b64encode(data).decode())


def packed(code: int, *parts: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts)))


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with perdure.connect(tmp_path / "typed", types=[Cart, Pear]) as sessions:
            async with sessions.open("ada") as ada:
                ada.memory.set("cart", {"of": [Cart([Pear(3)])]})
                ada.append(Pear(1))
            async with sessions.open("bob", tenant="acme") as bob:
                bob.state.set("cart", Cart([]))
                bob.append(perdure.Message.user('A text with "types":{"a":"x:phantom@1"}'))
            async with sessions.open("thread") as thread:
                inner = msgspec.msgpack.Ext(0, msgspec.msgpack.encode(("os", "mkdir", "was run")))
                values = (
                    leaf("a", "msgpack", packed(5, "app.models", "Plan", {"inner": inner})),
                    leaf("b", "msgpack", packed(3, "app", "Boat", "x", "load")),
                    leaf("c", "pickle", b"cos\nmkdir\n"),
                    leaf("d", "json", b'[{"lc":2,"type":"constructor","id":["app","Old"]}]'),
                    leaf("e", "bytes", b"app.Bytes"),
                    Items("f", "joined:msgpack", None, 0, ("a",)),
                )
                accept(thread, entries_of([ThreadRecord(SDK, SHAPE, values=values)]))

    anyio.run(fill)
    return tmp_path / "typed"


def test_classes_are_listed_and_never_imported(
    command: Command, typed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = command("types", str(typed), "--json").json["types"]
    assert [(each["of"], each["type"], each["sessions"]) for each in found] == [
        ("langgraph", "a value of more than 4 MiB, which was not looked into", 1),
        ("langgraph", "a value stored as pickle", 1),
        ("langgraph", "app.Boat.load", 1),
        ("langgraph", "app.Old", 1),
        ("langgraph", "app.models.Plan", 1),
        ("langgraph", "os.mkdir", 1),
        ("perdure", "Cart", 2),
        ("perdure", "Pear", 1),
    ]
    assert not os.path.exists("was run")
    shown = command("types", str(typed), "--tenant", "acme").out
    assert "Cart" in shown
    assert "acme:bob" in shown
    assert "app.models.Plan" not in shown


def test_plain_data_needs_no_class(command: Command, store: Path) -> None:
    ran = command("types", str(store))
    assert (ran.status, "is plain data" in ran.out) == (0, True)


def test_langgraphs_own_classes_are_left_out(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("langgraph.graph")
    from langchain_core.messages import HumanMessage
    from langgraph.checkpoint.base import empty_checkpoint

    from perdure.adapters import PerdureSaver

    async def fill() -> None:
        async with PerdureSaver.from_conn_string(tmp_path / "threads") as saver:
            values = {"messages": [HumanMessage("Hello")], "cart": Cart([1])}
            checkpoint = {**empty_checkpoint(), "channel_values": values}
            checkpoint["channel_versions"] = {"messages": 1, "cart": 1}
            config: Any = {"configurable": {"thread_id": "ada", "checkpoint_ns": ""}}
            await saver.aput(config, checkpoint, {}, checkpoint["channel_versions"])  # type: ignore[arg-type]

    anyio.run(fill)
    found = command("types", str(tmp_path / "threads"), "--json").json["types"]
    assert [each["type"] for each in found] == [f"{Cart.__module__}.Cart"]
