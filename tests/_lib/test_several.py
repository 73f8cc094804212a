"""Several things at once: what came of each, in order."""

from __future__ import annotations

import anyio
import pytest

from perdure._lib.tasks import all_of


async def test_results_come_in_the_order_of_the_items_and_not_of_their_ends() -> None:
    gates = {n: anyio.Event() for n in range(3)}
    begun: list[int] = []

    async def act(n: int) -> str:
        begun.append(n)
        if n < 2:
            await gates[n + 1].wait()
        gates[n].set()
        return str(n)

    with anyio.fail_after(60):
        assert await all_of(list(gates), act) == ["0", "1", "2"]
    assert sorted(begun) == [0, 1, 2]


async def test_one_item_or_none_needs_no_task() -> None:
    async def act(n: int) -> int:
        if n < 0:
            raise KeyError(n)
        return n + 1

    assert await all_of([], act) == []
    assert await all_of([1], act) == [2]
    with pytest.raises(KeyError):  # and its error is no group of errors
        await all_of([-1], act)
