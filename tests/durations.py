"""``python -m tests.durations RUN.xml``: the slowest tests of a run, by what they used of a processor.

RUN.xml is what ``pytest --junitxml=RUN.xml`` wrote. Seconds of a processor, of the test and of the
processes that it started and waited for, say more than seconds that passed on a machine that
others use too. A test above one of them belongs in `deep`, unless it is a sample of kills, a golden
store or the cut of power.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

SLOWEST = 40
MOST = 1.0
"""Seconds of a processor that a test may use outside of `deep`."""


def durations(path: str) -> list[tuple[float, float, str]]:
    """Return each test of a run: its seconds of a processor, those that passed, and its name."""
    return [
        (
            sum(float(one.attrib["value"]) for one in case.iterfind(".//property[@name='cpu']")),
            float(case.attrib["time"]),
            f"{case.attrib['classname']}::{case.attrib['name']}",
        )
        for case in ET.parse(path).iter("testcase")
    ]


def main(path: str) -> None:
    tests = sorted(durations(path), reverse=True)
    for cpu, passed, name in tests[:SLOWEST]:
        print(f"{'!' if cpu > MOST else ' '} {cpu:6.2f} {passed:7.2f}  {name}")
    above = sum(cpu > MOST for cpu, _, _ in tests)
    used = sum(cpu for cpu, _, _ in tests)
    print(f"{len(tests)} tests used {used:.0f} s of a processor; {above} are above {MOST:g} s (!)")


if __name__ == "__main__":
    main(*sys.argv[1:])
