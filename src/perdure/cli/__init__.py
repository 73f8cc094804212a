"""The command ``perdure``: look at sessions, check and rebuild them, chat, see a demo.

An extra, ``perdure[cli]``. Every command answers with an exit status: 0 for done, 1 for a failure
(one line on stderr: what, where, the cure), 2 for invalid arguments. With ``--json`` stdout
holds one JSON value and nothing else. Commands use only what the library offers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

NEEDED = frozenset({"cyclopts", "rich"})


def main(tokens: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    try:
        from perdure.cli.app import run
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in NEEDED:
            raise
        print(f"perdure: {name} is not installed: pip install 'perdure[cli]'", file=sys.stderr)
        return 2  # as for invalid arguments
    return run(sys.argv[1:] if tokens is None else list(tokens))
