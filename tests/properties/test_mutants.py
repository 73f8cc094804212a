"""The properties notice what they are there for: known bugs of autosave engines, put in here."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests import _virtual
from tests.properties.autosave_story import PICKED, Story, check, rough_stories, smooth_stories, tell
from tests.properties.mutants import MUTANTS, Mutant, load

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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_known_bug_is_noticed(mutant: Mutant) -> None:
    assert notices(mutant, smooth_stories) or notices(mutant, rough_stories)
