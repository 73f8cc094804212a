"""What the doctor says of what it saw: values in, one diagnosis out, no look at anything."""

from __future__ import annotations

import datetime
import stat
from collections.abc import Mapping
from typing import Literal

import msgspec

from perdure.autosave.environment import PRESET, VARIABLES, autosave_from
from perdure.autosave.options import MIB, Shutdown
from perdure.cli.output import size
from perdure.errors import ConfigError

__all__ = [
    "Diagnosis",
    "of_clock",
    "of_durability",
    "of_grace",
    "of_locks",
    "of_mode",
    "of_network",
    "of_settings",
    "of_space",
    "of_syncs",
]

FULL = 64 * MIB
"""A disk with less room than this is about to refuse writes."""
SCARCE = 1024 * MIB
SKEW = 2.0
"""Seconds by which a file's time may differ from the clock: some file systems count in twos."""
BACK = 60.0
RELEASED = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC).timestamp()
"""perdure is not older than this, so neither is now."""


class Diagnosis(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    what: str
    level: Literal["ok", "warning", "problem"]
    detail: str
    cure: str = ""


def of_settings(environment: Mapping[str, str]) -> Diagnosis:
    """Judge the variables that stand in for arguments."""
    try:
        autosave = autosave_from(environment)
    except ConfigError as error:
        return Diagnosis("settings", "problem", str(error), "correct or unset it")
    known = {PRESET, *VARIABLES}
    strange = sorted(name for name in environment if name.startswith(PRESET) and name not in known)
    if strange:
        names = ", ".join(strange)
        cure = f"choose among {', '.join(sorted(known))}"
        return Diagnosis("settings", "warning", f"{names}: perdure does not read this", cure)
    said = "autosave off" if autosave is None else str(autosave)
    return Diagnosis("settings", "ok", f"{said}, where connect() gets no autosave=…")


_WEAKER = {
    "fsync every second": "a crash of the server may cost the last second",
    "written, synced by the system": "a crash of its machine may cost half a minute",
    "memory, with snapshots": "a crash of the server costs what came after its last snapshot",
    "unknown": "the server does not tell how it is set up",
}


def of_durability(durability: str) -> Diagnosis:
    """Judge what a store means by durable."""
    if durability == "memory":
        cure = "use a file store where anything must outlive the process"
        return Diagnosis("durability", "warning", "kept in memory only", cure)
    if durability in _WEAKER:
        cure = "see docs/stores.md for how a server is set up to sync each save"
        return Diagnosis("durability", "warning", f"{durability}: {_WEAKER[durability]}", cure)
    if durability.startswith("unsafe: "):
        cure = "see docs/stores.md for how a server is set up to sync each save"
        said = f"{durability}: a crash of the server may cost what it had acknowledged"
        return Diagnosis("durability", "warning", said, cure)
    said = "each save is synced to the disk" if durability == "fsync" else durability
    return Diagnosis("durability", "ok", said)


def of_syncs(by: str, *, folders: bool) -> Diagnosis:
    """Judge what this platform makes files durable by."""
    if folders:
        return Diagnosis("syncs", "ok", f"files by {by}, and their folders too")
    said = f"files by {by}; folders cannot be synced here"
    cure = "a new session's first save may not outlast a power cut; a crash it does"
    return Diagnosis("syncs", "warning", said, cure)


def of_mode(path: str, mode: int, *, mine: bool) -> Diagnosis:
    """Judge who may read and write a folder of the store."""
    bits = stat.S_IMODE(mode)
    said = f"{path} has mode {bits:04o}"
    if bits & (stat.S_IWGRP | stat.S_IWOTH):
        cure = f"chmod go-w {path}"
        return Diagnosis("permissions", "problem", f"{said}: others can change it", cure)
    if not mine:
        cure = "run perdure as its owner, or chown it"
        return Diagnosis("permissions", "warning", f"{path} belongs to another user", cure)
    if bits & (stat.S_IRWXG | stat.S_IRWXO):
        cure = f"chmod go-rwx {path}"
        return Diagnosis("permissions", "warning", f"{said}: others can look into it", cure)
    return Diagnosis("permissions", "ok", said)


def of_network(kind: str | None) -> Diagnosis:
    """Judge the file system that a store lies on."""
    if kind is None:
        return Diagnosis("file system", "ok", "local")
    cure = "keep the store on a local disk, or use a server store"
    said = f"{kind} is a network file system, where locks and syncs may not hold"
    return Diagnosis("file system", "warning", said, cure)


def of_locks(taken: bool | None) -> Diagnosis:  # noqa: FBT001  # what try_lock said
    """Judge whether files can be locked, which tells dead processes from living ones."""
    if taken:
        return Diagnosis("locks", "ok", "files can be locked")
    cure = "keep the store on a file system with locks for fast takeovers"
    said = "files cannot be locked here: a process that died is noticed only after Lease(ttl=…)"
    return Diagnosis("locks", "warning", said, cure)


def of_space(free: int, total: int, files: int | None) -> Diagnosis:
    """Judge the room on the disk: bytes that are free, of how many, and files that fit."""
    said = f"{size(free)} of {size(total)} free"
    if files == 0:
        cure = "remove files: this disk has no inodes left"
        return Diagnosis("space", "problem", f"{said}, but room for no further file", cure)
    if free < FULL:
        return Diagnosis("space", "problem", said, "make room: saves are about to fail")
    if free < SCARCE:
        return Diagnosis("space", "warning", said, "make room before saves fail")
    return Diagnosis("space", "ok", said)


def of_clock(now: float, stamped: float, newest: float) -> Diagnosis:
    """Judge the wall clock by the time of a file written now, and of the newest one there."""
    if now < RELEASED:
        said = f"the clock says {_date(now)}"
        return Diagnosis("clock", "problem", said, "set it: times of records would be wrong")
    if abs(stamped - now) > SKEW:
        said = f"files get a time {stamped - now:+.0f} s off this machine's clock"
        return Diagnosis("clock", "warning", said, "synchronize the clocks (NTP)")
    if newest - now > BACK:
        said = f"the store has a file from {_date(newest)}, in the future"
        return Diagnosis("clock", "warning", said, "see whether the clock was set back")
    return Diagnosis("clock", "ok", "agrees with the file system's")


def of_grace(grace: float | None, shutdown: Shutdown) -> Diagnosis:
    """Judge the time between SIGTERM and SIGKILL by what stopping may take."""
    needed = shutdown.deadline + shutdown.hard_grace
    if grace is None:
        cure = "give it with --grace (Docker's default is 10 s, Kubernetes' 30 s)"
        said = f"stopping may take {needed:g} s; the time until SIGKILL is not known"
        return Diagnosis("grace", "ok", said, cure)
    if grace <= needed:
        cure = (
            f"allow more than {needed:g} s (terminationGracePeriodSeconds, TimeoutStopSec, "
            f"docker stop -t), or connect with Shutdown(deadline=…) below "
            f"{max(grace - shutdown.hard_grace, 0):g}"
        )
        said = f"SIGKILL comes {grace:g} s after SIGTERM, and stopping may take {needed:g} s"
        return Diagnosis("grace", "problem", said, cure)
    return Diagnosis("grace", "ok", f"{grace:g} s, and stopping takes at most {needed:g} s")


def _date(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).date().isoformat()
