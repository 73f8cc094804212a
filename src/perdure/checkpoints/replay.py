"""Replay: events fed to a dry run, which checks them and says what was decided and used.

Nothing is done again. The dry run takes each event at its place, looks whether the logical clock
continues without a gap, and keeps count; what it keeps does not grow with the number of events.
Where rows of a report go, the caller decides. Pure.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final, Literal, final

import msgspec

from perdure._lib.logs import visible
from perdure.errors import FormatError
from perdure.records.checkpoints import KernelEvent
from perdure.records.json import decode

CUSTOM: Final = "custom"
"""Kind of the events by which an agent records a decision."""

CAPABILITY_KINDS: Final = {
    "capability_requested": "requested",
    "capability_granted": "granted",
    "capability_denied": "denied",
    "capability_used": "used",
    "capability_failed": "failed",
}
"""The kinds of events about a capability, whose name is the event's label, and what they count."""

MOST: Final = 1000
"""Problems, and names, that a report holds; of more it has the number."""
LONGEST: Final = 1000
"""Characters that one of them may have there."""


def shortened(text: str, most: int = LONGEST) -> str:
    """Return a text, truncated to a readable length.

    >>> shortened("a long one", 7)
    'a long…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


class TimelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, or the use of a capability."""

    what: str
    """"decision", "requested", "granted", "denied", "used", "failed"."""
    place: int
    timestamp: int
    token_id: int
    name: str
    """The decision's label, or the capability."""
    detail: dict[str, Any] = {}
    at: float | None = None
    """Time of the newest message before it, in seconds since 1970, if that is known."""
    arguments: Any = None
    """Arguments of a tool that was requested."""
    result: Any = None
    """Result of a tool that was used."""
    error: str | None = None
    """Reason why there is no result."""


class CapabilityUse(msgspec.Struct):
    """Counts of the requests for a capability, and of what came of them."""

    requested: int = 0
    granted: int = 0
    denied: int = 0
    used: int = 0
    failed: int = 0


Verdict = Literal["compared", "not compared", "wrong"]
"""``compared``: all was, and fits. ``not compared``: what was fits, and something could not be.
``wrong``: something is missing, moved or changed."""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay."""

    source: str
    """The session, or the files."""
    since: int | None = None
    """The checkpoint after which it began; None for the beginning."""
    events: int = 0
    first_timestamp: int | None = None
    last_timestamp: int | None = None
    turns: int = 0
    """Runs of events that one turn caused."""
    by_kind: dict[str, int] = {}
    decisions: int = 0
    capabilities: dict[str, CapabilityUse] = {}
    snapshots: int = 0
    """Checkpoints whose content was compared with what their event, or the log, says, and fits."""
    unverified: int = 0
    """Checkpoints that cannot be compared: they were pruned, or no event has their content."""
    unproven: tuple[str, ...] = ()
    """Other things that cannot be compared, in sentences: files may lack what proves the events."""
    problems: tuple[str, ...] = ()
    """The first things that do not fit, each with its place."""
    problem_count: int = 0

    @property
    def ok(self) -> bool:
        """True if nothing is wrong in what was compared; `verdict` says whether all of it was."""
        return not self.problem_count

    @property
    def verdict(self) -> Verdict:
        """Result in one word."""
        if self.problem_count:
            return "wrong"
        return "not compared" if self.unverified or self.unproven else "compared"


@final
class Replay:
    """A dry run.

    Args:
        unit: What a place is called: "record" or "line".
        gapless: Whether times go up by one each; otherwise they only must not go back.
        clock: The time before the first item; None to begin with the first one's.

    """

    def __init__(self, unit: str, *, gapless: bool, clock: int | None = None) -> None:
        self._unit = unit
        self._gapless = gapless
        self._clock = clock
        self._first: int | None = None
        self._token: int | None = None
        self._turns = 0
        self._by_kind: Counter[str] = Counter()
        self._decisions = 0
        self._capabilities: dict[str, CapabilityUse] = {}
        self._problems: list[str] = []
        self._problem_count = 0
        self.snapshots: int = 0
        self.unverified: int = 0
        self.unproven: list[str] = []

    def problem(self, what: str, place: int | None = None) -> None:
        """Note something that does not fit."""
        self._problem_count += 1
        if len(self._problems) < MOST:
            where = "" if place is None else f"{self._unit} {place}: "
            self._problems.append(shortened(f"{where}{what}"))

    def feed(
        self, place: int, timestamp: int, event: KernelEvent | None = None
    ) -> TimelineRow | None:
        """Take the next item; return what a report should list of it.

        Args:
            place: The record, or the line of a file.
            timestamp: When, on the logical clock.
            event: None for a checkpoint or a pruning of checkpoints.

        """
        self._tell_time(place, timestamp)
        if event is None:
            return None
        self._first = timestamp if self._first is None else self._first
        self._count(self._by_kind, event.kind)
        if event.token_id != self._token:
            self._token = event.token_id
            self._turns += event.token_id != 0
        return self._row(place, event)

    def _tell_time(self, place: int, now: int) -> None:
        before = self._clock
        if before is not None:
            if now < before or (self._gapless and now == before):
                what = f"time {now} comes after {before}: something was put in, doubled or moved"
                self.problem(what, place)
            elif self._gapless and now > before + 1:
                lost = f"{before + 1}" if now == before + 2 else f"{before + 1} to {now - 1}"
                self.problem(f"nothing is there for time {lost}: it is missing", place)
        self._clock = now if before is None else max(now, before)

    def _row(self, place: int, event: KernelEvent) -> TimelineRow | None:
        what, name = CAPABILITY_KINDS.get(event.kind), event.label
        if event.kind == CUSTOM:
            self._decisions += 1
            what = "decision"
        elif what is None:
            name = event.detail.get("capability")  # other kernels give it separately
            if not isinstance(name, str):
                return None
            what = "used"
        if what != "decision":
            self._use(name or "", what)
        return TimelineRow(
            what=what,
            place=place,
            timestamp=event.timestamp,
            token_id=event.token_id,
            name=name or "",
            detail=event.detail,
        )

    def _use(self, name: str, what: str) -> None:
        uses, name = self._capabilities, shortened(name)
        # Names come from a file, which may have any number of them.
        if name not in uses and len(uses) >= MOST:
            name = "(others)"
        use = uses.setdefault(name, CapabilityUse())
        setattr(use, what, getattr(use, what) + 1)

    def _count(self, counter: Counter[str], name: str) -> None:
        name = shortened(name)
        counter[name if name in counter or len(counter) < MOST else "(others)"] += 1

    def report(self, source: str, *, since: int | None = None) -> ReplayReport:
        """Return what was seen."""
        return ReplayReport(
            source=source,
            since=since,
            events=self._by_kind.total(),
            first_timestamp=self._first,
            last_timestamp=self._clock if self._first is not None else None,
            turns=self._turns,
            by_kind=dict(sorted(self._by_kind.items())),
            decisions=self._decisions,
            capabilities=dict(sorted(self._capabilities.items())),
            snapshots=self.snapshots,
            unverified=self.unverified,
            unproven=tuple(self.unproven),
            problems=tuple(self._problems),
            problem_count=self._problem_count,
        )


# Report of a replay as one HTML file, without script or external resources


DETAIL = 2000
"""Characters of a detail that a page shows."""

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --quiet: #59636e; --ok: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) {
  :root { --quiet: #9198a1; --ok: #3fb950; --bad: #ff7b72; }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
li { overflow-wrap: anywhere; }
.ok { color: var(--ok); } .bad { color: var(--bad); }
.verdict { font-weight: 600; }
.facts { display: flex; flex-wrap: wrap; gap: .5rem 2rem; padding: 0; list-style: none; }
.facts b { font-size: 1.2rem; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
td { min-width: 6.5rem; }
th { color: var(--quiet); font-weight: 600; }
th, td.n { overflow-wrap: normal; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; width: 1%;
  min-width: 0; }
.wide td.detail { min-width: 18rem; width: 55%; }
code { font-size: .85rem; overflow-wrap: anywhere; }
.denied td:nth-child(3), .failed td:nth-child(3) { color: var(--bad); font-weight: 600; }
@media (max-width: 44rem) {
  th, td { font-size: .8rem; padding-right: .4rem; }
  th { font-size: .7rem; }
  td { min-width: 5rem; }
  code { font-size: .75rem; }
  .rows tr { display: flex; flex-wrap: wrap; gap: 0 .6rem; padding: .4rem 0;
    border-bottom: 1px solid var(--line); }
  .rows tr:first-child { display: none; }
  .rows td { border: 0; padding: 0; min-width: 0; width: auto; }
  .rows td.n { order: 1; color: var(--quiet); }
  .rows td.n:nth-child(1)::before { content: "time "; }
  .rows td.n:nth-child(2)::before { content: "turn "; }
  .rows td.detail { order: 2; min-width: 0; width: 100%; }
}
"""


def page(report: ReplayReport, rows: Sequence[TimelineRow], left_out: int = 0) -> str:
    """Return the page. *rows* are those to be shown; *left_out* says how many there are more."""
    parts = [
        _summary(report),
        _problems(report),
        _capabilities(report),
        _happened(rows, left_out),
        _kinds(report),
    ]
    title = _text(f"Replay of {report.source}")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n"
        + "\n".join(filter(None, parts))
        + "\n</html>\n"
    )


def _summary(report: ReplayReport) -> str:
    verdict = {
        "compared": '<p class="ok verdict">Compared: nothing is missing, moved or changed.</p>',
        "not compared": '<p class="verdict">Not compared as a whole: what was compared fits.</p>',
        "wrong": f'<p class="bad verdict">Wrong: {report.problem_count:,} problems, see below.</p>',
    }[report.verdict] + "".join(f"<p>Not compared: {_text(what)}</p>" for what in report.unproven)
    begin = "" if report.since is None else f"<p>From checkpoint {report.since} on.</p>"
    facts = {
        "events": report.events,
        "turns": report.turns,
        "decisions": report.decisions,
        "checkpoints compared": report.snapshots,
        "checkpoints not compared": report.unverified,
    }
    items = "".join(f"<li><b>{n:,}</b>{name}</li>" for name, n in facts.items())
    return f'{verdict}{begin}<ul class="facts">{items}</ul>'


def _problems(report: ReplayReport) -> str:
    if report.ok:
        return ""
    items = "".join(f"<li>{_text(problem)}</li>" for problem in report.problems)
    more = report.problem_count - len(report.problems)
    return f"<h2>Problems</h2><ul>{items}</ul>" + (f"<p>and {more:,} more</p>" if more else "")


def _capabilities(report: ReplayReport) -> str:
    if not report.capabilities:
        return ""
    rows = [
        (name, use.requested, use.granted, use.denied, use.used, use.failed)
        for name, use in report.capabilities.items()
    ]
    head = ("capability", "requested", "granted", "denied", "used", "failed")
    return f"<h2>Capabilities</h2>{_table(head, rows)}"


def _happened(rows: Sequence[TimelineRow], left_out: int) -> str:
    if not rows:
        return ""
    cells = [
        (row.timestamp, row.token_id, row.what, row.name, row.detail, _clock(row.at))
        for row in map(shown, rows)
    ]
    kinds = [row.what for row in rows]
    table = _table(("time", "turn", "what", "name", "detail", "clock (UTC)"), cells, kinds)
    more = f"<p>and {left_out:,} more: the report in JSON has them all</p>" if left_out else ""
    return f"<h2>Decisions, and what was used</h2>{table}{more}"


def shown(row: TimelineRow) -> TimelineRow:
    """Return what a page shows of a row: the beginning of a very long one."""
    call = {"arguments": row.arguments, "result": row.result, "error": row.error}
    detail = {**row.detail, **{name: one for name, one in call.items() if one is not None}}
    text = msgspec.json.encode(detail).decode()
    if len(text) > DETAIL:
        detail = {"shortened": shortened(text, DETAIL)}
    return msgspec.structs.replace(
        row, name=shortened(row.name), detail=detail, arguments=None, result=None, error=None
    )


def _clock(at: float | None) -> str:
    if at is None:
        return ""
    try:
        when = datetime.datetime.fromtimestamp(at, datetime.UTC)
    except (OverflowError, ValueError, OSError):  # as it was imported
        return str(at)
    return f"{when:%Y-%m-%d %H:%M:%S}"


def _kinds(report: ReplayReport) -> str:
    if not report.by_kind:
        return ""
    return f"<h2>Events by kind</h2>{_table(('kind', 'events'), report.by_kind.items())}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], kinds: Sequence[str] = ()) -> str:
    """Return a table; one whose rows are of several kinds has them below one another on a phone."""
    rows = list(rows)
    numbers = [isinstance(value, int) for value in rows[0]]
    top = "".join(
        f'<th class="n">{name}</th>' if is_number else f"<th>{name}</th>"
        for name, is_number in zip(head, numbers, strict=True)
    )
    begins = [f'<tr class="{_text(kind)}">' for kind in kinds] or ["<tr>"] * len(rows)
    body = "".join(
        f"{begin}{''.join(map(_cell, row))}</tr>" for begin, row in zip(begins, rows, strict=True)
    )
    shape = "wide rows" if kinds else "wide"
    return f'<div class="{shape}"><table><tr>{top}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f'<td class="n">{value:,}</td>'
    if isinstance(value, str):
        return f"<td>{_text(value)}</td>"
    text = msgspec.json.encode(value).decode() if value else ""
    return f'<td class="detail"><code>{_text(text)}</code></td>'


def _text(text: str) -> str:
    """Return text as markup that shows it, with what would hide or turn some of it made visible."""
    return escape(visible(text))


def event_of(payload: bytes) -> KernelEvent | None:
    """Return a record's event; None for one that an application made up before there were any."""
    try:
        return decode(payload, KernelEvent)
    except FormatError:
        return None
