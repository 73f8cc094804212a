"""Ids: new each time, and safe as names."""

from __future__ import annotations

import re

from perdure._lib.ids import random_id


def test_an_id_is_long_lower_case_and_new() -> None:
    ids = {random_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"[a-z2-7]{24}", one) for one in ids)
