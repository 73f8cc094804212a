"""The report of a replay as a page for people: one file, no script, nothing loaded. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import msgspec

from perdure.checkpoints.replay import ReplayReport, Row

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --ok: #1a7f37; --bad: #cf222e; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.ok { color: var(--ok); } .bad { color: var(--bad); }
.facts { display: flex; flex-wrap: wrap; gap: .5rem 2rem; padding: 0; list-style: none; }
.facts b { font-size: 1.2rem; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: .85rem; overflow-wrap: anywhere; }
"""


def page(report: ReplayReport, rows: Sequence[Row], left_out: int = 0) -> str:
    """Return the page. *rows* are those to be shown; *left_out* says how many there are more."""
    parts = [
        _summary(report),
        _problems(report),
        _capabilities(report),
        _happened(rows, left_out),
        _kinds(report),
    ]
    title = escape(f"Replay of {report.source}")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n"
        + "\n".join(filter(None, parts))
        + "\n</html>\n"
    )


def _summary(report: ReplayReport) -> str:
    verdict = (
        '<p class="ok">Everything fits: nothing is missing, moved or changed.</p>'
        if report.ok
        else f'<p class="bad">{report.problem_count} problems.</p>'
    )
    begin = "" if report.since is None else f"<p>From checkpoint {report.since} on.</p>"
    facts = {
        "events": report.events,
        "turns": report.turns,
        "decisions": report.decisions,
        "checkpoints compared": report.snapshots,
        "checkpoints pruned": report.unverified,
    }
    items = "".join(f"<li><b>{n:,}</b>{name}</li>" for name, n in facts.items())
    return f'{verdict}{begin}<ul class="facts">{items}</ul>'


def _problems(report: ReplayReport) -> str:
    if report.ok:
        return ""
    items = "".join(f"<li>{escape(one)}</li>" for one in report.problems)
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


def _happened(rows: Sequence[Row], left_out: int) -> str:
    if not rows:
        return ""
    cells = [(one.timestamp, one.token_id, one.what, one.name, one.detail) for one in rows]
    table = _table(("time", "turn", "what", "name", "detail"), cells)
    more = f"<p>and {left_out:,} more: the report in JSON has them all</p>" if left_out else ""
    return f"<h2>Decisions, and what was used</h2>{table}{more}"


def _kinds(report: ReplayReport) -> str:
    if not report.by_kind:
        return ""
    return f"<h2>Events by kind</h2>{_table(('kind', 'events'), report.by_kind.items())}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    top = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f'<td class="n">{value:,}</td>'
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    text = msgspec.json.encode(value).decode() if value else ""
    return f"<td><code>{escape(text)}</code></td>"
