"""What a session could not read back is refused at the door, before anything is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import Autosave, ConfigError, Message, NotStorableError
from perdure.archive import Archives
from perdure.memory.working_memory import MemoryItem
from perdure.transfer import migrate


def wrong(value: Any) -> Any:
    return value


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "title": (lambda session: session.describe(title=5), "title must be a string, not int"),
    "owner": (lambda session: session.describe(owner=5), "owner must be a string, not int"),
    "tag": (lambda session: session.describe(tags=["a", 5]), "tag must be a string, not int"),
    "tags": (lambda session: session.describe(tags="draft"), r"tags='draft'.*\['draft'\]"),
    "turn id": (lambda session: session.turn(5), "turn id must be a string, not int"),
    "no turn id": (lambda session: session.turn(""), "turn id is empty"),
    "key": (lambda session: session.memory.set(5, 1), "memory key must be a string, not int"),
    "dropped key": (lambda session: session.memory.drop(5), "memory key must be a string"),
    "description": (
        lambda session: session.memory.set("a", 1, description=5),
        "memory description must be a string",
    ),
    "scope": (lambda session: session.memory.set("a", 1, scope=None), "scope must be a string"),
    "time": (
        lambda session: session.memory.put(MemoryItem(key="a", value=1, created_at=wrong("now"))),
        "created_at='now'",
    ),
    "pinned": (lambda session: session.memory.set("a", 1, pinned="yes"), "pinned='yes'"),
    "long owner": (lambda session: session.describe(owner="o" * 1025), "owner is 1025 bytes long"),
    "request": (lambda session: session.turn("a", request={"text": "b"}), "request of type dict"),
    "urls": (
        lambda session: session.append(Message.user("?", image_urls="https://e.org/a.png")),
        r"image_urls='https://e.org/a.png'.*\['https",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_value_of_a_wrong_type_never_enters_the_log(name: str) -> None:
    act, said = WRONG[name]
    store = perdure.store_for("memory:")
    async with perdure.connect(store) as sessions, sessions.open("ada") as session:
        session.append(Message.user("Hello"))
        before = session.version
        with pytest.raises(ConfigError, match=said):
            act(session)
        assert session.version == before
    async with perdure.connect(store) as sessions, sessions.open("ada") as session:
        assert [message.text for message in session.context()] == ["Hello"]
        assert session.info.turns == 0
        assert await session.memory.keys() == []


@pytest.mark.parametrize("label", [5, "a\ud800"])
async def test_the_label_of_a_checkpoint_is_text(label: Any) -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.raises(ConfigError, match="checkpoint label"):
            await session.checkpoints.create(label)
        assert await session.checkpoints.states() == []


@pytest.mark.parametrize("options", [{"limit": "5"}, {"limit": 2.5}, {"before": 2.5}])
async def test_a_part_of_a_history_is_told_by_whole_numbers(options: dict[str, Any]) -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        session.append(Message.user("Hello"))
        await session.save()
        view, scope = await sessions.load("ada"), sessions.scope("shared")
        assert view is not None
        for page in (session.history, view.history, scope.history):
            with pytest.raises(ConfigError, match="give a whole number"):
                await page(**options)
        with pytest.raises(ConfigError, match="give a whole number"):
            await session.events.read(after=wrong("1"))


async def test_the_label_of_an_archive_is_text(tmp_path: Path) -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        archives = Archives(session, tmp_path)
        with pytest.raises(ConfigError, match="archive label must be a string, not int"):
            await archives.save(label=wrong(5))
        assert list(await archives.all()) == []


@pytest.mark.parametrize("after", [1.0, True, "1"])
async def test_a_retraction_goes_to_a_record_s_number(after: Any) -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        session.append(Message.user("Hello"))
        with pytest.raises(ConfigError, match=f"none at {after}"):
            await session.retract(after=after)


@pytest.mark.parametrize("version", [1.0, "1"])
async def test_what_is_no_version_is_not_waited_for(version: Any) -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        session.append(Message.user("Hello"))
        with pytest.raises(ConfigError, match=f"invalid version={version!r}"):
            await session.wait_durable(version)


@pytest.mark.parametrize("at", [1.5, True, b"x"])
async def test_a_fork_is_at_a_record_a_turn_or_a_checkpoint(at: Any) -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        session.append(Message.user("Hello"))
        with pytest.raises(ConfigError, match="invalid at="):
            await sessions.fork("ada", "bea", at=at)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"owner": 5}, "owner must be a string, not int"),
        ({"owner": "o" * 1025}, "owner is 1025 bytes long, the limit is 1024"),
        ({"tags": ["a", 5]}, "tag must be a string, not int"),
        ({"tags": "draft"}, r"tags='draft'.*\['draft'\]"),
        ({"on_held": "stael"}, "on_held='stael'.*handover, raise, steal"),
        ({"autosave": True}, "autosave=True.*Autosave"),
        ({"wait": None}, "wait=None"),
        ({"wait": -1}, "wait=-1"),
        ({"tenant": None}, "tenant must be a string, not NoneType"),
    ],
    ids=[
        "owner",
        "long owner",
        "tag",
        "tags",
        "on_held",
        "autosave",
        "wait",
        "less than 0",
        "tenant",
    ],
)
async def test_an_open_that_does_not_fit_makes_no_session(
    options: dict[str, Any], said: str
) -> None:
    async with perdure.connect("memory:") as sessions:
        with pytest.raises(ConfigError, match=said):
            sessions.open("ada", **options)
        assert not await sessions.exists("ada")


@pytest.mark.parametrize("name", ["autosave", "lease", "shutdown", "limits", "engine"])
def test_an_option_that_is_no_group_of_options_is_named(name: str) -> None:
    options: dict[str, Any] = {name: "server"}
    with pytest.raises(ConfigError, match=f"invalid {name}='server': give {name.title()}"):
        perdure.connect("memory:", **options)


async def test_who_forgot_to_await_an_open_is_told() -> None:
    async with perdure.connect("memory:") as sessions:
        session = wrong(sessions.open("ada"))
        with pytest.raises(AttributeError, match=r"append: .*async with sessions.open"):
            session.append(Message.user("Hello"))
        assert not hasattr(session, "turn")


async def test_plain_text_is_sent_into_a_message() -> None:
    async with perdure.connect("memory:") as sessions, sessions.open("ada") as session:
        with pytest.raises(NotStorableError, match=r"str cannot .*Message.user"):
            session.append("Hello")


async def test_autosave_goes_on_as_it_was_behind_a_tune_that_does_not_fit() -> None:
    connected = perdure.connect("memory:", autosave=Autosave.write_through())
    async with connected as sessions, sessions.open("ada") as session:
        with pytest.raises(ConfigError, match=r"autosave=5.*Autosave.server\(\)"):
            sessions.tune(wrong(5))
        with pytest.raises(ConfigError, match="hook for drain"):
            sessions.on("drain", wrong(5))
        session.append(Message.user("Hello"))
        await session.wait_durable()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tag": 5}, "tag must be a string, not int"),
        ({"since": "2026-01-01"}, "since='2026-01-01': give seconds since 1970"),
        ({"before": "now"}, "before='now': give seconds since 1970"),
        ({"limit": "5"}, "limit='5': give a whole number"),
        ({"after": "ada"}, "after='ada': give the last session of the page before"),
    ],
)
async def test_a_filter_of_a_wrong_type_is_named(options: dict[str, Any], said: str) -> None:
    async with perdure.connect("memory:") as sessions:
        with pytest.raises(ConfigError, match=said):
            await sessions.list(**options)


async def test_a_text_is_no_list_of_its_letters() -> None:
    """Each of these took them for keys, or for tenants."""
    store = perdure.store_for("memory:")
    async with perdure.connect(store) as sessions:
        scope = sessions.scope("shared")
        await scope.update({"name": 1, "name2": 2})
        with pytest.raises(ConfigError, match=r"delete='name2': give a list, such as \['name2'\]"):
            await scope.update({}, delete="name2")
        assert await scope.values() == {"name": 1, "name2": 2}
        with pytest.raises(ConfigError, match=r"keys='first': give a list"):
            await sessions.drop_dead_letters("ada", "first")
        with pytest.raises(ConfigError, match=r"tenants='acme': give a list"):
            await migrate(store, perdure.store_for("memory:"), tenants="acme")
