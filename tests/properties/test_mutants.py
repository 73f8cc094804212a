"""The properties notice what they are there for: known bugs of autosave engines, put in here."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

from tests import _virtual
from tests.properties.autosave_story import (
    PICKED,
    Story,
    check,
    rough_stories,
    smooth_stories,
    tell,
)
from tests.properties.mutants import MUTANTS, Mutant, load
from tests.properties.test_autosave_core import CoreMachine

pytestmark = pytest.mark.deep

QUICK = settings(
    max_examples=60,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def notices(mutant: Mutant, stories: object) -> bool:
    """Whether some story, told by the mutant, breaks an invariant."""
    saver = load(mutant, "driver").Autosaver

    def attempt(story: Story) -> None:
        check(story, _virtual.run("asyncio", tell, story, saver, seconds=5000.0))

    try:
        for story in PICKED:
            attempt(story)
        QUICK(given(story=stories)(attempt))()
    except Exception:
        return True
    return False


def core_notices(mutant: Mutant) -> bool:
    """Whether some run of the core's state machine finds it."""

    class Machine(CoreMachine):
        core_type = load(mutant, "core").Core

    try:
        run_state_machine_as_test(
            Machine, settings=settings(QUICK, max_examples=400, stateful_step_count=40)
        )
    except Exception:
        return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_known_bug_is_noticed(mutant: Mutant) -> None:
    if mutant.by_the_core:
        assert core_notices(mutant)
    else:
        assert notices(mutant, smooth_stories) or notices(mutant, rough_stories)
