"""Registered types come back as themselves, over versions, or stay what they were."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given

from perdure.errors import (
    ConfigError,
    CorruptRecordError,
    NotStorableError,
    TooLargeError,
    UnsupportedVersionError,
)
from perdure.records.types import Registered, Registry, register
from perdure.records.values import OpaqueValue, decode_value, encode_value
from tests.records.test_values import RICH, same


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Mixed(enum.Enum):
    ONE = 1
    TEXT = "x"
    PAIR = (0, 255)


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class Inner:
    n: int
    when: dt.datetime | None = None


@dataclasses.dataclass
class Outer:
    inner: Inner
    colors: list[Color] = dataclasses.field(default_factory=list)
    tags: set[str] = dataclasses.field(default_factory=set)
    anything: Any = None


class Point(msgspec.Struct, frozen=True, rename="camel"):
    long_name: float = 0.0
    data: bytes = b""
    rest: Any = None


class Event(msgspec.Struct, tag="event", omit_defaults=True):
    note: str | msgspec.UnsetType = msgspec.UNSET
    inner: Inner | None = None


class Plain(msgspec.Struct, eq=False):
    x: int = 0


class Model:
    """Has a pydantic model's methods; what it does not dump, it loses."""

    def __init__(self, name: str, secret: str = "") -> None:
        self.name = name
        self.secret = secret

    def model_dump(self, *, mode: str, by_alias: bool, round_trip: bool) -> dict[str, Any]:
        assert (mode, by_alias, round_trip) == ("json", True, True)
        return {"Name": self.name}

    @classmethod
    def model_validate(cls, data: dict[str, Any]) -> Model:
        if not isinstance(data["Name"], str):
            message = f"canary: {data}"
            raise ValueError(message)
        return cls(data["Name"])


ALL = Registry([Color, Mixed, Access, Level, Inner, Outer, Point, Event, Plain, Model])
NOW = dt.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=dt.UTC)


def again(value: Any, registry: Registry = ALL) -> Any:
    data, tags = encode_value(value, registry)
    return decode_value(data, json.loads(json.dumps(tags)), registry)


@pytest.mark.parametrize(
    "value",
    [
        *[Color.RED, Level.LOW, *Mixed, Access.READ | Access.WRITE, Inner(1), Inner(1, NOW)],
        Outer(Inner(1, NOW), [Color.RED, Color.BLUE], {"a", "b"}, (b"x", {Color.RED})),
        Outer(Inner(2), anything={"inner": Inner(3), "types": {"/inner": "x:Inner@1"}}),
        Point(0.5, b"\x00", [Inner(1)]),
        Event(),
        Event("x", Inner(5)),
        [Inner(1), {"a": (Inner(2),)}, {Inner(3), Inner(4)}],
    ],
)
def test_instances_come_back_as_themselves(value: Any) -> None:
    assert same(again(value), value)
    assert same(again({"deep": [value]}), {"deep": [value]})


@given(RICH)
def test_a_field_that_may_hold_anything_does(value: Any) -> None:
    outer = Outer(Inner(1), anything=value)
    assert same(again(outer).anything, value)
    assert same(again(Point(rest=[value])).rest, [value])


def test_a_class_is_no_instance() -> None:
    with pytest.raises(NotStorableError, match=r"the type at \$\[0\]"):
        encode_value([Inner], ALL)


def test_a_class_without_equality_is_compared_by_its_fields() -> None:
    assert again(Plain(7)).x == 7


def test_a_nested_type_need_not_be_registered_where_an_annotation_names_it() -> None:
    registry = Registry([Outer])
    value = Outer(Inner(1, NOW), [Color.RED])
    assert again(value, registry) == value


@pytest.mark.parametrize(
    "value",
    [
        Outer(Inner(1), anything=Inner(2)),
        Outer(Inner(1), anything=[Color.RED]),
        Outer(Inner("no number")),  # type: ignore[arg-type]
        Outer(Inner(1), colors=(Color.RED,)),  # type: ignore[arg-type]
    ],
)
def test_what_would_not_come_back_equal_is_refused_at_once(value: Outer) -> None:
    with pytest.raises(NotStorableError, match=r"the Outer at \$\[0\] .*come back equal to itself"):
        encode_value([value], Registry([Outer]))


def test_an_error_inside_of_an_instance_names_its_field() -> None:
    with pytest.raises(NotStorableError, match=r"the object at \$\.a\.anything\[0\]"):
        encode_value({"a": Outer(Inner(1), anything=[object()])}, ALL)


def test_an_instance_that_holds_itself_is_refused() -> None:
    outer = Outer(Inner(1))
    outer.anything = [outer]
    with pytest.raises(NotStorableError, match="refers to itself"):
        encode_value(outer, ALL)


def test_instances_nested_without_end_are_refused() -> None:
    outer = Outer(Inner(1))
    for _ in range(300):
        outer = Outer(Inner(1), anything=outer)
    with pytest.raises(TooLargeError):
        encode_value(outer, ALL)


def test_a_model_known_by_its_methods_comes_back() -> None:
    back = again([Model("a")])[0]
    assert type(back) is Model
    assert back.name == "a"


def test_a_model_that_loses_a_field_is_refused() -> None:
    with pytest.raises(NotStorableError, match="come back equal"):
        encode_value(Model("a", secret="s"), ALL)


def test_a_stand_in_may_be_a_repr() -> None:
    data, tags = encode_value([Model("a", secret="s")], ALL, on_unstorable="repr")
    assert tags == {"/0": "repr"}
    assert "Model object at" in decode_value(data, tags, ALL)[0]


@pytest.mark.parametrize(
    "value",
    [Color.RED, Outer(Inner(1, NOW), anything=b"x"), Point(1.0), Event(), Model("m"), Level.LOW],
)
def test_an_instance_can_be_a_record(value: Any) -> None:
    entry = ALL.encode_record(value)
    assert entry.kind == f"x:{type(value).__name__}"
    assert entry.end
    back = ALL.decode_record(entry.kind, entry.payload)
    assert type(back) is type(value)
    assert ALL.encode_record(back) == entry


def test_a_record_has_its_version_and_no_import_path() -> None:
    entry = Registry([register(Inner, tag="place.v", version=3)]).encode_record(Inner(1, NOW))
    assert entry.kind == "x:place.v"
    assert json.loads(entry.payload) == {
        "v": 3,
        "data": {"n": 1, "when": "2026-01-02T03:04:05.000678+00:00"},
        "types": {"/when": "datetime"},
    }


def test_only_a_registered_type_is_a_record() -> None:
    with pytest.raises(NotStorableError, match=r"connect\(types=\[…\]\)"):
        Registry().encode_record(Inner(1))


@pytest.mark.parametrize("value", [{"a": 1}, "x", None], ids=["dict", "str", "None"])
def test_a_plain_value_belongs_into_a_message(value: Any) -> None:
    with pytest.raises(NotStorableError, match=r"Message\.user"):
        Registry().encode_record(value)


def test_an_unknown_record_is_carried_through() -> None:
    payload = b'{"v":7,"data":{"b" : 1.0,"a":[1,1]},"types":{"/a":"tuple"}}'
    opaque = ALL.decode_record("x:Gone", payload)
    assert isinstance(opaque, OpaqueValue)
    assert (opaque.tag, opaque.version) == ("Gone", 7)
    assert ALL.encode_record(opaque) == ("x:Gone", payload, True)


class V3(msgspec.Struct):
    name: str
    price: int
    currency: str
    seen: dt.datetime | None = None


UPCASTS = {
    1: lambda old: {"name": old["title"], "price": old["price"], "seen": old.get("seen")},
    2: lambda old: {**old, "currency": "EUR"},
}
ORDERS = Registry([register(V3, tag="Order", version=3, upcasts=UPCASTS)])


def test_an_older_version_is_upcast_step_by_step() -> None:
    old = b'{"v":1,"data":{"title":"t","price":5,"seen":"2026-01-02T03:04:05.000678+00:00"},'
    old += b'"types":{"/seen":"datetime"}}'
    assert ORDERS.decode_record("x:Order", old) == V3("t", 5, "EUR", NOW)
    inside = decode_value(b'[{"name":"n","price":1}]', {"/0": "x:Order@2"}, ORDERS)
    assert inside == [V3("n", 1, "EUR")]


def test_a_newer_version_is_kept_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry([register(V3, tag="Order", version=3, upcasts=UPCASTS)])
    payload = b'{"v":4,"data":{"x":1}}'
    with caplog.at_level(logging.WARNING, logger="perdure.records"):
        first, second = (registry.decode_record("x:Order", payload) for _ in range(2))
    assert first == second == OpaqueValue("Order", 4, msgspec.Raw(b'{"x":1}'))
    assert registry.encode_record(first).payload == payload
    assert [record.__dict__["stored_version"] for record in caplog.records] == [4]


def test_a_version_without_an_upcast_says_which_to_add() -> None:
    registry = Registry([register(Inner, version=2)])
    with pytest.raises(UnsupportedVersionError, match=r"register\(Inner, upcasts=\{1: …\}\)"):
        registry.decode_record("x:Inner", b'{"v":1,"data":{"n":1}}')


def test_an_upcast_that_fails_is_named() -> None:
    with pytest.raises(CorruptRecordError, match="from version 1 raises KeyError") as caught:
        ORDERS.decode_record("x:Order", b'{"v":1,"data":{}}')
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("x:Inner", b'{"v":1,"data":{"n":"canary"}}'),
        ("x:Inner", b'{"v":1,"data":{}}'),
        ("x:Inner", b'{"v":1,"data":5}'),
        ("x:Color", b'{"v":1,"data":"canary"}'),
        ("x:Model", b'{"v":1,"data":{"Name":5,"x":"canary"}}'),
        ("x:Model", b'{"v":1,"data":{}}'),
        ("x:Inner", b'{"data":{"n":1}}'),
        ("x:Inner", b'{"v":0,"data":{"n":1},"types":5}'),
        ("x:Inner", b"[]"),
        ("x:Inner", b"[" * 100_000),
    ],
)
def test_data_that_does_not_fit_is_a_corrupt_record_without_its_content(
    kind: str, payload: bytes
) -> None:
    with pytest.raises(CorruptRecordError) as caught:
        ALL.decode_record(kind, payload)
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    "types",
    [
        [Inner, Inner],
        [Inner, register(Inner, tag="Other")],
        [Inner, register(Outer, tag="Inner")],
        [int],
        [object],
    ],
)
def test_types_that_cannot_be_told_apart_or_taken_apart_are_refused(types: list[Any]) -> None:
    with pytest.raises(ConfigError, match="types: "):
        Registry(types)


@pytest.mark.parametrize("tag", ["", "1a", "a b", "a@1", "a/b", "é", "a\n", "x" * 49])
def test_a_tag_that_does_not_fit_is_refused(tag: str) -> None:
    with pytest.raises(ConfigError, match="tag="):
        register(Inner, tag=tag)


@pytest.mark.parametrize(
    ("version", "upcasts"),
    [(0, {}), (-1, {}), (3, {1: dict}), (3, {2: dict, 3: dict}), (2, {0: dict, 3: dict})],
)
def test_upcasts_that_do_not_lead_to_the_version_are_refused(
    version: int, upcasts: dict[int, Any]
) -> None:
    with pytest.raises(ConfigError):
        register(Inner, version=version, upcasts=upcasts)


def test_register_gives_a_value() -> None:
    assert register(Inner) == Registered(Inner, "Inner", 1, {})
    assert Registry([register(Inner), Color]).tags == ("Inner", "Color")


@dataclasses.dataclass
class Cat:
    name: str


@dataclasses.dataclass
class Dog:
    name: str


@dataclasses.dataclass
class Owner:
    pet: Cat | Dog


def test_a_union_that_annotations_cannot_tell_apart_works_by_tags() -> None:
    registry = Registry([Owner, Cat, Dog])
    assert again(Owner(Dog("x")), registry) == Owner(Dog("x"))
    with pytest.raises(NotStorableError, match="register the types of its fields too"):
        encode_value(Owner(Dog("x")), Registry([Owner]))


def test_many_instances_take_linear_time() -> None:
    """Quadratic work on these would not end within the test's time limit."""
    value = [Inner(n, NOW) for n in range(10_000)]
    data, tags = encode_value(value, ALL)
    assert decode_value(data, tags, ALL) == value
    assert encode_value(decode_value(data, tags), ALL) == (data, tags)


def test_planted_pickles_and_import_paths_are_data() -> None:
    pickled = b"\x80\x04\x8c\x05posix\x8c\x06system\x93."
    with pytest.raises(CorruptRecordError):
        ALL.decode_record("x:Inner", pickled)
    value = decode_value(b'{"lc":1,"id":["os","system"]}', {"": "os.system"}, ALL)
    assert isinstance(value, OpaqueValue)


def test_a_pydantic_model_comes_back() -> None:
    import pydantic

    class Address(pydantic.BaseModel):
        street: str
        since: dt.datetime

    class Person(pydantic.BaseModel):
        model_config = {"extra": "forbid"}
        full_name: str = pydantic.Field(alias="fullName")
        addresses: list[Address] = []
        _cache: dict[str, int] = pydantic.PrivateAttr(default_factory=lambda: {"x": 1})

        @pydantic.computed_field
        def initials(self) -> str:
            return self.full_name[:1]

    class Login(pydantic.BaseModel):
        password: pydantic.SecretStr

    registry = Registry([Person, Login])
    person = Person(fullName="Ada", addresses=[Address(street="s", since=NOW)])
    person._cache["y"] = 2
    back = again({"p": [person]}, registry)["p"][0]
    assert type(back) is Person
    assert back.model_dump() == person.model_dump()
    with pytest.raises(NotStorableError, match="come back equal"):
        encode_value(Login(password="canary"), registry)
    with pytest.raises(CorruptRecordError) as caught:
        registry.decode_record("x:Person", b'{"v":1,"data":{"fullName":5,"canary":"canary"}}')
    assert "canary" not in str(caught.value)


def test_an_annotation_that_has_no_meaning_at_run_time_is_refused_at_once() -> None:
    @dataclasses.dataclass
    class Lost:
        x: Nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="names 'Nowhere'"):
        Registry([Lost])


def test_data_of_a_model_that_does_not_match_names_the_field_and_no_value() -> None:
    import pydantic

    class Prefs(pydantic.BaseModel):
        model_config = {"extra": "forbid"}
        language: str
        scores: dict[str, int] = {}

    registry = Registry([Prefs])
    for data, field in [
        ({"lang": "canary"}, "language"),
        ({"language": "x", "scores": {"canary": "canary"}}, "scores"),
        ({"language": "x", "canary": 1}, None),
    ]:
        payload = json.dumps({"v": 1, "data": data}).encode()
        with pytest.raises(CorruptRecordError, match=r"does not match Prefs") as caught:
            registry.decode_record("x:Prefs", payload)
        assert caught.value.facts["field"] == field
        assert "canary" not in str(caught.value)


def test_a_field_is_named_where_a_union_is_read_by_keywords() -> None:
    registry = Registry([Owner, Cat, Dog])
    with pytest.raises(CorruptRecordError) as caught:
        registry.decode_record("x:Owner", b'{"v":1,"data":{"cat":1}}')
    assert caught.value.facts["field"] == "pet"
    assert "register(Owner, version=2, upcasts={1: …})" in str(caught.value)


def test_a_result_of_upcasts_that_does_not_match_says_so() -> None:
    broken = register(Inner, version=2, upcasts={1: lambda fields: {"m": 1}})
    with pytest.raises(CorruptRecordError, match="return the fields of version 2") as caught:
        Registry([broken]).decode_record("x:Inner", b'{"v":1,"data":{"n":1}}')
    assert caught.value.facts["field"] == "n"


@pytest.mark.parametrize("aliases", ["Old", [""], [5], ["a b"]])
def test_an_alias_is_a_tag_or_a_dotted_name(aliases: Any) -> None:
    with pytest.raises(ConfigError, match="aliases="):
        register(Inner, aliases=aliases)


def test_an_alias_is_not_the_name_of_two_types() -> None:
    with pytest.raises(ConfigError, match="'Color'"):
        Registry([Color, register(Inner, aliases=["Color"])])
