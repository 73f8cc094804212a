"""Where the table of the bucket would lie."""

from pathlib import Path

path = Path("bucket.db")
