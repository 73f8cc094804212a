"""``perdure tune``: which autosave setting fits this store and these sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
from cyclopts import Parameter

from perdure.cli.access import opened
from perdure.cli.output import StoreOption, print_json, print_table, say, size, stderr
from perdure.errors import ConfigError, SessionError
from perdure.tuning import (
    Advice,
    Option,
    Requirements,
    StoreMeasurement,
    Workload,
    advise,
    chart,
    measure,
)
from perdure.tuning.measure import made_up, observed

FEW = 20
"""The minimum number of changes in a store to choose a setting by."""


async def tune(
    *,
    sessions: int = 100,
    max_loss: float | None = None,
    shutdown: float = 20.0,
    price: float = 0.0,
    budget: float | None = None,
    imagine: bool = False,
    seconds: float = 4.0,
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
            least often within it. Default: no limit, and the safest setting.
        shutdown: Seconds in which everything must be saved when the process is stopped.
        price: What a million saves cost, in any currency: for S3 about 5 dollars.
        budget: What the saves may cost in a month, in the same currency. Default: no limit.
        imagine: Use a made-up workload instead of the store's.
        seconds: How long to measure, roughly.
        plot: Write a chart of the settings to this file, as SVG.

    """
    for name, value, least in (
        ("--sessions", sessions, 1),
        ("--max-loss", max_loss, 0),
        ("--shutdown", shutdown, 0),
        ("--price", price, 0),
        ("--budget", budget, 0),
        ("--seconds", seconds, 0),
    ):
        if value is not None and not least <= value < float("inf"):
            raise ConfigError(f"invalid {name} {value:g}: give a number from {least:g} on")
    needs = Requirements(
        sessions=sessions,
        max_loss=max_loss,
        shutdown=shutdown,
        price=price,
        budget=budget,
    )
    async with opened(where.store, write=True) as store:
        workload = await observed(store)
        if imagine:
            workload = made_up()
        elif workload.changes < FEW:
            raise SessionError(_too_few(store.location, workload), path=store.location)
        with stderr().status("measuring the store"):
            measured = await measure(store, size=workload.size, seconds=seconds)
        location = store.location
    advice = advise(workload, measured, needs)
    if plot is not None:
        await anyio.Path(plot).write_text(chart(advice, needs.sessions), "utf-8")
    if where.json:
        print_json(_facts(location, workload, measured, advice))
    else:
        _print(location, workload, measured, advice, needs)
    return 0 if advice.best else 1


def _too_few(location: str, workload: Workload) -> str:
    return (
        f"there is nothing to measure in {location}: its sessions have changed {workload.changes} "
        f"times, and it takes {FEW} to tell how they do: let agents work in it, or add --imagine "
        "for made-up ones"
    )


def _facts(
    location: str, workload: Workload, measured: StoreMeasurement, advice: Advice
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
        "settings": [_option(level) for level in advice.options],
        "recommended": _option(advice.best) if advice.best else None,
        "idle": advice.idle,
        "warnings": advice.warnings,
    }


def _option(option: Option) -> dict[str, Any]:
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
    workload: Workload,
    measured: StoreMeasurement,
    advice: Advice,
    needs: Requirements,
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
    say("busy: how much of what the store can take; unsaved: the share of sessions that have")
    say("something unsaved at a moment; lost: the records of a session that a crash costs on")
    say("average; worst: for how many seconds a record was unsaved.")
    for warning in advice.warnings:
        say(f"note: {warning}")
    if advice.best is None:
        return
    setting = advice.best.cost.autosave
    quiet, longest = f"{setting.debounce:g}", f"{setting.max_delay:g}"
    variables = f"PERDURE_AUTOSAVE_DEBOUNCE={quiet} PERDURE_AUTOSAVE_MAX_DELAY={longest}"
    say("")
    say(f"in Python             Autosave(debounce={quiet}, max_delay={longest})")
    say(f"in the environment    {variables}")
    say(f"in persistence.yaml   autosave: {{debounce: {quiet}, max_delay: {longest}}}")


def _row(option: Option, advice: Advice, needs: Requirements) -> list[str]:
    cost = option.cost
    cells = [
        f"{cost.autosave.debounce:g}",
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
