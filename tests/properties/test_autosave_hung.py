"""Sessions whose saves hang take a slot each, for one timeout, and no healthy one waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from hypothesis import example, given, settings, strategies as st

from perdure.autosave.options import EngineOptions
from perdure.autosave.tracked import Tracked
from perdure.errors import SessionClosedError
from perdure.records.keys import SessionKey
from perdure.store import Batch, Outcome
from tests import _virtual
from tests.autosave.inline_store import DirectStore, InlineStore
from tests.autosave.rigs import Rig, rig, within

TIMEOUT = 5.0
HEALTHY = 40
SOON = 4 * TIMEOUT
"""Each hung session may hold its slot once, and a healthy one's turn comes after that."""


class _Hangs(InlineStore):
    hung: frozenset[SessionKey] = frozenset()

    async def _call(self, batches: Sequence[Batch], *args: Any) -> list[Outcome]:
        if any(batch.key in self.hung for batch in batches):
            await anyio.sleep_forever()
        return await super()._call(batches, *args)


class _HangsInThreads(_Hangs, DirectStore):
    """What it begins cannot be cancelled."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, hangs=1e6)


class _HangsInTasks(_Hangs):
    """What it begins can."""


@dataclass(frozen=True)
class Hung:
    parallelism: int
    hung_first: bool
    """Whether the hung sessions change before the healthy ones."""
    gaps: tuple[float, ...]
    """Between two changes of healthy sessions."""
    latency: tuple[float, ...]
    saves: bool
    """Whether somebody waits for each change."""


hangs = st.builds(
    Hung,
    parallelism=st.sampled_from([1, 2, 4]),
    hung_first=st.booleans(),
    gaps=st.lists(st.sampled_from([0.0, 0.05, 0.4]), min_size=1, max_size=4).map(tuple),
    latency=st.lists(st.sampled_from([0.0, 0.01, 0.2]), min_size=1, max_size=3).map(tuple),
    saves=st.booleans(),
)


async def live(hung: Hung, make: type[_Hangs]) -> tuple[list[float], int]:
    """Return for how long each healthy change was unsaved, and the most calls of a hung session."""
    store = make(parallelism=hung.parallelism, batch_max=1, latency=hung.latency)
    engine = EngineOptions(jitter=0.0, eager=False, save_timeout=TIMEOUT)
    async with rig(store, engine=engine) as r, anyio.create_task_group() as group:
        bad = [r.track(f"hung{n}") for n in range(hung.parallelism)]
        store.hung = frozenset(t.key for t in bad)
        good = [r.track(f"s{n}") for n in range(HEALTHY)]
        changed: dict[SessionKey, float] = {}
        for n, t in enumerate([*bad, *good] if hung.hung_first else [*good, *bad]):
            r.append(t)
            changed[t.key] = anyio.current_time()
            if hung.saves:
                group.start_soon(save, r, t)
            await anyio.sleep(hung.gaps[n % len(hung.gaps)])
        await anyio.sleep(100)
        waits = [store.durable_at(t.key, 1)[0] - changed[t.key] for t in good]
        assert all(t.durable == 1 for t in good)
        assert all(t.durable == 0 for t in bad)
        calls = max(sum(call[0].key == t.key for call in store.calls) for t in bad)
        report = await r.saver.aclose(within(3, 1))
        assert {one.key for one in report.in_doubt} == store.hung
        group.cancel_scope.cancel()
    return waits, calls


async def save(r: Rig, t: Tracked) -> None:
    with contextlib.suppress(SessionClosedError):
        await r.saver.save(t)


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
@pytest.mark.parametrize("make", [_HangsInThreads, _HangsInTasks])
@settings(max_examples=40)
@given(hung=hangs)
@example(hung=Hung(4, True, (0.0,), (0.0,), True))
@example(hung=Hung(1, True, (0.0,), (0.2,), False))
def test_healthy_sessions_are_saved_beside_as_many_hung_ones_as_there_are_slots(
    backend: str, make: type[_Hangs], hung: Hung
) -> None:
    waits, calls = _virtual.run(backend, live, hung, make)
    slow = HEALTHY * max(hung.latency)
    if make is _HangsInThreads:
        assert calls == 1, "sent again while it was in doubt"
        assert max(waits) <= SOON + slow
