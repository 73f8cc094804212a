"""The report of a replay as a page for people: one file, no script, nothing loaded. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import msgspec

from perdure._lib.logs import visible
from perdure.checkpoints.replay import ReplayReport, TimelineRow, shortened

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
    verdict = (
        '<p class="ok verdict">Everything fits: nothing is missing, moved or changed.</p>'
        if report.ok
        else f'<p class="bad verdict">What does not fit: {report.problem_count:,}, see below.</p>'
    )
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
    """Return what a page shows of a row: the beginning of whatever is very long."""
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
    except (OverflowError, ValueError, OSError):  # as somebody imported it
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
