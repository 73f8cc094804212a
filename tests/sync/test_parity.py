"""The blocking API has every name of the async one, with the same arguments."""

from __future__ import annotations

import inspect
import re

import pytest

import perdure
import perdure.sync
import perdure.types
from perdure._lib.misnamed import Misnamed
from perdure.archive import archives
from perdure.checkpoints import engine, engine as reader, events
from perdure.memory import state, working_memory
from perdure.session import contributors
from perdure.sync import mirror

INTERNAL = {
    working_memory.WorkingMemory: {"folded", "item", "load", "note", "put"},
    perdure.types.Attachment: {"kept"},
}
"""Names without an underscore that are not for users."""

RENAMED = {"aclose": "close"}

PAIRS = [
    (perdure.SessionManager, perdure.sync.SessionManager),
    (perdure.Session, perdure.sync.Session),
    (perdure.SessionView, perdure.sync.SessionView),
    (perdure.Turn, perdure.sync.Turn),
    (perdure.types.PartialReply, perdure.sync.PartialReply),
    (working_memory.WorkingMemory, perdure.sync.WorkingMemory),
    (state.States, perdure.sync.States),
    (perdure.types.Scope, perdure.sync.Scope),
    (state.TypedState, perdure.sync.TypedState),
    (perdure.types.Attachment, perdure.sync.Attachment),
    (contributors.Contributor, perdure.sync.Contributor),
    (archives.Archives, perdure.sync.Archives),
    (reader.CheckpointReader, perdure.sync.CheckpointReader),
    (engine.CheckpointEngine, perdure.sync.CheckpointEngine),
    (events.KernelEventReader, perdure.sync.KernelEventReader),
    (events.KernelEventStream, perdure.sync.KernelEventStream),
]
pairs = pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=lambda cls: cls.__name__)


def public(cls: type) -> set[str]:
    names = {
        name
        for name in dir(cls)
        if not name.startswith("_") and not isinstance(inspect.getattr_static(cls, name), Misnamed)
    }
    return {RENAMED.get(name, name) for name in names - INTERNAL.get(cls, set())}


def shape(function: object) -> list[tuple[str, object, object]]:
    """Return what a caller sees of a function's parameters, their types aside."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(one.name, one.kind, one.default) for one in parameters]


@pairs
def test_both_have_the_same_names(theirs: type, ours: type) -> None:
    assert public(theirs) == public(ours)


@pairs
def test_methods_take_the_same_arguments(theirs: type, ours: type) -> None:
    for name in public(theirs):
        there = inspect.getattr_static(theirs, "aclose" if name == "close" else name)
        here = inspect.getattr_static(ours, name)
        if inspect.isfunction(there):
            assert shape(here) == shape(there), name
        else:
            assert isinstance(here, property), name


def types(function: object) -> dict[str, str]:
    """Return a function's annotations as they are written, without the modules of the names."""
    written = inspect.get_annotations(function)  # type: ignore[arg-type]
    return {
        name: re.sub(r"\b[a-z_]+\.", "", text) for name, text in written.items() if name != "self"
    }


@pairs
def test_what_is_passed_on_has_the_same_types(theirs: type, ours: type) -> None:
    for name in public(ours):
        here = inspect.getattr_static(ours, name)
        there = inspect.getattr_static(theirs, name, None)
        if isinstance(here, property):
            here, there = here.fget, getattr(there, "fget", None)
        is_passed_on = here.__code__.co_filename == mirror.__file__
        if is_passed_on and inspect.isfunction(there):  # else an attribute without a getter
            assert types(here) == types(there), name


@pairs
def test_nothing_is_left_to_await(theirs: type, ours: type) -> None:
    assert [
        name
        for name in public(ours)
        if inspect.iscoroutinefunction(inspect.getattr_static(ours, name))
    ] == []


def test_connect_takes_the_same_arguments() -> None:
    assert shape(perdure.sync.connect) == shape(perdure.connect)


def test_a_forgotten_method_would_be_noticed() -> None:
    class Longer(perdure.SessionManager):  # type: ignore[misc]  # final for users
        async def archive(self) -> None: ...

    assert "archive" in public(Longer) - public(perdure.sync.SessionManager)
