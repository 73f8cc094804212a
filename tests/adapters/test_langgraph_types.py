"""What LangGraph's channels hold is read as it was stored, or raises and says what to do."""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

import pytest

pytest.importorskip("langgraph.checkpoint.base")

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, Generation, LLMResult
from langchain_core.prompt_values import ChatPromptValue
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Interrupt, Send
from pydantic import BaseModel, Field, computed_field

import perdure
from perdure import NotStorableError, register
from perdure.adapters import PerdureSaver
from perdure.adapters.thread_types import DataSerializer
from perdure.errors import CorruptRecordError, FormatError, UnsupportedVersionError


def back(value: Any, *types: Any, reads: tuple[Any, ...] | None = None) -> Any:
    """Return a value as another process reads it."""
    stored = DataSerializer(types).dumps_typed(value)
    return DataSerializer(types if reads is None else reads).loads_typed(stored)


def module(source: str, name: str = "tests.a_module_of_yesterday") -> Any:
    """Return a module with these classes, in the place of the one that was there."""
    made = sys.modules[name] = ModuleType(name)
    exec(source, made.__dict__)  # noqa: S102  # the test's own text
    return made


class Color(Enum):
    RED = "r"


class Level(IntEnum):
    LOW = 1


class Outer:
    class Color(Enum):
        RED = "inner"

    @dataclass
    class Place:
        name: str


@dataclass
class Plan:
    steps: list[Any]
    count: int = field(init=False, default=0)


@dataclass(frozen=True, slots=True)
class Frozen:
    plan: Plan


class Pair(NamedTuple):
    left: Any
    right: int


class Base(BaseModel):
    name: str = ""


class Derived(Base):
    more: int = 0


class Holder(BaseModel):
    anything: Any = None
    base: Base = Base()
    by_alias: str = Field(default="", alias="byAlias")

    @computed_field
    def size(self) -> int:
        return len(self.by_alias)


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    inside: T


class Tags(dict[str, int]):
    pass


class Word(str):
    __slots__ = ()


def plan_of(count: int) -> Plan:
    plan = Plan([Color.RED, {"deep": Frozen(Plan([]))}])
    plan.count = count
    return plan


MINE = (Color, Level, Outer.Color, Outer.Place, Plan, Frozen, Pair, Base, Derived, Holder, Box)
VALUES = [
    *(Counter("aab"), OrderedDict(b=1, a=2), deque([1], maxlen=3), deque([2])),
    *(Color.RED, Level.LOW, Outer.Color.RED, Outer.Place("x"), plan_of(3), Pair(Plan([]), 1)),
    *({Color.RED}, frozenset({1}), Decimal("1.10"), UUID(int=5), Path("/tmp")),
    *(Holder(anything=Derived(name="a", more=2)), Holder(base=Derived(more=3))),
    *(Holder.model_validate({"byAlias": "x"}), Box(inside=Plan([])), Box(inside=Base(name="b"))),
    *(Holder.model_construct(base="not a Base"), {"half": "\ud83d", "\ud83d": [["\udc00", ""]]}),
    *(
        HumanMessage("half \ud83d"),
        AIMessage("", tool_calls=[{"name": "t", "args": {}, "id": "1"}]),
    ),
    *(
        LLMResult(generations=[[Generation(text="g")]]),
        ChatPromptValue(messages=[HumanMessage("x")]),
    ),
    *(
        ChatGeneration(message=AIMessage("a")),
        Send("node", {"p": Plan([])}),
        Interrupt("v", id="i"),
    ),
    *({(1, 2): 1}, {1: {"x": None}}, {(1, ("a", 2)), Color.RED}, 1e300, -(2**63)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_read_as_it_was_stored(value: Any) -> None:
    found = back(value, *MINE)
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen
    elif isinstance(value, Plan):
        assert found.count == value.count
    elif isinstance(value, Holder):
        assert [type(each) for each in vars(found).values()] == [
            type(each) for each in vars(value).values()
        ]


def test_a_dict_with_a_factory_and_numbers_that_are_none_come_back() -> None:
    found = back(defaultdict(list, a=[1]))
    assert found == {"a": [1]}
    assert found.default_factory is list
    assert math.isnan(back({"x": math.nan})["x"])
    assert back([math.inf]) == [math.inf]


def test_what_is_plain_is_what_langgraph_stores() -> None:
    values = [{"a": [1, "x"]}, plan_of(1), Color.RED, HumanMessage("x", id="1"), deque([1]), {1}]
    for value in values:
        assert DataSerializer([Plan]).dumps_typed(value) == JsonPlusSerializer().dumps_typed(value)
    text = JsonPlusSerializer().loads_typed(DataSerializer().dumps_typed(["half \ud83d"]))
    assert text == ["half ?"]
    counted = DataSerializer().dumps_typed(Counter("aab"))
    assert JsonPlusSerializer(allowed_msgpack_modules=None).loads_typed(counted) == {"a": 2, "b": 1}


BEFORE = """
from dataclasses import dataclass
from enum import Enum
from pydantic import BaseModel
@dataclass
class Place:
    name: str = "x"
class Kind(Enum):
    A = "a"
    B = "b"
class Inner(BaseModel):
    old: int = 1
class Model(BaseModel):
    inner: Inner = Inner()
    name: str = "n"
"""


@pytest.mark.parametrize(
    ("old", "new", "value", "named"),
    [
        ('name: str = "x"', 'town: str = "x"', "Place()", "Place .*field 'name' was stored"),
        ('name: str = "x"', "name: str\n    more: int", "Place()", "Place .*field 'more' has no"),
        ('    B = "b"', "", "Kind.B", "Kind .*no member 'b'"),
        ("old: int = 1", "new: int = 1", "Model()", "Model .*field 'inner.old' was stored"),
        ('name: str = "n"', 'title: str = "n"', "Model()", "Model .*field 'name' was stored"),
        ('name: str = "n"', "name: int", "Model()", "Model .*field name: int_parsing"),
        ('name: str = "n"', "name: str\n    more: int", "Model()", "Model .*field more: missing"),
        (
            "class Place:",
            "class Town:",
            "Place()",
            r"Place, and there is no such class.*aliases=\[",
        ),
    ],
)
def test_a_class_that_has_changed_since_is_named_with_its_field(
    old: str, new: str, value: str, named: str
) -> None:
    before = module(BEFORE)
    name = before.__name__
    allowed = [(name, each) for each in ("Place", "Kind", "Model", "Inner")]
    stored = DataSerializer(allowed).dumps_typed(eval(value, before.__dict__))  # noqa: S307
    assert old in BEFORE
    module(BEFORE.replace(old, new))
    with pytest.raises(FormatError, match=named) as caught:
        DataSerializer(allowed).loads_typed(stored)
    assert not isinstance(caught.value, CorruptRecordError)


def test_a_class_that_has_changed_or_moved_is_upcast() -> None:
    @dataclass
    class Steps:
        items: list[Any]
        unit: str

    def first(fields: dict[str, Any]) -> dict[str, Any]:
        return {"items": fields["steps"]}

    moved = {"aliases": [f"{Plan.__module__}.Plan"], "version": 3}
    new = register(Steps, **moved, upcasts={1: first, 2: lambda it: {**it, "unit": "m"}})  # type: ignore[arg-type]
    nested = [Color.RED, {"deep": Frozen(Plan([]))}]
    stored = DataSerializer([Plan]).dumps_typed([Plan([1])])
    assert DataSerializer([new]).loads_typed(stored) == [Steps([1], "m")]
    again = DataSerializer([new]).dumps_typed(Steps(nested, "ft"))
    assert DataSerializer([new, Color, Frozen, Plan]).loads_typed(again) == Steps(nested, "ft")
    with pytest.raises(UnsupportedVersionError, match="version 3, and version 1 is registered"):
        DataSerializer([Steps, Color, Frozen, Plan]).loads_typed(again)
    broken = register(Steps, **moved, upcasts={1: lambda _: 1 / 0, 2: first})  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="upcast from version 1 raises ZeroDivisionError"):
        DataSerializer([broken]).loads_typed(stored)


def test_a_nested_class_of_an_older_release_is_read() -> None:
    class Older(JsonPlusSerializer):
        """What stored the class's own name alone."""

    old = Older().dumps_typed(Outer.Place("x"))
    assert DataSerializer([Outer.Place]).loads_typed(old) == Outer.Place("x")
    with pytest.raises(FormatError, match="Place"):
        DataSerializer([(Outer.__module__, "Outer.Place")]).loads_typed(old)


def test_what_cannot_be_read_back_is_told_when_it_is_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    serde = DataSerializer([Level])
    with caplog.at_level(logging.WARNING, "perdure"):
        for _ in range(2):
            serde.dumps_typed([Plan([]), Tags(a=1), Word("w"), Level.LOW, defaultdict(lambda: 1)])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    assert f"{__name__}.Plan was stored, which cannot be read back" in told[0]
    assert "PerdureSaver(types=[Plan])" in told[0]
    assert "Tags was stored, which comes back as a plain dict" in told[1]
    assert back([Tags(a=1), Word("w")], Tags, Word) == [Tags(a=1), Word("w")]
    assert type(back(Word("w"), Word)) is Word
    with pytest.raises(FormatError, match=r"Color, which is not allowed"):
        back({"a": Holder(anything=Color.RED)}, Holder)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [{"b": Fraction(1, 3)}]}, r"\['a'\]\[0\]\['b'\] is a Fraction"),
        (Plan([1, 2**70]), r"\.steps\[1\] is a int"),
        ([Holder(anything={"x": object()})], r"\[0\]\.anything\['x'\] is a object"),
        (object(), "it is a object"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(NotStorableError, match=place):
        DataSerializer(MINE).dumps_typed(value)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def saver(tmp_path: Path) -> AsyncIterator[PerdureSaver]:
    async with perdure.connect(f"sqlite:///{tmp_path}/threads.db") as sessions:
        yield PerdureSaver(sessions)


@pytest.mark.parametrize(
    "about",
    [{"half": "\ud83d"}, {"score": math.nan}, {"large": "x" * 17_000_000}, {"set": {1}}],
    ids=lambda about: next(iter(about)),
)
async def test_metadata_may_be_anything(saver: PerdureSaver, about: dict[str, Any]) -> None:
    from langgraph.checkpoint.base import empty_checkpoint

    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    await saver.aput(config, empty_checkpoint(), about, {})  # type: ignore[arg-type]
    found = await saver.aget_tuple(config)
    assert found is not None
    kept = {name: found.metadata[name] for name in about}  # type: ignore[literal-required]
    assert repr(kept) == repr(about)


async def test_a_channel_without_a_version_is_stored(saver: PerdureSaver) -> None:
    from langgraph.checkpoint.base import empty_checkpoint

    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    put = await saver.aput(config, {**empty_checkpoint(), "channel_values": {"a": 1}}, {}, {})
    await saver.aput_writes(put, [("a", 2)], "task")
    child = await saver.aput(put, empty_checkpoint(), {}, {})
    found = await saver.aget_tuple(put)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"a": 1}
    history = await saver.aget_delta_channel_history(config=child, channels=["a"])
    assert history["a"] == {"writes": [("task", "a", 2)], "seed": 1}


async def test_a_serializer_that_is_assigned_encrypts(saver: PerdureSaver) -> None:
    from langgraph.checkpoint.base import empty_checkpoint

    class Reversed(JsonPlusSerializer):
        """Stands for one that encrypts."""

        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            kind, data = super().dumps_typed(obj)
            return f"{kind}+reversed", data[::-1]

        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            kind, content = data
            return super().loads_typed((kind.removesuffix("+reversed"), content[::-1]))

    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    saver.serde = Reversed()
    await saver.aput(config, {**empty_checkpoint(), "channel_values": {"a": "x"}}, {}, {})
    found = await saver.aget_tuple(config)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"a": "x"}
    saver.serde = DataSerializer()
    with pytest.raises(FormatError, match=r"msgpack\+reversed"):
        await saver.aget_tuple(config)
    with pytest.raises(perdure.InvalidArgumentError, match="pickle_fallback"):
        saver.serde = JsonPlusSerializer(pickle_fallback=True)
    await saver.setup()


@pytest.mark.parametrize("thread", ["", "perdure:x", "a\ud83d", "x" * 2000])
async def test_an_id_that_cannot_be_one_is_called_a_thread_id(
    saver: PerdureSaver, thread: str
) -> None:
    with pytest.raises(perdure.InvalidArgumentError, match="thread_id"):
        await saver.aget_tuple({"configurable": {"thread_id": thread}})
