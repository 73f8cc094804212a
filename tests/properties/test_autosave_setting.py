"""A setting that was given is the one in force, whatever changes when, on both event loops."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import example, given, settings, strategies as st

from perdure.autosave.events import Stalled
from perdure.autosave.options import Autosave, EngineOptions
from tests import _virtual
from tests.autosave.counted import Change, Save, broken
from tests.autosave.inline_store import InlineStore
from tests.autosave.rigs import rig

delays = st.sampled_from([0.0, 0.07, 0.5, 2.0, 10.0, 30.0, 60.0])
autosaves = st.one_of(
    st.tuples(delays, delays).map(lambda two: Autosave(debounce=min(two), max_delay=max(two))),
    delays.map(lambda longest: Autosave(max_delay=longest)),
    st.none(),
)
gaps = st.one_of(st.sampled_from([0.0, 0.3, 3.0, 11.0]), st.floats(0.0, 40.0))
Script = list[tuple[float, bool]]
"""The pause before each change, and whether it ends a turn."""
scripts = st.lists(st.tuples(gaps, st.booleans()), min_size=1, max_size=30)
STEADY: Script = [(3.0, False)] * 40


async def broken_promises(autosave: Autosave | None, script: Script, takes: float) -> list[str]:
    """Change a session so, on a store with room, and return what its setting did not promise."""
    changes: list[Change] = []
    store = InlineStore(latency=(takes,))
    async with rig(store, autosave=autosave, engine=EngineOptions()) as r:
        t, other = r.track("a"), r.track("b", autosave=Autosave.write_through())
        for gap, ends_turn in script:
            await anyio.sleep(gap)
            r.append(t)
            r.append(other)
            changes.append(Change(anyio.current_time(), ends_turn))
            if ends_turn:
                r.saver.turn_ended(t)
        await anyio.sleep(70)
        until = anyio.current_time()
        saves = [Save(one.began, takes, one.last) for one in store.writes.get(t.key, [])]
        told = list(broken(changes, saves, autosave, until=until, late=takes + 1e-6))
        if autosave is not None:
            told += [] if t.clean else ["something was never saved"]
            in_force = r.saver.status(t).in_force
            given = autosave.debounce is not None
            told += [f"{in_force} is in force"] if given and in_force != autosave else []
        told += [event.reason for event in r.of(Stalled)]
    return told


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
@settings(max_examples=150)
@given(autosave=autosaves, script=scripts, takes=st.sampled_from([0.0, 0.01, 0.4]))
@example(autosave=Autosave(debounce=10, max_delay=120), script=STEADY, takes=0.0)
@example(autosave=Autosave(debounce=60, max_delay=60), script=STEADY, takes=0.0)
@example(autosave=Autosave(max_delay=60), script=STEADY, takes=0.0)
def test_what_was_given_holds(
    backend: str, autosave: Autosave | None, script: Script, takes: float
) -> None:
    assert _virtual.run(backend, broken_promises, autosave, script, takes) == []
