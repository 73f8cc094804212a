"""The loop's clock is the one that its own timers use."""

from __future__ import annotations

import time

import anyio
import pytest

from perdure._lib.loop import loop_clock
from tests import _virtual


async def test_it_agrees_with_the_loop() -> None:
    before = anyio.current_time()
    assert before <= loop_clock()() <= anyio.current_time()


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
def test_it_follows_a_virtual_clock(backend: str) -> None:
    async def main() -> float:
        clock = loop_clock()
        before = clock()
        await anyio.sleep(1000)
        return clock() - before

    assert _virtual.run(backend, main) == pytest.approx(1000)


def test_the_standard_loop_costs_one_call() -> None:
    async def main() -> object:
        return loop_clock()

    assert anyio.run(main, backend="asyncio") is time.monotonic


def test_without_a_loop_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        loop_clock()
