"""Which event loop runs this: asked often, and at any moment."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType

import pytest

import perdure
from perdure import Message, Shutdown


def test_asyncio_goes_on_while_another_thread_imports_trio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its modules are there already, and nearly empty."""
    monkeypatch.setitem(sys.modules, "trio", ModuleType("trio"))
    monkeypatch.setitem(sys.modules, "trio.lowlevel", ModuleType("trio.lowlevel"))

    async def main() -> int:
        async with perdure.connect(tmp_path / "store", shutdown=Shutdown(signals=False)) as opened:
            session = await opened.open("ada")
            session.append(Message.user("hello"))
            return (await session.save()).version

    assert asyncio.run(main()) > 0
