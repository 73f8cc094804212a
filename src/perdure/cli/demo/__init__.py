"""``perdure demo``: agents in conversation, a kill, a restore, and a count of what was lost.

A server process of its own holds the sessions; clients talk to it over loopback TCP and get
an acknowledgement only for what is durable. The server is killed, a second one restores
the sessions and is stopped by SIGTERM; after each end the parent reads the logs and compares
them with the acknowledgements. It uses neither a network nor a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators
from rich.live import Live
from rich.text import Text

import perdure
from perdure._lib.ids import random_id
from perdure.cli.demo.run import STORE, DemoPlan, DemoRun, Report
from perdure.cli.output import Answer, print_table, say, stderr
from perdure.errors import ConfigError
from perdure.stores.memory import MemoryStore

__all__ = ["demo"]

FOLDER = "perdure-demo"
MANY = 1000

Some = Annotated[int, Parameter(validator=validators.Number(gte=1))]


async def demo(
    *,
    dir: Path | None = None,
    store: str | None = None,
    agents: Some = 50,
    before: Some = 14,
    after: Some = 6,
    answer: Answer = Answer(),  # noqa: B008  # frozen
) -> int:
    """See it work: agents talk, their server is killed and restored, nothing is lost.

    Exits with 1 if an acknowledged turn is missing afterwards. The sessions are kept for you to
    inspect: in the folder, or in the store under a tenant of their own.

    Args:
        dir: A folder for it, new or empty. Default: ./perdure-demo, or the next free number.
        store: A path or a URL, to run it on that store. Default: files in the folder.
        agents: How many agents talk at once.
        before: Turns of each agent, on average, before the kill.
        after: Turns of each agent, on average, between the restore and SIGTERM.

    """
    shown = None if store is None else _shown(store)
    folder = _fresh() if dir is None else _empty(dir)
    plan = DemoPlan(
        folder=folder,
        store=store or str(folder / STORE),
        tenant=f"perdure-demo-{random_id(8)}" if store else "",
        agents=agents,
        before=before,
        after=after,
    )
    screen = Screen()
    screen.course = DemoRun(plan, screen.tell)
    with Live(screen, console=stderr(), transient=answer.json, refresh_per_second=8):
        report = await screen.course.run()
    report.store = shown or plan.store
    answer.show(report, lambda: _print(report))
    return 0 if report.ok else 1


def _shown(url: str) -> str:
    """Return a URL as it may be shown; refuse a store that ends with the process that is killed."""
    store = perdure.store_for(url)
    if isinstance(store, MemoryStore):
        raise ConfigError(
            "the demo kills its server, and what is in memory goes with it: name another store",
            option="store",
        )
    return store.location if "@" in url or "?" in url else url


def _fresh() -> Path:
    """Make a folder here, with the next free number if need be: an earlier demo's stays."""
    wanted = Path.cwd() / FOLDER
    for number in range(1, MANY):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{wanted} and {MANY} more are taken: remove some, or name one with --dir")


def _empty(folder: Path) -> Path:
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "not empty" if folder.is_dir() else "a file"
        raise ConfigError(
            f"{folder} is {what}: name a new folder with --dir, or remove it", folder=str(folder)
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


class Screen:
    """The live display of a run: the steps so far, and the counts."""

    def __init__(self) -> None:
        self.course: DemoRun | None = None
        self._steps: list[str] = []

    def tell(self, step: str) -> None:
        """Show that a step has begun."""
        self._steps.append(step)

    def __rich__(self) -> Text:
        lines = [f"· {step}" for step in self._steps]
        if self.course is not None:
            crowd = self.course.crowd
            lines.append(
                f"  {len(crowd.agents)} agents, {len(crowd.acks)} turns acknowledged (until "
                f"{self.course.target}), {len(crowd.talking)} under way, {crowd.pieces} pieces "
                "streamed"
            )
        return Text("\n".join(lines))


def _print(report: Report) -> None:
    rows = [
        ("turns in the logs", str(report.turns)),
        ("acknowledged", f"{report.acknowledged} ({report.acknowledged_before_kill} before)"),
        ("cut off by the kill", f"{report.cut_off_by_kill} (never acknowledged)"),
        ("lost", str(report.lost)),
        ("sessions restored", f"{report.restored} of {report.agents}"),
        ("restore time", f"{report.restore_ms_p50} ms p50, {report.restore_ms_max} ms max"),
        ("bytes written per turn byte", _written(report)),
        ("after SIGTERM", _shutdown(report)),
        ("took", f"{report.seconds} s"),
    ]
    say("")
    print_table(("what", "figure"), rows)
    for lost_turn in report.lost_turns:
        say(f"LOST: {lost_turn.agent}, turn {lost_turn.turn}: {lost_turn.why}")
    where = f"--store {report.store}" + (f" --tenant {report.tenant}" if report.tenant else "")
    say(f"\nThe sessions are in {report.store}. Look at them:")
    say(f"  perdure ls {where}")
    say(f"  perdure show agent-01 {where}")


def _written(report: Report) -> str:
    turns = max(report.turn_bytes, 1)
    log, documents = report.written_log_bytes / turns, report.written_document_bytes / turns
    return f"{report.write_amplification:.2f} (log {log:.2f}, documents {documents:.2f})"


def _shutdown(report: Report) -> str:
    clean = "nothing unsaved" if report.shutdown.get("clean") else "NOT CLEAN"
    duration = report.shutdown.get("duration")
    took = f" after {duration:.2f} s" if isinstance(duration, float) else ""
    return f"{clean}{took}, exit status {report.term_status}"
