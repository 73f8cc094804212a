"""``perdure import SDK URL``: the sessions of another SDK's own database."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

import perdure
from perdure.adapters.imports import SDKS, SdkImport, import_sessions
from perdure.cli.access import managed
from perdure.cli.output import SessionOption, print_json, progress_bar, say
from perdure.errors import ConfigError, MissingExtraError
from perdure.records.keys import DEFAULT_SESSION


def sdk_of(path: Path, url: str | None, *, id: str | None, where: SessionOption) -> str | None:
    """Return which SDK's database is to be imported; None for a file or a folder.

    Raises:
        ConfigError: What was given does not go together.

    """
    name = str(path)
    if url is None:
        if name in SDKS and not path.exists():
            raise ConfigError(f"which database? perdure import {name} URL", option="URL")
        return None
    if name not in SDKS:
        message = f"{name} is no SDK that can be imported: choose {', '.join(SDKS)}"
        raise ConfigError(message, option="SDK")
    if id is not None or where.session != DEFAULT_SESSION:
        raise ConfigError(f"import {name} keeps the ids: leave out --id and --session")
    return name


async def import_sdk(sdk: str, url: str, where: SessionOption) -> int:
    """Import the sessions of an SDK's database."""
    try:
        module: Any = importlib.import_module(SDKS[sdk])
    except ModuleNotFoundError as error:
        message = f"import {sdk} needs the SDK: pip install 'perdure[{_extra(sdk)}]'"
        raise MissingExtraError(message, extra=_extra(sdk)) from error
    store = perdure.store_for(where.store)
    columns = MofNCompleteColumn(), TimeRemainingColumn()
    async with module.source_of(url) as source, managed(store, write=True) as sessions:
        with progress_bar("importing", *columns) as update:
            done = await import_sessions(source, sessions, tenant=where.tenant, progress=update)
    if where.json:
        print_json({"sdk": sdk, "target": store.location, **msgspec.to_builtins(done)})
    else:
        _print(done, store.location)
    return 1 if done.failed else 0


def _extra(sdk: str) -> str:
    return "google-adk" if sdk == "adk" else sdk


def _print(done: SdkImport, target: str) -> None:
    for name, reason in done.failed.items():
        say(f"{name}: NOT IMPORTED: {reason}")
    for name in done.left_alone:
        say(f"{name}: is in use in {target}, and was left as it is there")
    say(
        f"{done.imported + done.continued} of {done.sessions} sessions imported into {target} and "
        f"verified, {done.continued} of them after what was there; {done.there} were there "
        f"already: {done.added} items"
    )
