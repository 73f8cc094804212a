"""A type that several threads decode first, at once, is learned by one of them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import threading
import msgspec
from perdure.records.json import decode

sys.setswitchinterval(1e-6)
DATA = b'{"number":1,"text":"a","many":[{"names":{"x":1}}],"one":{"names":{}},"words":["a"]}'
for _ in range(600):
    Inner = msgspec.defstruct("Inner", [("names", dict[str, int])])
    Outer = msgspec.defstruct(
        "Outer",
        [("number", int), ("text", str), ("many", list[Inner]), ("one", Inner), ("words", list)],
    )
    together = threading.Barrier(8)

    def work():
        together.wait()
        assert decode(DATA, Outer).number == 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_decode_a_type_first_at_once_survive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
