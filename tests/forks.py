"""Whether forks are copies: ``PERDURE_TEST_FORKS=copies`` says so to tests and to the explorer."""

from __future__ import annotations

import os

VARIABLE = "PERDURE_TEST_FORKS"


def switch() -> None:
    """Have forks of this process be copies, if the environment says so."""
    if os.environ.get(VARIABLE) == "copies":
        from perdure.session import fork

        fork.COPIES = True
