"""A URL may hold a password, rightly or not; none is ever shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

import perdure
from perdure import ConfigError, Message, PerdureError
from perdure._connect import store_for
from perdure.cli import main

SECRET = "c4naryS3cret"

REFUSED = [
    f"file://u:{SECRET}@host/x",
    f"file:u:{SECRET}@host/x",
    f"file:///u:{SECRET}@host/x",
    f"file:////u:{SECRET}@host/x",
    f"FILE://u:{SECRET}@host/x",
    f"file:/x?password={SECRET}",
    f"file:x?a=b&password={SECRET}",
    f"x?password={SECRET}",
    f"u:{SECRET}@host/db",
    f"u:{SECRET}/more@host/db",
    f"user:{SECRET}@host/db",
    f"//u:{SECRET}@host/db",
    f":{SECRET}@host/db",
    f"{SECRET}@host:5432/db",
    f"sqlite://u:{SECRET}@h/x.db",
    f"sqlite:u:{SECRET}@h/x.db",
    f"sqlite:///u:{SECRET}@h/x.db",
    f"sqlite:////u:{SECRET}@h/x.db",
    f"sqlite:///x.db?password={SECRET}",
    f"sqlite:///x.db?key={SECRET}",
    f"memory:?password={SECRET}",
    f"memory://u:{SECRET}@h",
    f"mysql://u:{SECRET}@h/d",
    f"http://u:{SECRET}@h/",
    f"jdbc:postgresql://u:{SECRET}@h/d",
    f"postgresql+asyncpg://u:{SECRET}@h/d",
    f"postgres:u:{SECRET}@h/d",
    f"postgresql:/u:{SECRET}@h/d",
    f"postgresql://u:{SECRET}/x@h/d",
    f"postgresql://u:{SECRET}?x@h/d",
    f"postgresql://u:1?{SECRET}@h/d",
    f"postgresql://u:{SECRET}@h/d?connections={'x' * 9}",
    f"redis:u:{SECRET}@h",
    f"redis://u:{SECRET}@h:notaport/0",
    f"redis://u:{SECRET}/x@h/0",
    f"redis://u:{SECRET}@h/0?bogus=1",
    f"unix://u:{SECRET}@h/run/x.sock",
    f"s3://u:{SECRET}@bucket/prefix",
    f"s3://bucket/prefix?endpoint=http://u:{SECRET}@127.0.0.1:1",
    f"s3://bucket/prefix?endpoint=http://127.0.0.1:1/?password={SECRET}",
    f"s3://bucket/prefix?secret_access_key={SECRET}",
    f"encrypted+u:{SECRET}@host/db",
    f"encrypted+{SECRET}@host",
    f"encrypted+file://u:{SECRET}@host/x?compression=zstd",
]

MADE = [
    f"postgresql://u:{SECRET}@127.0.0.1:1/db",
    f"postgresql://u:{SECRET}@[::1]:1,h2/db?sslmode=require",
    f"postgresql://u@127.0.0.1:1/db?password={SECRET}",
    f"postgresql:///db?host=127.0.0.1&user=u&password={SECRET}",
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"rediss://u:{SECRET}@127.0.0.1:1/0?history=redis://x:{SECRET}%40h",
    f"unix://u:{SECRET}@/run/x.sock",
]


def told(error: BaseException) -> str:
    shown = "".join(traceback.format_exception(error))
    return f"{error} {error!r} {getattr(error, 'facts', '')} {shown}"


@pytest.mark.parametrize("url", REFUSED)
def test_what_is_refused_is_not_repeated(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_KEY", "c0ffee" * 10 + "abcd")
    with pytest.raises(PerdureError) as caught:
        store_for(url)
    assert isinstance(caught.value, ConfigError)
    assert main(["ls", "--store", url]) != 0
    if url.startswith("file:"):
        assert main(["doctor", "--json", "--store", url]) != 0
    monkeypatch.setenv("PERDURE_URL", url)
    assert main(["ls", "--json"]) != 0
    out, err = capfd.readouterr()
    assert SECRET not in told(caught.value) + out + err + caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", MADE)
def test_a_store_does_not_tell_its_password(url: str) -> None:
    store = store_for(url)
    manager = perdure.connect(url)
    assert SECRET not in f"{store!r} {store} {store.location} {vars(store)} {manager!r} {manager}"


def test_a_folder_may_be_called_like_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the errors say to write instead does work."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="file:./PATH"):
        store_for("u:pw@host")
    assert store_for("file:./u:pw@host").location == str(tmp_path / "u:pw@host")
    with pytest.raises(ConfigError, match="file:/./PATH"):
        store_for("file:/u:pw@host")
    assert store_for("file:/./u:pw@host").location == "/u:pw@host"
    with pytest.raises(ConfigError, match="sqlite:///./PATH"):
        store_for("sqlite:///u:pw@host")
    assert store_for("sqlite:///./u:pw@host").location.endswith(str(tmp_path / "u:pw@host"))
    with pytest.raises(ConfigError, match="sqlite:////./PATH"):
        store_for("sqlite:////u:pw@host")
    assert store_for("sqlite:////./u:pw@host").location.endswith("/u:pw@host")
    assert store_for(Path("x?a=b")).location == str(tmp_path / "x?a=b")
    for plain in ("me@work", "at/12:30@noon", "./a:b@c", "what?"):
        assert store_for(f"file:{plain}").location == str(tmp_path / plain)


@pytest.mark.anyio
async def test_the_manager_of_a_store_that_is_down_tells_no_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    texts: list[str] = []
    for url in (f"redis://u:{SECRET}@127.0.0.1:1/0", f"postgresql://u:{SECRET}@127.0.0.1:1/db"):
        manager = perdure.connect(url)
        with pytest.raises(PerdureError) as caught:
            async with manager as sessions, sessions.open("a") as session:
                session.append(Message.user("x"))
        texts += [told(caught.value), repr(manager), str(manager)]
    assert SECRET not in "".join(texts) + caplog.text


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "redis", "valkeys", "s3", "SQLITE"])
def test_an_address_without_its_colon_is_no_path(scheme: str) -> None:
    for url in (f"{scheme}//host/db", f"{scheme}//user@host:5432/db?sslmode=require"):
        with pytest.raises(ConfigError, match=f"did you mean '{scheme}://'"):
            store_for(url)
