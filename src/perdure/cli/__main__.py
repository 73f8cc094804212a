"""``python -m perdure.cli``: the command, when its script is not on the path."""

from __future__ import annotations

import sys

from perdure.cli import main

if __name__ == "__main__":
    sys.exit(main())
