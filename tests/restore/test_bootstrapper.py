"""The restore's strategy: cache, catch-up, rebuild, and what is mended (S0-4, S0-13 to S0-16,
S0-26, S0-Q1, S1-2, S1-G1, C8, C14; defects a, c, h of the seeds' projects)."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from perdure import ConfigError, Message, Shutdown, ToolCall, connect
from perdure.agent import MemoryManager, Retriever
from perdure.memory.compaction import EpisodicItem, SemanticItem, item_entry
from perdure.memory.context import SNAPSHOT, WorkingContextSnapshot
from perdure.providers.tool_pairs import INTERRUPTED
from perdure.records.keys import SessionKey
from perdure.restore import (
    CompactionSnapshotBuilder,
    WorkingContextSnapshotBootstrapOptions,
    WorkingContextSnapshotBootstrapper,
    WorkingContextSnapshotSerializer,
)
from perdure.restore.bootstrapper import Bootstrapped
from perdure.restore.rebuild import is_memory
from perdure.restore.report import RestoreStep
from perdure.session.internals import accept, contents_of, fold_soon, working_context
from perdure.session.session import Session
from perdure.stores.memory import MemoryBacking, MemoryStore

Options = WorkingContextSnapshotBootstrapOptions
KEY = SessionKey("ada")
ASKS = Message.assistant("Let me see", tool_calls=[ToolCall("c1", "look"), ToolCall("c2", "look")])


class Traced:
    """The real parts of a restore, each of which writes down that it was asked."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def manager(self, session: Session) -> MemoryManager:
        memory = MemoryManager(
            session, retriever=Retriever(lambda name: contents_of(session).lines(name))
        )
        self._note(memory.retriever, "retrieve")
        self._note(memory.working_context_snapshot_store, "exists", "read")
        self._note(memory, "get_raw_tail", "reset_working_context_snapshot", "append_repairs")
        return memory

    def bootstrapper(self) -> WorkingContextSnapshotBootstrapper:
        serializer, builder = WorkingContextSnapshotSerializer(), CompactionSnapshotBuilder()
        self._note(serializer, "validate")
        self._note(builder, "build")
        return WorkingContextSnapshotBootstrapper(serializer, builder)

    def _note(self, part: Any, *names: str) -> None:
        for name in names:
            setattr(part, name, self._noted(name, getattr(part, name)))

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.steps.append(name)
            return call(*args, **options)

        return noted


@asynccontextmanager
async def opened(backing: MemoryBacking) -> AsyncGenerator[Session, None]:
    store = MemoryStore(backing=backing)
    async with connect(store, shutdown=Shutdown(signals=False), autosave=None) as sessions:
        async with sessions.open("ada") as session:
            yield session


def killed(backing: MemoryBacking) -> MemoryBacking:
    image = copy.deepcopy(backing)
    for owner in image.owners.values():
        owner.alive = False
    return image


async def talked(*messages: Message, prompt: str = "Be kind.") -> MemoryBacking:
    """Return a place where an agent has talked, and closed, so that everything is folded."""
    backing = MemoryBacking()
    async with opened(backing) as session:
        await WorkingContextSnapshotBootstrapper().bootstrap(
            MemoryManager(session), prompt, Options()
        )
        async with session.turn():
            session.append(*(messages or (Message.user("hello"), Message.assistant("hi"))))
    return backing


async def restored(
    backing: MemoryBacking, prompt: str = "Be kind.", **options: Any
) -> tuple[Bootstrapped, list[Message], Traced]:
    traced = Traced()
    async with opened(backing) as session:
        done = await traced.bootstrapper().bootstrap(
            traced.manager(session), prompt, Options(**options)
        )
        assert session.durable_version == session.version
        return done, session.context(), traced


def texts(messages: Sequence[Message]) -> list[str]:
    return [message.text for message in messages]


def without_cache(backing: MemoryBacking) -> MemoryBacking:
    """Return what is left when the snapshot's file is gone."""
    image = killed(backing)
    del image.sessions[KEY].documents[SNAPSHOT]
    return image


# the cache


async def test_a_valid_cache_is_read_and_nothing_is_retrieved() -> None:
    """S0-13, S0-14, S1-2."""
    done, messages, traced = await restored(await talked())
    assert traced.steps == ["exists", "read", "validate"]
    assert done.source == "snapshot"
    assert done.steps == (RestoreStep("read", "the snapshot, caught up with the log"),)
    assert texts(messages) == ["Be kind.", "hello", "hi"]


class OwnManager:
    """A manager of another program: it has no session, and is filled by the bootstrap."""

    agent_id = "ada"
    restored_from: Any = "snapshot"
    system_prompt_sha256 = None
    snapshot_was_written = True
    retriever: Any = None

    def __init__(self, *messages: Message) -> None:
        snapshot = WorkingContextSnapshot(messages=messages, epoch_id=4)
        self.payload = WorkingContextSnapshotSerializer().serialize(snapshot, {"agent_id": "ada"})
        self.messages: list[Message] = []
        self.working_context_snapshot_store: Any = self

    async def exists(self, agent_id: str) -> bool:
        return True

    async def read(self, agent_id: str) -> dict[str, Any]:
        return self.payload

    def get_working_context_messages(self) -> list[Message]:
        return list(self.messages)

    async def get_raw_tail(
        self, tail_turns: int | None, exclude_turn_id: str | None = None
    ) -> Sequence[Message]:
        raise AssertionError

    async def reset_working_context_snapshot(
        self, messages: Sequence[Message], *, system_prompt: str | None, reason: str
    ) -> None:
        self.messages = list(messages)

    async def append_repairs(self, messages: Sequence[Message]) -> None:
        self.messages += messages


SAYS = Message.user("my dog is Rex")


@pytest.mark.parametrize(
    ("prompt", "policy", "first"),
    [
        ("SYS", "error", "SYS"),
        ("", "error", "SYS"),
        ("NEW", "replace", "NEW"),
        ("NEW", "keep", "SYS"),
    ],
)
async def test_a_manager_without_a_session_is_filled_from_a_valid_cache(
    prompt: str, policy: Any, first: str
) -> None:
    """S0-14: deserialize, then reset; the prompt and open calls are dealt with as ever."""
    manager = OwnManager(Message.system("SYS"), SAYS, ASKS)
    done = await WorkingContextSnapshotBootstrapper().bootstrap(
        manager, prompt, Options(system_prompt_policy=policy)
    )
    assert done.source == "snapshot"
    assert texts(manager.messages)[:2] == [first, "my dog is Rex"]
    assert [message.role for message in manager.messages[2:]] == ["assistant", "tool", "tool"]


async def test_a_manager_that_has_a_context_keeps_it() -> None:
    manager = OwnManager(SAYS)
    manager.messages = [Message.user("later")]
    await WorkingContextSnapshotBootstrapper().bootstrap(manager, "", Options())
    assert texts(manager.messages) == ["later"]


async def test_a_context_that_was_emptied_is_not_filled_again() -> None:
    """S0-14: the cache is of a context that is no longer there."""
    async with opened(await talked()) as session:
        manager = MemoryManager(session)
        await manager.reset_working_context_snapshot(())
        await WorkingContextSnapshotBootstrapper().bootstrap(manager, "", Options())
        assert session.context() == []


async def test_a_cache_that_is_behind_is_caught_up_with_the_log() -> None:
    """S1-G1: never is an older cache silently trusted."""
    backing = await talked()
    async with opened(backing) as session:
        session.append(Message.user("later"))
        await session.save()
        left = killed(backing)
    done, messages, traced = await restored(left)
    assert texts(messages)[-1] == "later"
    assert done.source == "catch_up"
    assert "retrieve" not in traced.steps


async def test_a_snapshot_that_was_made_of_a_context_from_the_log_is_not_rebuilt() -> None:
    traced = Traced()
    async with opened(MemoryBacking()) as session:
        session.append(Message.user("hello"))
        await session.save()
        manager = traced.manager(session)
        fold_soon(session)
        while not await manager.working_context_snapshot_store.exists("ada"):
            await anyio.sleep(0)
        done = await traced.bootstrapper().bootstrap(manager, "", Options())
        assert "retrieve" not in traced.steps
        assert done.steps == (RestoreStep("read", "the context, as the session has it"),)


async def test_a_restore_of_what_is_sound_appends_nothing() -> None:
    """Defect c: no reset, no epoch, no time stamp."""
    backing = await talked()
    for _ in range(3):
        async with opened(backing) as session:
            before = (session.version, working_context(session).epoch_id)
            await WorkingContextSnapshotBootstrapper().bootstrap(
                MemoryManager(session), "Be kind.", Options()
            )
            assert (session.version, working_context(session).epoch_id) == before
            assert working_context(session).last_compaction_ts is None


# no cache


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema_version": 1}', b"\xff\xfe"])
async def test_a_damaged_cache_is_rebuilt_and_never_fails_a_restore(damage: bytes) -> None:
    """S0-4, S0-26, defect a."""
    backing = await talked()
    expected = (await restored(killed(backing)))[1]
    backing.sessions[KEY].documents[SNAPSHOT] = damage
    done, messages, _ = await restored(killed(backing))
    assert done.source == "rebuild"
    assert messages == expected


async def test_without_a_cache_memory_and_raw_tail_are_asked_in_their_order() -> None:
    """S0-15, S1-2."""
    done, messages, traced = await restored(without_cache(await talked()))
    assert traced.steps == ["exists", "retrieve", "get_raw_tail", "build"]
    assert done.source == "rebuild"
    assert texts(messages) == ["Be kind.", "hello", "hi"]


async def test_deleting_the_cache_loses_nothing() -> None:
    """S0-1, S0-2: the same messages, each time."""
    backing = await talked(*(Message.user(str(number)) for number in range(40)))
    expected = (await restored(killed(backing)))[1]
    for _ in range(2):
        assert (await restored(without_cache(backing)))[1] == expected


async def remembered(backing: MemoryBacking) -> None:
    async with opened(backing) as session:
        episode = EpisodicItem(id="ep_1", ts=1.0, turn_ids=("turn_0001",), summary="They met.")
        fact = SemanticItem(id="sem_1", ts=1.0, fact="Likes herring.")
        accept(session, (item_entry(episode), item_entry(fact)))
        await session.save()


async def test_a_rebuild_takes_in_what_is_remembered() -> None:
    backing = await talked()
    await remembered(backing)
    _, messages, _ = await restored(without_cache(backing))
    assert messages[0].text == "Be kind."
    assert is_memory(messages[1])
    assert "They met." in messages[1].text
    assert "Likes herring." in messages[1].text
    assert texts(messages)[2:] == ["hello", "hi"]


async def test_a_rebuild_can_be_asked_for_and_limited() -> None:
    """S0-16."""
    backing = await talked()
    await remembered(backing)
    done, messages, _ = await restored(
        backing, rebuild=True, max_episodic=0, max_semantic=0, raw_tail_turns=0
    )
    assert done.source == "rebuild"
    assert texts(messages) == ["Be kind."]


async def test_an_explicit_number_of_raw_turns_is_kept() -> None:
    backing = await talked()
    async with opened(backing) as session:
        for number in range(3):
            async with session.turn():
                session.append(Message.user(str(number)))
    _, messages, _ = await restored(without_cache(backing), raw_tail_turns=2)
    assert texts(messages) == ["Be kind.", "1", "2"]


async def test_a_session_without_anything_begins_with_its_prompt() -> None:
    done, messages, _ = await restored(MemoryBacking())
    assert done.source == "fresh"
    assert messages == [Message.system("Be kind.")]


async def test_a_session_without_anything_and_without_a_prompt_stays_empty() -> None:
    done, messages, traced = await restored(MemoryBacking(), prompt="")
    assert (done.source, messages) == ("fresh", [])
    assert "reset_working_context_snapshot" not in traced.steps


async def test_a_damaged_memory_is_made_anew_from_the_log() -> None:
    backing = await talked()
    await remembered(backing)
    backing.sessions[KEY].documents["episodic.jsonl"] = b"{nonsense"
    _, messages, _ = await restored(without_cache(backing))
    assert "They met." in messages[1].text


# the system prompt


async def test_a_changed_prompt_is_replaced_and_the_rest_kept() -> None:
    """S0-Q1, S1-G2: what the seeds' project got wrong, and silently."""
    done, messages, _ = await restored(await talked(), prompt="Be brief.")
    assert texts(messages) == ["Be brief.", "hello", "hi"]
    assert "system prompt" in [step.what for step in done.steps]


async def test_a_prompt_that_was_replaced_is_the_known_one_from_then_on() -> None:
    backing = await talked()
    await restored(backing, prompt="Be brief.")
    _, _, traced = await restored(backing, prompt="Be brief.", system_prompt_policy="error")
    assert "reset_working_context_snapshot" not in traced.steps


async def test_a_changed_prompt_can_be_kept_out() -> None:
    _, messages, _ = await restored(await talked(), prompt="Be brief.", system_prompt_policy="keep")
    assert texts(messages) == ["Be kind.", "hello", "hi"]


async def test_a_changed_prompt_can_ask_for_a_rebuild() -> None:
    done, messages, traced = await restored(
        await talked(), prompt="Be brief.", system_prompt_policy="rebuild"
    )
    assert done.source == "rebuild"
    assert "retrieve" in traced.steps
    assert texts(messages) == ["Be brief.", "hello", "hi"]


async def test_a_changed_prompt_can_be_refused() -> None:
    backing = await talked()
    with pytest.raises(ConfigError, match="'ada'"):
        await restored(backing, prompt="Be brief.", system_prompt_policy="error")
    await restored(backing, prompt="Be kind.", system_prompt_policy="error")


async def test_a_session_that_had_no_prompt_gets_one() -> None:
    backing = MemoryBacking()
    async with opened(backing) as session:
        session.append(Message.user("hello"))
    _, messages, _ = await restored(backing)
    assert texts(messages) == ["Be kind.", "hello"]
    done, messages, traced = await restored(backing, prompt="", system_prompt_policy="error")
    assert texts(messages) == ["Be kind.", "hello"]  # none was given: the stored one stays
    assert done.system_prompt == "Be kind."
    assert "reset_working_context_snapshot" not in traced.steps


# what a provider would reject


async def test_calls_without_results_are_closed_once_by_what_is_appended() -> None:
    """C14, defect h."""
    backing = await talked(Message.user("go"), ASKS, Message.tool("c2", 2))
    done, messages, traced = await restored(backing)
    assert traced.steps[-1] == "append_repairs"
    result = messages[-1].tool_result
    assert result is not None
    assert (result.call_id, result.error) == ("c1", INTERRUPTED)
    assert "closed" in [step.what for step in done.steps]
    _, same, traced = await restored(backing)
    assert same == messages
    assert "append_repairs" not in traced.steps


async def test_calls_without_results_can_be_dropped() -> None:
    backing = await talked(Message.user("go"), ASKS, Message.tool("c2", 2))
    _, messages, _ = await restored(backing, dangling_calls="drop")
    assert [call.id for call in messages[2].tool_calls] == ["c2"]
    assert (await restored(backing, dangling_calls="drop"))[1] == messages


async def test_calls_without_results_can_be_kept() -> None:
    backing = await talked(Message.user("go"), ASKS)
    _, messages, traced = await restored(backing, dangling_calls="keep")
    assert len(messages[-1].tool_calls) == 2
    assert traced.steps == ["exists", "read", "validate"]


async def test_a_call_in_the_middle_is_closed_in_its_place() -> None:
    backing = await talked(Message.user("go"), ASKS, Message.user("hello?"))
    _, messages, _ = await restored(backing)
    assert [one.role for one in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert (await restored(backing))[1] == messages


async def test_repairs_are_durable() -> None:
    backing = await talked(Message.user("go"), ASKS)
    async with opened(backing) as session:
        memory = MemoryManager(session)
        await WorkingContextSnapshotBootstrapper().bootstrap(memory, "Be kind.", Options())
        expected, left = session.context(), killed(backing)
    async with opened(left) as session:
        assert session.context() == expected


# options


@pytest.mark.parametrize(
    "bad",
    [
        {"max_episodic": -1},
        {"max_semantic": -1},
        {"raw_tail_turns": -1},
        {"system_prompt_policy": "swap"},
        {"dangling_calls": "ignore"},
    ],
)
def test_an_option_that_does_not_fit_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Options(**bad)


def test_the_defaults_are_the_seeds() -> None:
    """S0-16."""
    assert (Options().max_episodic, Options().max_semantic) == (3, 20)
    assert Options().raw_tail_turns is None
