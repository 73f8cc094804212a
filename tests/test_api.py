"""The public API is what was reviewed, and every tool can see it."""

from __future__ import annotations

import importlib
import inspect

import pytest

import perdure
from tests import public_api

MODULES = [module.__name__ for module in public_api.public_modules()]


def test_the_public_api_is_the_reviewed_one() -> None:
    found = public_api.difference()
    assert not found, f"{found}\nIf the API should change: nox -s api"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_exists_once(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert [export for export in module.__all__ if not hasattr(module, export)] == []


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_says_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    exports = {export: getattr(module, export) for export in module.__all__}
    silent = [
        export
        for export, value in exports.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value)
    ]
    assert silent == []


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
        ("perdure.model.keys.SessionKey | None", "SessionKey | None"),
        ("dict[str, typing.Any]", "dict[str, Any]"),
        ("2.5", "2.5"),
    ],
)
def test_the_snapshot_drops_modules_before_names(written: str, shown: str) -> None:
    assert public_api.plain(written) == shown
