"""The invariants of autosave, on both event loops, in stories that Hypothesis makes up."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings

from tests import _virtual
from tests.properties.autosave_story import (
    PICKED,
    Story,
    check,
    rough_stories,
    smooth_stories,
    tell,
)


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
@settings(max_examples=150)
@given(story=smooth_stories)
@example(story=PICKED[0])
@example(story=PICKED[1])
@example(story=PICKED[2])
def test_a_store_that_is_up_keeps_the_loss_window(backend: str, story: Story) -> None:
    told = _virtual.run(backend, tell, story)
    check(story, told)
    assert told.report is not None
    assert told.report.clean


@pytest.mark.parametrize("backend", _virtual.BACKENDS)
@settings(max_examples=200)
@given(story=rough_stories)
@example(story=PICKED[3])
@example(story=PICKED[4])
def test_whatever_the_store_does_nothing_is_lost(backend: str, story: Story) -> None:
    told = _virtual.run(backend, tell, story)
    check(story, told)
    assert all(t.durable == t.version for t in told.sessions)
