"""``python -m tests.serve.fuzz --requests 300``: odd requests to `perdure serve`, and a table of answers.

Each request is made of a route, a token, an owner's agent, an origin and a content type, and what
it should get is worked out beside the server. Half of them go to a server with tokens.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.asgi.served import Served

SERVE: Final = "perdure serve tests.serve.agents:quick --port {port} --request-timeout 5".split()
APP: Final = "https://app.example"
OWNERS: Final = ("ada", "bob", "eve")
TOKENS: Final[list[dict[str, Any]]] = [
    {"token": "ada-token-0123456789", "tenant": "acme", "owners": ["ada"]},
    {"token": "bob-token-0123456789", "tenant": "acme", "owners": ["bob"]},
    {"token": "all-token-0123456789", "tenant": "acme"},
    {"token": "eve-token-0123456789", "tenant": "other", "owners": ["eve"]},
    {"token": "ops-token-0123456789", "metrics": True},
]
ROUTES: Final = (
    ("GET", "/agents", "list"),
    ("GET", "/agents?order=id", "list"),
    ("GET", "/agents/{agent}", "agent"),
    ("GET", "/agents/{agent}/messages", "agent"),
    ("HEAD", "/agents/{agent}/events", "agent"),
    ("POST", "/agents/{agent}/messages", "post"),
    ("DELETE", "/agents/{agent}-gone", "absent"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/openapi.json", "description"),
    ("GET", "/healthz", "probe"),
    ("CONNECT", "/readyz", "no method"),
    ("PUT", "/agents/{agent}", "no method"),
    ("OPTIONS", "/agents/{agent}/messages", "preflight"),
    ("GET", "/agents/%FF", "no text"),
    ("GET", "/nowhere", "nowhere"),
)
WHO: Final = ("ada", "bob", "all", "eve", "ops", "none", "wrong", "basic")
HOSTS: Final = ("localhost", "127.0.0.1:1", "evil.example", "localhost:80@evil.example", "[::1]x")
ORIGINS: Final = (None, "own", APP, "https://evil.example", "null", "http://localhost:3000")
SITES: Final = (None, "same-origin", "cross-site", "same-site")
KINDS: Final = (None, "application/json", "text/plain", "application/x-www-form-urlencoded")
BODIES: Final = (b'{"text": "a b c"}', b"{", b'{"text": 1}', b"\xff", b"x" * 3000)


class Sent(msgspec.Struct, frozen=True):
    """A request, by its parts."""

    method: str
    path: str
    route: str
    owner: str
    who: str
    host: str
    origin: str | None
    site: str | None
    kind: str | None
    body: bytes

    @classmethod
    def any(cls, chance: random.Random) -> Sent:
        usual = chance.random()
        who = chance.choice(WHO)
        return cls(
            *chance.choice(ROUTES),
            # In her tenant there is no other agent, and whoever posts to none makes one.
            owner="eve" if who == "eve" else chance.choice(OWNERS),
            who=who,
            host=HOSTS[0] if usual < 0.85 else chance.choice(HOSTS),
            origin=None if usual < 0.55 else chance.choice(ORIGINS),
            site=None if usual < 0.65 else chance.choice(SITES),
            kind=KINDS[1] if chance.random() < 0.5 else chance.choice(KINDS),
            body=BODIES[0] if chance.random() < 0.6 else chance.choice(BODIES),
        )

    @property
    def headers(self) -> dict[str, str]:
        scheme = "Basic" if self.who == "basic" else "Bearer"
        who = "ada" if self.who == "basic" else self.who
        origin = f"http://{self.host}" if self.origin == "own" else self.origin
        given = {
            "host": self.host,
            "authorization": None if who == "none" else f"{scheme} {who}-token-0123456789",
            "origin": origin,
            "sec-fetch-site": self.site,
            "content-type": self.kind,
            "access-control-request-method": "POST" if self.route == "preflight" else None,
        }
        return {name: value for name, value in given.items() if value is not None}

    def expected(self, *, is_open: bool) -> int:
        """Return the status that it should get."""
        if self.host not in HOSTS[:2]:
            return 421
        is_named = self.origin == APP
        if not is_named and (
            self.origin not in (None, "own") or self.site in ("cross-site", "same-site")
        ):
            return 403
        if self.route == "probe":
            return 200
        if self.path == "/readyz":
            return 405
        if self.route == "preflight" and self.origin is not None:
            return 200 if is_named else 400
        return self._inside(is_open=is_open)

    def _inside(self, *, is_open: bool) -> int:
        if self.route == "description":
            return 200
        if not is_open and self.who in ("none", "wrong", "basic"):
            return 401
        if not is_open and (self.who == "ops") != (self.route == "metrics"):
            return 403
        if self.route in ("list", "metrics"):
            return 200
        if self.route in ("no method", "preflight"):
            return 405
        if self.route in ("no text", "nowhere", "absent"):
            return 400 if self.route == "no text" else 404
        if self.route == "post":
            return self._posted(is_open=is_open)
        return 200 if self._opens(is_open=is_open) else 404

    def _posted(self, *, is_open: bool) -> int:
        if is_open and self.kind != "application/json":
            return 415
        if len(self.body) > 2000:
            return 413
        if self.body != BODIES[0]:
            return 400
        return 200 if self._opens(is_open=is_open) else 404

    def _opens(self, *, is_open: bool) -> bool:
        if is_open or self.who == "all":
            return True
        return self.who == self.owner


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.fuzz")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    rows: collections.Counter[tuple[str, str, int]] = collections.Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="perdure-fuzz-") as folder:
        for place, is_open in enumerate((True, False)):
            count = (given.requests + place) // 2
            sent = [Sent.any(chance) for _ in range(count)]
            wrong += ask(f"file:{Path(folder) / str(place)}", sent, rows, is_open=is_open)
    print(f"{'server':12}{'route':12}{'statuses'}")
    for server, route in sorted({row[:2] for row in rows}):
        statuses = {
            row[2]: count for row, count in sorted(rows.items()) if row[:2] == (server, route)
        }
        told = ", ".join(f"{status}: {count}" for status, count in statuses.items())
        print(f"{server:12}{route:12}{told}")
    print(f"{sum(rows.values())} requests, {len(wrong)} with another answer than expected")
    print(*wrong[:20], sep="\n")
    return 1 if wrong else 0


def ask(
    store: str, sent: list[Sent], rows: collections.Counter[tuple[str, str, int]], *, is_open: bool
) -> list[str]:
    """Send requests to a server, and return those that got another answer than they should."""
    wrong = []
    env = {} if is_open else {"PERDURE_TOKENS": json.dumps(TOKENS)}
    command = [*SERVE, "--max-body", "2000", "--allow-origin", APP]
    server = Served(*command, store=store, **env)
    try:
        for owner in OWNERS:  # each has an agent, and other owners' secrets are to stay theirs
            post(server, owner, is_open=is_open)
        for one in sent:
            path = one.path.format(agent=f"of-{one.owner}")
            answer = server.client.request(
                one.method,
                path,
                headers=one.headers,
                content=one.body if one.route == "post" else b"",
            )
            rows["open" if is_open else "tokens", one.route, answer.status_code] += 1
            expected = one.expected(is_open=is_open)
            if answer.status_code != expected:
                wrong.append(f"{answer.status_code} instead of {expected}: {one}")
            elif not is_open and f"secret of {one.owner}" in answer.text:
                if one.who not in (one.owner, "all"):
                    wrong.append(f"another's words: {one}")
    finally:
        said = server.stop()
        server.close()
    if "Traceback" in said:
        wrong.append(said)
    return wrong


def post(server: Served, owner: str, *, is_open: bool) -> None:
    """Make an owner's agent."""
    token = {} if is_open else {"authorization": f"Bearer {owner}-token-0123456789"}
    body = {"text": f"secret of {owner}"}
    told = server.client.post(f"/agents/of-{owner}/messages", json=body, headers=token)
    assert told.status_code == 200, told.text
    if owner == "eve" and not is_open:  # in the first tenant there is one of that id as well
        token = {"authorization": "Bearer all-token-0123456789"}
        told = server.client.post("/agents/of-eve/messages", json={"text": "a"}, headers=token)
        assert told.status_code == 200, told.text


if __name__ == "__main__":
    sys.exit(main())
