"""Packages that extras bring: what is missing, or too old, is named with its cure."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from perdure._lib.lazy import from_extra
from perdure.errors import MissingExtraError


def importing() -> None:
    with from_extra("an_sdk.runs", used_by="PerdureThing", name="SDK", extra="an-sdk"):
        from an_sdk.runs import Run  # type: ignore[import-not-found]  # noqa: F401


def test_a_package_that_is_not_installed_is_named_with_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"needs SDK: pip install 'perdure\[an-sdk\]'"):
        importing()


def test_a_package_that_is_too_old_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "an_sdk", ModuleType("an_sdk"))
    monkeypatch.setitem(sys.modules, "an_sdk.runs", ModuleType("an_sdk.runs"))
    lacks = r"needs a newer SDK \(cannot import name 'Run' .*\): pip install 'perdure\[an-sdk\]'"
    with pytest.raises(MissingExtraError, match=lacks):
        importing()


def test_what_a_package_itself_lacks_is_its_own_error() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match="no_such_module"),
        from_extra("an_sdk", used_by="PerdureThing", name="SDK", extra="an-sdk"),
    ):
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
