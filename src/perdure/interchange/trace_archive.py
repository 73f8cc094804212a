"""The archive of raw traces: what a compaction took is a segment, which never changes again.

A segment counts when the manifest calls it complete. One that is pending was being written when
somebody was killed: its traces still lie among the active ones, or in a later segment. Pure.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from perdure.interchange.traces import TraceLine
from perdure.memory.items import EpisodicItem

__all__ = [
    "ARCHIVE",
    "ARCHIVE_MANIFEST",
    "ArchiveManifest",
    "Planned",
    "Segment",
    "filled",
    "is_segment_name",
    "manifest_of",
    "planned_segments",
]

ARCHIVE: Final = "raw_traces_archive"
ARCHIVE_MANIFEST: Final = "raw_traces_archive_manifest.json"

_BOUNDARY: Final = "native_compaction"
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}\Z")


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says of a segment; the field names are the format."""

    index: int
    file_name: str
    boundary_type: str = _BOUNDARY
    boundary_key: str = ""
    boundary_trace_id: str | None = None
    runtime_kind: str = "PERDURE"
    source_event: str | None = _BOUNDARY
    archived_at: float | str | None = None
    """Seconds since 1970."""
    first_trace_id: str | None = None
    last_trace_id: str | None = None
    first_ts: float | None = None
    last_ts: float | None = None
    record_count: int = 0
    status: Literal["pending", "complete"] = "pending"


class ArchiveManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``raw_traces_archive_manifest.json``."""

    schema_version: int = 1
    next_segment_index: int = 1
    segments: tuple[Segment, ...] = ()

    def complete(self) -> list[Segment]:
        """Return the segments that count, in order."""
        found = [one for one in self.segments if one.status == "complete"]
        return sorted(found, key=lambda one: one.index)


class Planned(msgspec.Struct, frozen=True):
    """A segment that is to be written."""

    upto: int
    """The last record whose traces belong to it."""
    segment: Segment


def planned_segments(items: Iterable[EpisodicItem]) -> list[Planned]:
    """Return a segment for each compaction, oldest first; their last records go up."""
    newest = {item.as_of_seq: item for item in items if item.as_of_seq > 0}
    return [
        Planned(upto, _pending(index, newest[upto])) for index, upto in enumerate(sorted(newest), 1)
    ]


def _pending(index: int, item: EpisodicItem) -> Segment:
    key = hashlib.sha256(item.id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    at = datetime.datetime.fromtimestamp(item.ts, datetime.UTC)
    stamp = f"{at:%Y%m%dT%H%M%S}{at.microsecond // 1000:03d}Z"
    return Segment(
        index=index,
        file_name=f"{index:06d}_{stamp}_{key}.jsonl",
        boundary_key=f"{_BOUNDARY}:{key}",
        archived_at=item.ts,
    )


def filled(segment: Segment, first: TraceLine, last: TraceLine, count: int) -> Segment:
    """Return a segment that is complete."""
    return msgspec.structs.replace(
        segment,
        first_trace_id=first.id,
        last_trace_id=last.id,
        first_ts=first.ts,
        last_ts=last.ts,
        record_count=count,
        status="complete",
    )


def manifest_of(segments: Sequence[Segment]) -> bytes:
    """Return the manifest of some segments, as it is written."""
    newest = max((one.index for one in segments), default=0)
    manifest = ArchiveManifest(next_segment_index=newest + 1, segments=tuple(segments))
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def is_segment_name(name: str) -> bool:
    """Say whether a name that a manifest gives stays within the archive.

    >>> is_segment_name("000001_a1b2c3d4.jsonl"), is_segment_name("../session.json")
    (True, False)
    """
    return _NAME.match(name) is not None
