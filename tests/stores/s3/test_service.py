"""Services that are not there, refuse, or do not do what they should; and what nobody may see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure._connect import store_for
from perdure.errors import ConfigError, MissingExtraError, PerdureError, StoreUnavailableError
from perdure.stores.s3 import S3Store
from tests.servers.s3 import ACCESS_KEY, BUCKET, CREDENTIALS, SECRET_KEY, S3Server
from tests.stores.s3.gateway import DEAF, Gateway

SECRET = "s3cr3t-that-nobody-may-see"


def store_at(endpoint: str, bucket: str = BUCKET, **options: object) -> S3Store:
    options.setdefault("credentials", CREDENTIALS)
    return S3Store(bucket, "tests", endpoint=endpoint, region="us-east-1", **options)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_a_service_that_ignores_conditions_is_refused(gateway: Gateway) -> None:
    gateway.fault = lambda method, path: DEAF if method == "PUT" else None
    with pytest.raises(ConfigError, match="If-None-Match"):
        await store_at(gateway.endpoint).open()


@pytest.mark.anyio
async def test_a_service_that_ignores_if_match_alone_is_refused(gateway: Gateway) -> None:
    puts = 0

    def fault(method: str, path: str) -> int | None:
        nonlocal puts
        puts += method == "PUT"
        return DEAF if puts > 2 and method == "PUT" else None

    gateway.fault = fault
    with pytest.raises(ConfigError, match="If-Match"):
        await store_at(gateway.endpoint).open()


@pytest.mark.anyio
async def test_nobody_there(server: S3Server) -> None:
    with pytest.raises(StoreUnavailableError, match="nothing answers at this address"):
        await store_at("http://127.0.0.1:1").open()


@pytest.mark.anyio
async def test_no_such_bucket(server: S3Server) -> None:
    with pytest.raises(StoreUnavailableError, match="the bucket does not exist"):
        await store_at(server.endpoint, "not-a-bucket").open()


@pytest.mark.anyio
async def test_a_wrong_key_and_a_wrong_secret(server: S3Server) -> None:
    wrong = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET}
    with pytest.raises(StoreUnavailableError, match="AWS_SECRET_ACCESS_KEY") as caught:
        await store_at(server.endpoint, credentials=wrong).open()
    assert SECRET not in whole(caught.value)
    wrong = {"access_key_id": "nobody", "secret_access_key": SECRET_KEY}
    with pytest.raises(StoreUnavailableError, match="AWS_ACCESS_KEY_ID"):
        await store_at(server.endpoint, credentials=wrong).open()


def whole(error: BaseException) -> str:
    """Return an error with all its causes, as a log would show them."""
    import traceback

    return "".join(traceback.format_exception(error))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "cure"),
    [
        ((403, "RequestTimeTooSkewed"), "clock differs"),
        ((403, "AccessDenied"), "s3:PutObject"),
        ((400, "ExpiredToken"), "renew them"),
        ((301, "PermanentRedirect"), "region="),
        ((503, "ServiceUnavailable"), "busy or down"),
    ],
)
async def test_what_to_do_is_said(gateway: Gateway, answer: tuple[int, str], cure: str) -> None:
    gateway.fault = lambda method, path: answer
    with pytest.raises(StoreUnavailableError, match=cure) as caught:
        await store_at(gateway.endpoint).open()
    assert answer[1] in str(caught.value)


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    for url in (
        f"s3://key:{SECRET}@bucket/prefix",
        f"s3://bucket/prefix?endpoint=http://key:{SECRET}@host",
        f"s3://bucket/prefix?secret_access_key={SECRET}",
    ):
        with pytest.raises(ConfigError) as caught:
            store_for(url)
        assert SECRET not in whole(caught.value)


@pytest.mark.parametrize("host", ["minio:9000", "10.0.0.7", "[2001:db8::1]:9000", "localhost.evil"])
def test_an_endpoint_without_encryption_is_refused(host: str) -> None:
    at = f"s3://bucket/prefix?endpoint=http://{host}"
    with pytest.raises(ConfigError, match="allow_http=true"):
        store_for(at)
    with pytest.raises(ConfigError, match="https://"):
        S3Store("bucket", endpoint=f"HTTP://{host}")
    assert store_for(f"{at}&allow_http=true").location.endswith(f"http://{host}")
    S3Store("bucket", endpoint=f"http://{host}", allow_http=True)
    S3Store("bucket", endpoint=f"https://{host}")
    with pytest.raises(ConfigError, match="allow_http"):
        store_for(f"{at}&allow_http={SECRET}")


def test_an_endpoint_on_this_machine_needs_no_encryption() -> None:
    for host in ("127.0.0.1:9000", "127.1.2.3", "[::1]:9000", "localhost:9000", "s3.localhost"):
        store = store_for(f"s3://bucket/prefix?endpoint=http://{host}")
        assert store.location.endswith(f"http://{host}")


@pytest.mark.anyio
async def test_the_variable_of_an_endpoint_is_held_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://key:{SECRET}@minio:9000")
    with pytest.raises(ConfigError, match="http://minio is reached without encryption") as caught:
        await S3Store("bucket").open()
    assert SECRET not in whole(caught.value)


def test_credentials_are_never_shown() -> None:
    credentials = {"access_key_id": "AKIA-visible", "secret_access_key": SECRET}
    store = store_at("http://127.0.0.1:1", credentials=credentials)
    for text in (repr(store), str(store), store.location):
        assert SECRET not in text
        assert "AKIA" not in text
    assert store.location == f"s3://{BUCKET}/tests/ at http://127.0.0.1:1"
    with pytest.raises(ConfigError) as caught:
        store_at("http://127.0.0.1:1", credentials={SECRET: SECRET, "password": SECRET})
    assert SECRET not in str(caught.value) or "has no" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3:",
        "s3:bucket",
        "s3:///prefix",
        "s3://b",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/" + "x" * 300,
        "s3://bucket/a b",
        "s3://bucket/p#fragment",
        "s3://bucket/p?endpoint=ftp://host",
        "s3://bucket/p?endpoint=host:9000",
        "s3://bucket/p?timeout=soon",
        "s3://bucket/p?timeout=-1",
        "s3://bucket/p?retries=3",
    ],
)
def test_a_url_that_does_not_fit_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        store_for(url)


def test_a_url_says_where() -> None:
    store = store_for("s3://bucket/some/prefix/?endpoint=https://host:9000&region=r&timeout=5")
    assert store.location == "s3://bucket/some/prefix/ at https://host:9000"
    assert store_for("s3://bucket").location == "s3://bucket/"
    assert store.capabilities.shared


def test_importing_the_store_does_not_import_the_driver() -> None:
    code = (
        "import sys, perdure, perdure.stores.s3; from perdure.stores import S3Store;"
        "S3Store.at('s3://bucket/x'); assert 'obstore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.anyio
async def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"perdure\[s3\]"):
        await store_at("http://127.0.0.1:1").open()


@pytest.mark.anyio
async def test_a_session_lives_in_a_bucket(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.servers.s3 import prefix_of

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    url = server.url(prefix_of(tmp_path))
    async with perdure.connect(url) as sessions, sessions.open("agent") as session:
        async with session.turn():
            session.append(perdure.Message.user("Hello"))
    async with perdure.connect(url) as sessions, sessions.open("agent") as session:
        assert [message["content"] for message in session.context("openai")] == ["Hello"]
        assert [info.key.agent for info in await sessions.list()] == ["agent"]


@pytest.mark.anyio
async def test_a_store_that_is_not_open_says_so(tmp_path: Path) -> None:
    from perdure.records.keys import SessionKey

    with pytest.raises(StoreUnavailableError, match="not open"):
        await store_at("http://127.0.0.1:1").head(SessionKey("agent"))
    assert issubclass(StoreUnavailableError, PerdureError)
