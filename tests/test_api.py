"""The public API is what was reviewed, and every tool can see it."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import pytest

import perdure
import perdure.types
from tests import hints, public_api
from tests.source_tree import importable, missing_names, modules

MODULES = [module.__name__ for module in public_api.public_modules()]


def test_the_public_api_is_the_reviewed_one() -> None:
    found = public_api.difference()
    assert not found, f"{found}\nIf the API should change: nox -s api"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_exists_once(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert [export for export in names_of(module) if not hasattr(module, export)] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_says_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    exports = {export: getattr(module, export) for export in names_of(module)}
    silent = [
        export
        for export, value in exports.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value)
    ]
    assert silent == []


def test_no_module_hides_a_public_function_of_its_name() -> None:
    """The first import of a submodule sets its name in the package."""
    for name in MODULES:
        for path in [one for one in importable(modules()) if one.rpartition(".")[0] == name]:
            if not path.endswith(("__main__", "_asyncio_fixtures")):
                importlib.import_module(path)
    hidden = {
        f"{name}.{export}"
        for name in MODULES
        for export in names_of(importlib.import_module(name))
        if inspect.ismodule(getattr(importlib.import_module(name), export))
    }
    assert hidden == {"perdure.testing.conformance"}  # which is meant as one


def test_dir_shows_the_lazy_names() -> None:
    assert set(getattr(perdure, "__all__", ())) <= set(dir(perdure))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        perdure.no_such_name  # noqa: B018  # the access is what is tested


def test_a_default_that_is_text_stays_whole() -> None:
    assert public_api.default("file.json") == "'file.json'"
    assert public_api.default(object()) == "..."


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("perdure.records.keys.SessionKey | None", "SessionKey | None"),
        ("dict[str, typing.Any]", "dict[str, Any]"),
        ("2.5", "2.5"),
    ],
)
def test_the_snapshot_drops_modules_before_names(written: str, shown: str) -> None:
    assert public_api.plain(written) == shown


MADE_BY_PERDURE = {
    f"{module}.{name}"
    for module, names in {
        "perdure": (
            "Session SessionManager SessionView Turn",
            "checkpoints.CheckpointEngine checkpoints.CheckpointReader",
            "checkpoints.KernelEventReader checkpoints.KernelEventStream agent.AgentContext",
            "types.Attachment types.LostSession types.Scope types.SessionOpening",
            "types.States types.WorkingMemory",
        ),
        "perdure.sync": (
            "Attachment CheckpointEngine CheckpointReader KernelEventReader KernelEventStream",
            "LostSession Scope SessionManager Session SessionView States Turn TypedState",
            "PartialReply WorkingMemory",
        ),
    }.items()
    for line in names
    for name in line.split()
}
"""What calls of the API return: nobody makes them, so their constructors say nothing to users."""

NOT_FOR_USERS = {
    "perdure.PersistentConfig.of": "an agent makes its config by it",
}


def test_every_type_in_a_public_signature_is_public_itself() -> None:
    exported = {name for module in MODULES for name in exports(module)}
    public = {
        value
        for module, name in exported
        if isinstance(value := getattr(importlib.import_module(module), name), type)
    }
    hidden: dict[str, set[str]] = {}
    passed_over = set()
    for module, name in sorted(exported):
        value = getattr(importlib.import_module(module), name)
        for member, hint in hints.of_public(value, public_api.public_members):
            path = f"{module}.{name}.{member}"
            if member == "__init__" and f"{module}.{name}" in MADE_BY_PERDURE:
                continue
            if path in NOT_FOR_USERS:
                passed_over.add(path)
                continue
            for found in hints.classes(hint):
                if found not in public and not found.__name__.startswith("_"):
                    hidden.setdefault(f"{found.__module__}.{found.__qualname__}", set()).add(path)
    assert hidden == {}
    assert passed_over == set(NOT_FOR_USERS), "these are gone: take them out of the list"


def exports(module: str) -> set[tuple[str, str]]:
    return {(module, name) for name in names_of(importlib.import_module(module))}


def names_of(module: ModuleType) -> list[str]:
    """Return a module's public names, without those whose SDK is not installed."""
    return [name for name in module.__all__ if name not in missing_names()]


def test_what_people_annotate_with_is_where_they_look() -> None:
    from perdure.restore import RestoreStep
    from perdure.types import Health, HistoryItem, WorkingMemory

    reads = hints.of_member(perdure.Session, "history")["return"]
    assert list(hints.classes(reads)) == [HistoryItem]
    assert hints.of_member(perdure.Session, "memory")["return"] is WorkingMemory
    assert hints.of_member(perdure.SessionManager, "health")["return"] is Health
    assert list(hints.classes(hints.of_fields(perdure.types.RestoreReport)["steps"])) == [
        RestoreStep
    ]
