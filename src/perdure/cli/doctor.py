"""``perdure doctor`` and ``tune``: what this machine, a store and the settings can do for sessions.

The doctor writes one probe session, reads it back and removes it, and writes one unnamed file to
check the clock and the locks. It changes nothing else, and makes no store. The functions ``of_…``
only judge: measured values in, one finding out.
"""

from __future__ import annotations

import datetime
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
from cyclopts import Parameter, validators

import perdure
from perdure import Message, tuning
from perdure._lib.platform import network_file_system, synced_by, try_lock
from perdure.autosave.events import SaveFailed
from perdure.autosave.options import MIB, PRESET, VARIABLES, Shutdown, autosave_from
from perdure.cli.access import opened
from perdure.cli.findings import CheckFinding, say_findings
from perdure.cli.output import StoreOption, print_table, say, size, stderr
from perdure.errors import ConfigError, LeaseError, PerdureError, SessionError
from perdure.session.manager import SessionManager
from perdure.store import Store, all_records
from perdure.stores.file import FileStore
from perdure.tuning.measure import made_up, observed

FULL = 64 * MIB
"""A disk with less room than this is about to refuse writes."""
SCARCE = 1024 * MIB
SKEW = 2.0
"""Seconds by which a file's time may differ from the clock: some file systems count in twos."""
BACK = 60.0
RELEASED = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC).timestamp()
"""perdure is not older than this, so neither is now."""


def of_settings(environment: Mapping[str, str]) -> CheckFinding:
    """Judge the environment variables that replace arguments."""
    try:
        autosave = autosave_from(environment)
    except ConfigError as error:
        return CheckFinding("settings", "problem", str(error), "correct or unset it")
    known = {PRESET, *VARIABLES}
    strange = sorted(name for name in environment if name.startswith(PRESET) and name not in known)
    if strange:
        names = ", ".join(strange)
        return CheckFinding(
            "settings",
            "warning",
            f"{names}: perdure does not read this",
            f"choose among {', '.join(sorted(known))}",
        )
    verdict = "autosave off" if autosave is None else str(autosave)
    return CheckFinding("settings", "ok", f"{verdict}, where connect() gets no autosave=…")


_WEAKER = {
    "fsync every second": "a crash of the server may cost the last second",
    "written, synced by the system": "a crash of its machine may cost half a minute",
    "memory, with snapshots": "a crash of the server costs what came after its last snapshot",
    "unknown": "the server does not report how it is set up",
}


def of_durability(durability: str) -> CheckFinding:
    """Judge what a store means by durable."""
    if durability == "memory":
        return CheckFinding(
            "durability",
            "warning",
            "kept in memory only",
            "use a file store where anything must outlive the process",
        )
    weakness = _WEAKER.get(durability)
    if durability.startswith("unsafe: "):
        weakness = "a crash of the server may cost what it had acknowledged"
    if weakness is not None:
        return CheckFinding(
            "durability",
            "warning",
            f"{durability}: {weakness}",
            "see docs/stores.md for how to set up a server to sync each save",
        )
    verdict = "each save is synced to the disk" if durability == "fsync" else durability
    return CheckFinding("durability", "ok", verdict)


def of_syncs(by: str, *, folders: bool) -> CheckFinding:
    """Judge what this platform makes files durable by."""
    if folders:
        return CheckFinding("syncs", "ok", f"files by {by}, and their folders too")
    return CheckFinding(
        "syncs",
        "warning",
        f"files by {by}; folders cannot be synced here",
        "a new session's first save may not outlast a power cut; a crash it does",
    )


def of_mode(path: str, mode: int, *, mine: bool) -> CheckFinding:
    """Judge who may read and write a folder of the store."""
    bits = stat.S_IMODE(mode)
    verdict = f"{path} has mode {bits:04o}"
    if bits & (stat.S_IWGRP | stat.S_IWOTH):
        return CheckFinding(
            "permissions", "problem", f"{verdict}: others can change it", f"chmod go-w {path}"
        )
    if not mine:
        return CheckFinding(
            "permissions",
            "warning",
            f"{path} belongs to another user",
            "run perdure as its owner, or chown it",
        )
    if bits & (stat.S_IRWXG | stat.S_IRWXO):
        return CheckFinding(
            "permissions", "warning", f"{verdict}: others can look into it", f"chmod go-rwx {path}"
        )
    return CheckFinding("permissions", "ok", verdict)


def of_network(kind: str | None) -> CheckFinding:
    """Judge the file system that a store is on."""
    if kind is None:
        return CheckFinding("file system", "ok", "local")
    return CheckFinding(
        "file system",
        "warning",
        f"{kind} is a network file system, where locks and syncs may not hold",
        "keep the store on a local disk, or use a server store",
    )


def of_locks(locks_work: bool | None) -> CheckFinding:  # noqa: FBT001  # the result of try_lock
    """Judge whether files can be locked, which shows whether a process is alive."""
    if locks_work:
        return CheckFinding("locks", "ok", "files can be locked")
    return CheckFinding(
        "locks",
        "warning",
        "files cannot be locked here: a process that died is noticed only after "
        "LeaseOptions(ttl=…)",
        "keep the store on a file system with locks for fast takeovers",
    )


def of_space(free: int, total: int, files: int | None) -> CheckFinding:
    """Judge the room on the disk: bytes that are free, of how many, and files that fit."""
    verdict = f"{size(free)} of {size(total)} free"
    if files == 0:
        return CheckFinding(
            "space",
            "problem",
            f"{verdict}, but room for no further file",
            "remove files: this disk has no inodes left",
        )
    if free < max(MIB, min(FULL, total // 20)):
        return CheckFinding("space", "problem", verdict, "make room: saves are about to fail")
    if free < min(SCARCE, total // 4):
        return CheckFinding("space", "warning", verdict, "make room before saves fail")
    return CheckFinding("space", "ok", verdict)


def of_clock(now: float, stamped: float, newest: float) -> CheckFinding:
    """Judge the wall clock by the time of a file written now, and of the newest one there."""
    if now < RELEASED:
        return CheckFinding(
            "clock",
            "problem",
            f"the clock says {_date(now)}",
            "set it: times of records would be wrong",
        )
    if abs(stamped - now) > SKEW:
        return CheckFinding(
            "clock",
            "warning",
            f"files get a time {stamped - now:+.0f} s off this machine's clock",
            "synchronize the clocks (NTP)",
        )
    if newest - now > BACK:
        return CheckFinding(
            "clock",
            "warning",
            f"the store has a file from {_date(newest)}, in the future",
            "see whether the clock was set back",
        )
    return CheckFinding("clock", "ok", "agrees with the file system's")


def of_grace(grace: float | None, shutdown: Shutdown) -> CheckFinding:
    """Judge the time between SIGTERM and SIGKILL by what stopping may take."""
    needed = shutdown.deadline + shutdown.hard_grace
    if grace is None:
        return CheckFinding(
            "grace",
            "ok",
            f"stopping may take {needed:g} s; the time until SIGKILL is not known",
            "give it with --grace (Docker's default is 10 s, Kubernetes' 30 s)",
        )
    if grace <= needed:
        return CheckFinding(
            "grace",
            "problem",
            f"SIGKILL comes {grace:g} s after SIGTERM, and stopping may take {needed:g} s",
            f"allow more than {needed:g} s (terminationGracePeriodSeconds, TimeoutStopSec, "
            "docker stop -t), or connect with a Shutdown whose deadline and hard_grace are less "
            f"than {grace:g} together",
        )
    return CheckFinding("grace", "ok", f"{grace:g} s, and stopping takes at most {needed:g} s")


def _date(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).date().isoformat()


GRACE_VARIABLE = "PERDURE_GRACE_PERIOD"
PROBE = "perdure-doctor"
"""The probe session's agent; one id for all probes, so that leftovers do not accumulate."""
PATIENCE = 10.0
"""Seconds for the probe session."""
PACKAGES = ("anyio", "msgspec", "aiofiles", "trio")
NAMED_BY = ("PERDURE_URL", "PERDURE_HOME")


async def doctor(
    *,
    grace: Annotated[float | None, Parameter(validator=validators.Number(gte=0))] = None,
    deadline: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Check the store, this machine and the settings, and say what to fix.

    Saves a probe session, reads it back and removes it. Exits with 1 if there is a problem.

    Args:
        grace: Seconds between SIGTERM and SIGKILL. Default: PERDURE_GRACE_PERIOD.
        deadline: The application's Shutdown(deadline=…), to compare with. Default: 20.

    """
    shutdown = Shutdown()
    if deadline is not None:
        turn_grace = min(shutdown.turn_grace, deadline)
        shutdown = Shutdown(deadline=deadline, turn_grace=turn_grace)
    findings = [_versions(), of_settings(os.environ)]
    findings += await _examine(where.store)
    findings.append(of_grace(_grace() if grace is None else grace, shutdown))
    problems = sum(finding.problem for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    facts = {"problems": problems, "warnings": warnings, "checks": findings}
    where.show(facts, lambda: say_findings(findings))
    return 1 if problems else 0


def _grace() -> float | None:
    text = os.environ.get(GRACE_VARIABLE)
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(
            f"invalid {GRACE_VARIABLE}={text!r}: it must be seconds, such as 30",
            variable=GRACE_VARIABLE,
            value=text,
        ) from None


def _versions() -> CheckFinding:
    python = ".".join(map(str, sys.version_info[:3]))
    packages = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return CheckFinding(
        "versions",
        "ok",
        f"perdure {perdure.__version__}, Python {python} on {sys.platform}, {packages}",
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


async def _examine(url: str | None) -> list[CheckFinding]:
    try:
        with _place(url) as (store, folder, found):
            findings = [found, *await _probe(store)]
            return findings if folder is None else [*findings, *_check_folder(folder)]
    except PerdureError as error:
        return [CheckFinding("store", "problem", str(error))]
    except OSError as error:
        verdict = f"{os.fsdecode(error.filename or '')}: {error.strerror}"
        cure = "make the folder belong to this user (chown, chmod u+rwx), or choose another"
        return [CheckFinding("store", "problem", verdict, cure)]


@contextmanager
def _place(url: str | None) -> Iterator[tuple[Store, Path | None, CheckFinding]]:
    """Yield the store, and the folder of a file store.

    If it does not exist yet, that is a temporary one next to where it would be.
    """
    store = perdure.store_for(url)
    if not isinstance(store, FileStore):
        yield store, None, CheckFinding("store", "ok", store.location)
        return
    folder = Path(store.location)
    parent = next(above for above in folder.parents if above.is_dir())
    named = url is not None or any(map(os.environ.get, NAMED_BY))
    if folder.exists() or (named and parent != folder.parent):  # opening it says what is wrong
        yield store, folder, CheckFinding("store", "ok", str(folder))
        return
    verdict = f"there is no store at {folder} yet: the first connect makes it"
    cure = f"if that surprises you, look at --store, {' and '.join(NAMED_BY)}"
    with tempfile.TemporaryDirectory(prefix=".perdure-doctor-", dir=parent) as temporary:
        trial = Path(temporary) / "store"
        yield FileStore(trial), trial, CheckFinding("store", "warning", verdict, cure)


async def _probe(store: Store) -> list[CheckFinding]:
    """Save a probe session, read it back and delete it.

    Raises:
        PerdureError: The store cannot be opened.

    """
    shutdown = Shutdown(deadline=1, turn_grace=0, signals=False)
    sessions = await perdure.connect(store, autosave=None, shutdown=shutdown)
    failures: list[SaveFailed] = []
    sessions.on("save_failed", failures.append)
    durability = store.capabilities.durability
    try:
        with anyio.fail_after(PATIENCE):
            probed = await _round_trip(store, sessions)
    except LeaseError:
        verdict = "another process has the probe session"
        probed = CheckFinding("probe", "warning", verdict, "let the other doctor end first")
    except TimeoutError:
        reason = f": {failures[-1].error}" if failures else ""
        probed = CheckFinding("probe", "problem", f"nothing was saved within {PATIENCE} s{reason}")
    except PerdureError as error:
        probed = CheckFinding("probe", "problem", str(error))
    finally:
        await sessions.aclose()
    return [of_durability(durability), probed]


async def _round_trip(store: Store, sessions: SessionManager) -> CheckFinding:
    """Save a random token, and see whether the log has it."""
    session = await sessions.open(PROBE, wait=PATIENCE / 2)
    start = time.perf_counter()
    token = secrets.token_hex(16)
    seq = session.append(Message.user(token))
    await session.save()
    records = await all_records(store.read_log(session.key, after=seq - 1))
    took = (time.perf_counter() - start) * 1000
    await sessions.delete(PROBE)
    if [record.seq for record in records if token.encode() in record.payload] == [seq]:
        return CheckFinding("probe", "ok", f"saved, read back and removed, in {took:.1f} ms")
    return CheckFinding(
        "probe",
        "problem",
        "what was saved was not what could be read",
        "do not trust this disk or mount",
    )


def _check_folder(folder: Path) -> Iterator[CheckFinding]:
    yield from _modes(folder)
    by, folders = synced_by()
    yield of_syncs(by, folders=folders)
    yield of_network(network_file_system(str(folder)))
    usage = shutil.disk_usage(folder)
    files = os.statvfs(folder).f_favail if hasattr(os, "statvfs") else None
    inodes = os.statvfs(folder).f_files if files is not None else 0
    yield of_space(usage.free, usage.total, files if inodes else None)
    newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"perdure")
        file.flush()
        yield of_clock(time.time(), os.fstat(file.fileno()).st_mtime, newest)
        yield of_locks(try_lock(file.fileno()))


def _modes(folder: Path) -> Iterator[CheckFinding]:
    """Judge the modes of the store's folders: each that is not ok, or one line for all."""
    if sys.platform == "win32":
        return
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    judged = []
    for path in folders:
        modes = path.lstat()
        is_own = modes.st_uid == os.geteuid()
        judged.append(of_mode(str(path), modes.st_mode, mine=is_own))
    yield from [checked for checked in judged if checked.level != "ok"] or judged[:1]


# ``perdure tune``: which autosave setting fits this store and these sessions


FROM_0 = Parameter(validator=validators.Number(gte=0, lt=inf))
FEW = 20
"""The minimum number of changes in a store to choose a setting by."""


async def tune(
    *,
    sessions: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 100,
    max_loss: Annotated[float | None, FROM_0] = None,
    shutdown: Annotated[float, FROM_0] = 20.0,
    price: Annotated[float, FROM_0] = 0.0,
    budget: Annotated[float | None, FROM_0] = None,
    imagine: bool = False,
    seconds: Annotated[float, FROM_0] = 4.0,
    plot: Annotated[Path | None, Parameter(name="--plot")] = None,
    where: StoreOption = StoreOption(),  # noqa: B008  # frozen
) -> int:
    """Find the autosave setting that fits.

    Measures how many saves the store can take, in sessions of a tenant of their own that are
    deleted again; reads from the log when its sessions changed; replays that with several
    settings; and recommends one, with its cost and its risk. Changes no setting. Measuring loads
    the store for some seconds. Exits with 1 if no setting fits, or if too little has changed in
    the store.

    Args:
        sessions: How many sessions will be active at once.
        max_loss: Seconds of work that a crash may cost at most: recommends the setting that saves
            least often within it; with 0, the one that saves each change at once. Default: no
            limit, and the setting where saves and losses together are smallest.
        shutdown: Seconds in which everything must be saved when the process is stopped.
        price: What a million saves cost, in any currency: for S3 about 5 dollars.
        budget: What the saves may cost in a month, in the same currency. Default: no limit.
        imagine: Use a made-up workload instead of the store's.
        seconds: How long to measure, roughly.
        plot: Write a chart of the settings to this file, as SVG.

    """
    needs = tuning.Requirements(
        sessions=sessions, max_loss=max_loss, shutdown=shutdown, price=price, budget=budget
    )
    async with opened(where.store, write=True) as store:
        workload = made_up() if imagine else await observed(store)
        if workload.changes < FEW and not imagine:
            raise SessionError(
                f"there is nothing to measure in {store.location}: its sessions have changed "
                f"{workload.changes} times, and it takes {FEW} to tell how they do: let agents "
                "work in it, or add --imagine for made-up ones",
                path=store.location,
            )
        with stderr().status("measuring the store"):
            measured = await tuning.measure(store, size=workload.size, seconds=seconds)
        location = store.location
    advice = tuning.advise(workload, measured, needs)
    if plot is not None:
        await anyio.Path(plot).write_text(tuning.chart(advice, needs.sessions), "utf-8")
    where.show(
        _facts(location, workload, measured, advice),
        lambda: _print(location, workload, measured, advice, needs),
    )
    return 0 if advice.best else 1


def _facts(
    location: str,
    workload: tuning.Workload,
    measured: tuning.StoreMeasurement,
    advice: tuning.Advice,
) -> dict[str, Any]:
    return {
        "store": location,
        "workload": {
            "source": workload.source,
            "sessions": len(workload.sessions),
            "changes": workload.changes,
            "seconds": workload.seconds,
            "bytes_of_a_change": workload.size,
        },
        "measured": [
            {"sessions": level.sessions, "seconds": level.seconds, "saves_per_s": level.rate}
            for level in measured.levels
        ],
        "settings": [_option(option) for option in advice.options],
        "recommended": _option(advice.best) if advice.best else None,
        "idle": advice.idle,
        "settled_by_turns": advice.settled_by_turns,
        "warnings": advice.warnings,
    }


def _option(option: tuning.Option) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(option)
    cost = facts.pop("cost")
    setting = cost.pop("autosave")
    return {
        "debounce": setting["debounce"],
        "max_delay": setting["max_delay"],
        **cost,
        **facts,
    }


def _print(
    location: str,
    workload: tuning.Workload,
    measured: tuning.StoreMeasurement,
    advice: tuning.Advice,
    needs: tuning.Requirements,
) -> None:
    rate = workload.changes / (workload.seconds or 1.0)
    alone = f"one alone takes {measured.save_time * 1e3:.1f} ms"
    say(f"store     {location}: {measured.rate:,.0f} saves/s at the most, {alone}")
    say(f"workload  {workload.source}: {rate:.2f} changes/s each, of {size(workload.size)}")
    say(f"for       {needs.sessions:,} sessions that are active at once")
    say("")
    columns = ["debounce", "max_delay", "saves/s", "busy", "unsaved", "lost", "worst"]
    if needs.price:
        columns.append("monthly")
    rows = [_row(option, advice, needs) for option in advice.options]
    print_table([*columns, ""], rows, right=" ".join(columns))
    say("")
    say(
        "busy: how much of what the store can take; unsaved: the share of sessions that have\n"
        "something unsaved at a moment; lost: the records of a session that a crash costs on\n"
        "average; worst: for how many seconds a record was unsaved."
    )
    if advice.best and needs.max_loss is None and not (advice.idle or advice.settled_by_turns):
        say("recommended: what fits with the fewest saves and losses, as shares of the most each.")
    for warning in advice.warnings:
        say(f"note: {warning}")
    if advice.best is None:
        return
    setting = advice.best.cost.autosave
    say("")
    if setting.debounce is None:
        say("in Python             Autosave(), which is the default: nothing needs to be set")
        return
    quiet, longest = f"{setting.debounce:g}", f"{setting.max_delay:g}"
    variables = f"PERDURE_AUTOSAVE_DEBOUNCE={quiet} PERDURE_AUTOSAVE_MAX_DELAY={longest}"
    say(f"in Python             Autosave(debounce={quiet}, max_delay={longest})")
    say(f"in the environment    {variables}")
    say(f"in persistence.yaml   autosave: {{debounce: {quiet}, max_delay: {longest}}}")


def _row(option: tuning.Option, advice: tuning.Advice, needs: tuning.Requirements) -> list[str]:
    cost = option.cost
    cells = [
        "default" if cost.autosave.debounce is None else f"{cost.autosave.debounce:g}",
        f"{cost.autosave.max_delay:g}",
        f"{cost.saves * needs.sessions:,.1f}",
        f"{option.load:.1%}",
        f"{cost.exposed:.1%}",
        f"{cost.lost:.2f}",
        f"{cost.worst:.1f}",
    ]
    if needs.price:
        cells.append(f"{option.price:,.2f}")
    return [*cells, "recommended" if option is advice.best else "; ".join(option.against)]
