"""A page for people, of figures that ``peers`` has written: tables in Markdown, and plots.

``python -m benchmarks peers --json F && python -m benchmarks report F > docs/performance.md``,
with ``--adapters`` and a file of ``python -m benchmarks adapters --json`` for the adapters' part.
Nothing is measured here, so the page says of each figure what the file says, and on what machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Options", "adapters_part", "page"]

LABELS = {
    "file": "perdure, files",
    "sqlite": "perdure, SQLite",
    "openai": "OpenAI Agents SDK, `SQLiteSession`",
    "langgraph": "LangGraph, `AsyncSqliteSaver`",
    "adk": "Google ADK, `DatabaseSessionService` on SQLite",
    "jsonl": "*limit:* a JSON line and a sync a turn",
    "limit": "*limit:* SQLite, what has arrived in one commit",
}
COLUMNS = {
    "turns_per_second": ("turns a second", "{:,.0f}"),
    "p99_ms": ("99 % of turns within", "{:,.1f} ms"),
    "cpu_us": ("CPU of a turn", "{:,.0f} µs"),
    "bytes": ("written a turn", "{:,.0f} B"),
    "lag_p99_ms": ("the loop's lag, 99 %", "{:,.1f} ms"),
    "peak_mb": ("peak memory", "{:,.0f} MB"),
    "restore_ms": ("open all, read 50 of one", "{:,.0f} ms"),
}
OURS = ("file", "sqlite")
LIMITS = ("jsonl", "limit")

WIDTH, LEFT, RIGHT, TOP, BAR = 820, 360, 90, 56, 34
STYLE = """
  .page { fill: #ffffff } text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 16px; font-weight: 600 } .label { text-anchor: end }
  .ours { fill: #0969da } .theirs { fill: #8c959f } .limit { fill: none; stroke: #8c959f }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 }
    .ours { fill: #4493f8 } .theirs { fill: #656c76 } .limit { stroke: #9198a1 }
  }
"""


class Options(NamedTuple):
    """The file with the figures, and the folder for the plots."""

    file: Path
    images: Path = Path("docs/images")
    adapters: Path | None = None


class _Part(NamedTuple):
    """The figures of one number of sessions."""

    prefix: str
    sessions: int
    rows: dict[str, dict[str, float]]
    """By contender and figure, in the order of the tables."""


def page(options: Options) -> str:
    """Write the plots, and return the page.

    Raises:
        SystemExit: The file has no figures of ``peers``.

    """
    document = json.loads(options.file.read_text("utf-8"))
    parts = _parts(document["figures"])
    if not parts:
        raise SystemExit(f"{options.file}: no figures of `python -m benchmarks peers` in it")
    options.images.mkdir(parents=True, exist_ok=True)
    lines = [HEAD.format(**_facts(document))]
    for part in parts:
        name = f"performance-{part.sessions}.svg"
        (options.images / name).write_text(_plot(part), encoding="utf-8")
        lines += [
            f"## {_title(part)}",
            "",
            f"![Turns a second, {_title(part)}](images/{name})",
            "",
            *_table(part, document["details"]["rounds"][f"peers.{part.prefix}"]),
            "",
            *_failures(document, part),
        ]
    lines += [*_ratios(document), "", SHORT.rstrip()]
    if options.adapters is not None:
        lines += adapters_part(json.loads(options.adapters.read_text("utf-8")))
    return "\n".join(lines) + "\n"


HEAD = """# Performance

Every contender stores the same turns: four messages, about 7 KB of JSON. A turn counts when the
contender says that it is stored; each is used as its own documentation shows, with its defaults.
What the disk and Python allow without a product is next to them as two limits.
[benchmarks/peers](../benchmarks/peers/contenders.py) has the code of each.

    python -m benchmarks peers --json peers.json
    python -m benchmarks adapters --json adapters.json
    python -m benchmarks report peers.json --adapters adapters.json > docs/performance.md

The figures below are medians of {rounds} rounds of {turns:,} turns, of all sessions together (an
eighth of that for the slow ones), with the range of turns a second. Contenders take turns within a
round, each in a process of its own. They are of {platform}, {cpus} CPUs, Python {python}, perdure
{perdure}. Absolute figures say as much about the machine as about the program: compare those of one
table. {load}
"""


SHORT = """## Short of a target, and why

- *One session.* The event loop has more to do for a turn of perdure than for one of OpenAI's
  session, which encodes in its thread what `add_items` is given. perdure checks, encodes and
  numbers each message where it is appended, so that a mistake raises there and a save takes what
  is ready; then a thread writes it. [What was
  tried](decisions/0065-a-batch-waits-while-the-store-is-fast.md).
- *Files.* An append is five system calls in that thread, four of which keep another process out.
- *The loop's lag.* Its longest step is the one in which 200 tasks begin a turn at once.
- *Open and load* (`python -m benchmarks restore`). An open took 4.7 to 6.3 times the CPU of
  OpenAI's `get_items(50)` in eight runs, with a target of 3.5, and a load 1.5 to 2.1 times, with
  one of 1.5: one takes a lease and verifies a snapshot, the other verifies a page of the log.
  [Where the time goes](decisions/0121-a-load-reads-one-page.md).
- *Restart* (`python -m benchmarks restart`). Opening and closing 10,000 sessions took 0.68 to 0.79
  of the CPU of an earlier revision (ce1395d) on SQLite, with a target of 0.6. The open took 0.66 of
  it; a close took more than before, because each of its stations has a deadline of its own.
- *Memory of an idle session* (`python -m benchmarks live`). 3.4 KB, with a target of 3: its
  session.json in decoded form and what autosave tracks take half a kilobyte each, its context,
  labels and the report of its restore the rest. A full garbage collection of 10,000 such sessions
  took 0.27 of the CPU of that revision, and 0.42 after a turn of each, with a target of 0.4.
"""


def _facts(document: dict[str, Any]) -> dict[str, Any]:
    environment, details = document["environment"], document["details"]
    load = environment.get("load")
    return {
        "rounds": max(map(len, details["rounds"].values())),
        "turns": details["turns"],
        "platform": " ".join(environment["platform"].split("-")[:2]),
        "cpus": environment["cpus"],
        "python": environment["python"],
        "perdure": environment["packages"]["perdure"],
        "load": _load(load[1], environment["cpus"]) if load else "",
    }


def _load(load: float, cpus: int) -> str:
    said = f"The machine's load was {load:.1f} in the last five minutes."
    if load <= cpus:
        return said
    return f"{said}\n\n**It was busy with other work: repeat this on a quiet one to rely on it.**"


def _parts(figures: dict[str, float]) -> list[_Part]:
    parts: dict[str, _Part] = {}
    for name, value in figures.items():
        family, _, rest = name.partition(".")
        prefix, _, rest = rest.partition(".")
        contender, _, figure = rest.partition(".")
        if family != "peers" or contender not in LABELS or figure not in COLUMNS:
            continue
        sessions = 1 if prefix == "one" else int(prefix.removeprefix("many"))
        part = parts.setdefault(prefix, _Part(prefix, sessions, {}))
        part.rows.setdefault(contender, {})[figure] = value
    return sorted(parts.values(), key=lambda part: part.sessions)


def _title(part: _Part) -> str:
    return "One session" if part.sessions == 1 else f"{part.sessions:,} sessions at once"


def _table(part: _Part, rounds: list[dict[str, dict[str, float]]]) -> list[str]:
    lines = [
        "| | " + " | ".join(title for title, _ in COLUMNS.values()) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for contender, label in LABELS.items():
        figures = part.rows.get(contender)
        if figures is not None:
            cells = [form.format(figures[name]) for name, (_, form) in COLUMNS.items()]
            rates = [one[contender]["turns_per_second"] for one in rounds if contender in one]
            cells[0] += f" ({min(rates):,.0f} to {max(rates):,.0f})"
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def _failures(document: dict[str, Any], part: _Part) -> list[str]:
    """Say which product failed, in how many rounds, and with what."""
    prefix = f"peers.{part.prefix}"
    rounds = len(document["details"]["rounds"][prefix])
    failed: dict[str, list[str]] = document["details"].get("failed", {}).get(prefix, {})
    lines = [
        f"{LABELS[name]} failed in {len(errors)} of {rounds} rounds: `{errors[0]}`"
        for name, errors in failed.items()
    ]
    return [text for line in lines for text in (line, "")]


def _ratios(document: dict[str, Any]) -> list[str]:
    """Return the ratios that have a target, each with both."""
    figures, targets = document["figures"], document["targets"]
    names = [name for name in targets if name.startswith("peers.") and name in figures]
    if not names:
        return []
    return [
        "## Ratios and targets",
        "",
        "Medians of the ratios within a round. `python -m benchmarks peers --check` fails where",
        "a target is missed.",
        "",
        "| figure | ratio | target |",
        "|---|---:|---:|",
        *(f"| `{name}` | {figures[name]:.2f} | {targets[name]:g} |" for name in names),
    ]


ADAPTERS = {
    "adapters.langgraph.bytes": "LangGraph, bytes written for a thread, over `AsyncSqliteSaver`",
    "adapters.langgraph.bytes_delta": "the same, over it with a `DeltaChannel`",
    "adapters.langgraph.time": "LangGraph, time of a thread, over `AsyncSqliteSaver`",
    "adapters.openai.turns": "OpenAI Agents, turns a second of one session, over `SQLiteSession`",
    "adapters.openai.turns_many": "the same, of 200 sessions at once",
    "adapters.adk.turns": "Google ADK, turns a second, over `DatabaseSessionService` on SQLite",
    "adapters.pydantic_ai.overhead": "Pydantic AI, time of a turn, over one of perdure's own",
    "adapters.agent_framework.cpu": "Agent Framework, CPU of a run's history: read all of it, add "
    "a question and an answer, over `FileHistoryProvider`, which does not sync",
    "adapters.agent_framework.checkpoint_cpu": "the same, CPU of a workflow's checkpoint, over "
    "`FileCheckpointStorage`",
    "adapters.claude.cpu": "Claude Agent SDK, CPU of a turn, over a synced line of JSON an entry",
    "adapters.claude.cpu_over_memory": "the same, over `InMemorySessionStore`",
}


def adapters_part(document: dict[str, Any]) -> list[str]:
    """Return what the adapters cost, over the SDKs' own stores."""
    figures, targets = document["figures"], document["targets"]
    ranges = document.get("details", {}).get("cpu", {}).get("ranges", {})
    return [
        "",
        "## With another SDK",
        "",
        "The adapters, over the store that comes with the SDK, in one run; models answer at once.",
        "CPU is that of all threads, the median of 9 rounds with the lowest and the highest.",
        "[benchmarks/adapters](../benchmarks/adapters.py) has the code.",
        "",
        "| | ratio | target |",
        "|---|---:|---:|",
        *(
            f"| {label} | {_ratio(figures[name], ranges.get(name))} | {_bound(name, targets)} |"
            for name, label in ADAPTERS.items()
            if name in figures
        ),
    ]


def _ratio(median: float, ends: Sequence[float] | None) -> str:
    return f"{median:.3g}" + (f" ({ends[0]:.3g} to {ends[1]:.3g})" if ends else "")


def _bound(name: str, targets: Mapping[str, float]) -> str:
    if name not in targets:
        return ""
    return f"{targets[name]:g} at {'least' if '.turns' in name else 'most'}"


def _plot(part: _Part) -> str:
    """Return turns a second as bars: ours, theirs, and the limits as outlines."""
    rows = [
        (label.replace("`", "").replace("*", ""), name, part.rows[name]["turns_per_second"])
        for name, label in LABELS.items()
        if name in part.rows
    ]
    most = max(value for _, _, value in rows)
    height = TOP + BAR * len(rows) + 12
    title = f"Turns a second, {_title(part).lower()}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="20" y="30">{escape(title)}</text>',
    ]
    for at, (label, name, value) in enumerate(rows):
        y = TOP + BAR * at
        width = max(1.0, (WIDTH - LEFT - RIGHT) * value / most)
        kind = "ours" if name in OURS else "limit" if name in LIMITS else "theirs"
        place = f'x="{LEFT}" y="{y + 2}" width="{width:.1f}" height="{BAR - 12}"'
        parts += [
            f'<text class="label" x="{LEFT - 10}" y="{y + 17}">{escape(label)}</text>',
            f'<rect class="{kind}" {place}/>',
            f'<text x="{LEFT + width + 8:.1f}" y="{y + 17}">{value:,.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
