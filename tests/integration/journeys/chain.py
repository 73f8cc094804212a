"""``python -m tests.integration.journeys.chain``: sessions through all stores, and back.

Each hop is ``perdure migrate`` in a process of its own, which is killed at random moments and
run again until it is through. In the end every session gives the same bundle as in the beginning,
byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

import perdure
from perdure import Message
from perdure.lease import LeaseOptions, OwnerWatch, acquire_lease
from perdure.records.keys import SessionKey
from perdure.store import SessionQuery, Store, Terms
from perdure.transfer import write_bundle
from tests.integration.journeys.backends import ENVIRONMENT, url_of
from tests.transfer.sessions import fill

POSTED = 7
"""Each so many-th session has something in its inbox."""
HOPS = ("file", "sqlite", "postgres", "redis", "s3", "encrypted+file", "file")


async def filled(store: Store, sessions: int) -> list[SessionKey]:
    """Make sessions of every shape, and short ones up to the number."""
    keys = await fill(store)
    more = [SessionKey(f"many-{number:05}") for number in range(sessions - len(keys))]
    async with perdure.connect(store) as manager:
        for key in more:
            async with manager.open(key.agent, owner="o", tags=["many"]) as session:
                for turn in range(2):
                    async with session.turn():
                        session.append(Message.user(f"{turn} of {key}"))
                        session.append(Message.assistant(f"answer {turn}" * 20))
            await session.aclose()
        for key in (keys + more)[POSTED::POSTED]:
            await manager.post(
                key.agent, Message.user("one"), Message.user("two"), key="op", tenant=key.tenant
            )
    return keys + more


async def bundles(store: Store, keys: list[SessionKey], folder: Path) -> dict[str, bytes]:
    """Return every session's bundle."""
    folder.mkdir()
    found: dict[str, bytes] = {}

    async def write(number: int, key: SessionKey) -> None:
        path = folder / f"{number}.jsonl"
        await write_bundle(store, key, path)
        found[str(key)] = path.read_bytes()

    for start in range(0, len(keys), 8):
        async with anyio.create_task_group() as group:
            for number, key in enumerate(keys[start : start + 8], start):
                group.start_soon(write, number, key)
    return found


async def waiting(store: Store, key: SessionKey) -> list[str]:
    """Return what waits in a session's inbox."""
    grant = await acquire_lease(
        store,
        key,
        Terms(me=store.owner),
        watch=OwnerWatch(LeaseOptions(), anyio.current_time),
        on_held="handover",
        wait=30,
    )
    found = [item.op_id for item in await store.receive(key, grant.epoch)]
    await store.release(key, grant.epoch)
    return found


class Hop:
    """One store's sessions into the next, through kills."""

    def __init__(self, source: str, target: str) -> None:
        self._command = [sys.executable, "-m", "perdure.cli", "migrate", source, target, "--json"]
        self._command += ["--wait", "60"]
        self.killed = 0
        self.runs = 0

    def run(self, kills: Sequence[float]) -> dict[str, Any]:
        """Kill it after each of so many seconds, then let it go through; return its report."""
        for seconds in kills:
            process = self._start()
            try:
                process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                self.killed += 1
                process.communicate()
        process = self._start()
        out, errors = process.communicate()
        assert process.returncode == 0, f"status {process.returncode}: {out}{errors}"
        found: dict[str, Any] = json.loads(out)
        return found

    def _start(self) -> subprocess.Popen[str]:
        self.runs += 1
        return subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )


async def chain(
    folder: Path, *, sessions: int, kills: int, hops: Sequence[str] = HOPS, seed: int = 0
) -> dict[str, Any]:
    """Send sessions through the hops; return what was seen. ``kills`` is for each hop."""
    dice = random.Random(seed)
    places = [folder / str(number) for number in range(len(hops))]
    for place in places:
        place.mkdir()
    urls = [url_of(kind, place) for kind, place in zip(hops, places, strict=True)]
    began = time.perf_counter()
    keys = await filled(perdure.store_for(urls[0]), sessions)
    first = perdure.store_for(urls[0])
    await first.open()
    before = await bundles(first, keys, folder / "before")
    posted = {str(key): await waiting(first, key) for key in keys[::POSTED]}
    await first.aclose()
    seen: dict[str, Any] = {"sessions": len(keys), "filled": _since(began), "hops": []}
    span = 0.5 + sessions / 100
    for source, target, kind in zip(urls, urls[1:], hops[1:], strict=False):
        hop, began = Hop(source, target), time.perf_counter()
        moments = [0.4 + dice.uniform(0, span) for _ in range(kills)]
        report = await anyio.to_thread.run_sync(hop.run, moments)
        took = _since(began)
        facts = {name: report[name] for name in ("sessions", "copied", "there", "failed")}
        seen["hops"].append({"to": kind, "took": took, "killed": hop.killed, **facts})
        print(json.dumps(seen["hops"][-1]), file=sys.stderr, flush=True)
    last = perdure.store_for(urls[-1])
    await last.open()
    after = await bundles(last, keys, folder / "after")
    seen["different"] = [name for name in before if after.get(name) != before[name]]
    seen["posted"] = sum(map(len, posted.values()))
    arrived = {str(key): await waiting(last, key) for key in keys[::POSTED]}
    seen["inboxes"] = {
        name: [sent, arrived[name]] for name, sent in posted.items() if sent != arrived[name]
    }
    seen["listed"] = len(await listed(last))
    await last.aclose()
    return seen


async def listed(store: Store) -> list[SessionKey]:
    """List all sessions of a store."""
    found: list[SessionKey] = []
    for tenant in await store.tenants():
        page = await store.sessions(SessionQuery(tenant=tenant, limit=500))
        while page:
            found += [info.key for info in page]
            page = await store.sessions(SessionQuery(tenant=tenant, limit=500, after=page[-1].key))
    return found


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.journeys.chain")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5, help="of each hop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hops", nargs="+", default=HOPS)
    options = vars(parser.parse_args())
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="pd-chain-") as folder:
        seen = anyio.run(lambda: chain(Path(folder), **options))
    print(json.dumps(seen, indent=2))
    bad = seen["different"] or seen["inboxes"] or seen["listed"] != seen["sessions"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
