"""Exit of a process with open managers: what they accepted is saved, or spilled.

The interpreter calls `_before_threads_end` when the main thread has come to its end: other
threads still run, and new ones may start, so a manager can be closed as usual. How depends on
its event loop:

* It was stopped and not closed (``loop.run_until_complete``, ``python -m asyncio``, a notebook
  that is shut down): it is run once more, in a thread of ours, until the manager is closed.
* It runs in another thread: nothing is done while other threads are at work; after them a
  loop in a daemon thread, which would be cut off, is asked to close the manager.
* It was closed, or it is trio's, which cannot be run again: what is left is spilled.

Each gets as long as its own shutdown may take, and the exit never waits longer. `_last` comes
after all threads, and spills what is still left. The outcome is printed to stderr.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    import asyncio

    from perdure.session.shutdown import ManagerShutdown


log: logging.Logger = logging.getLogger("perdure")

NAMED: Final = 5
"""Sessions that a line names."""
THREAD: Final = "perdure exit"
"""The name of threads that wait for the others: nobody is to wait for them."""
_STEP: Final = 0.02
_MARGIN: Final = 1.0
"""Seconds to wait for threads that have nothing left to do but to end."""

_open: dict[ExitHandler, None] = {}
_registered = False
_main_has_ended = False


@final
class ExitHandler:
    """One manager's part: watch from `install` to `uninstall` for the end of the process."""

    def __init__(self, closing: ManagerShutdown, close: Callable[[], Awaitable[object]]) -> None:
        self.closing: ManagerShutdown = closing
        self._close = close
        self._loop: Any = closing.runtime.loop
        self._thread = threading.current_thread()
        self._owned = True

    def install(self) -> None:
        """Start watching."""
        _open[self] = None
        if not _register():
            _watch([self])

    def uninstall(self) -> None:
        """Watch no more."""
        _open.pop(self, None)

    def leave_to_owner(self) -> None:
        """Do not close the manager, since its owner does; only spill what is left at the end."""
        self._owned = False

    @property
    def is_ours(self) -> bool:
        """Whether this process connected, and has no other owner that closes it."""
        return self._owned and self.closing.runtime.home.stray() != "fork"

    @property
    def patience(self) -> float:
        """Seconds that closing may take."""
        options = self.closing.runtime.shutdown
        return options.deadline + options.hard_grace + _MARGIN

    @property
    def is_running(self) -> bool:
        """Whether the event loop runs, in whichever thread."""
        loop = _asyncio_loop(self._loop)
        if loop is not None:
            return loop.is_running()
        # Trio's, which says nothing; a guest of the main thread's stands still by now.
        is_alive = self._thread.is_alive() and self._thread is not threading.main_thread()
        return is_alive and self.closing.runtime.host.running

    def begin(self) -> Callable[[], object] | None:
        """Begin to close in another thread; return what a thread of ours has to do, if anything."""
        loop = _asyncio_loop(self._loop)
        if loop is None:
            return self._on_trio if self.is_running else None
        if loop.is_closed():
            return None
        if loop.is_running():
            from asyncio import run_coroutine_threadsafe

            return lambda: run_coroutine_threadsafe(self._closed(), loop).result()
        return lambda: loop.run_until_complete(self._closed())

    async def _closed(self) -> None:
        if not self._owned:  # it was left to its owner just now, behind the main thread's end
            return
        await self._close()
        if _asyncio_loop(self._loop) is not None:
            from asyncio import sleep

            await sleep(0)  # what waits for the end of our tasks hears of it

    def _on_trio(self) -> None:
        import trio

        trio.from_thread.run(self._closed, trio_token=self._loop)

    def release_threads(self) -> None:
        """End anyio's threads that wait for the end of a loop that does not run any more.

        They are no daemons: the process would wait for them for ever.
        """
        for thread in threading.enumerate():
            stop = getattr(thread, "stop", None)
            if _is_anyios(thread) and getattr(thread, "loop", None) is self._loop and stop:
                stop()


def _register() -> bool:
    """Have our hooks called; False if the main thread has come to its end before."""
    global _registered, _main_has_ended  # noqa: PLW0603  # once a process
    if not _registered:
        _registered = True
        atexit.register(_last)
        # What concurrent.futures uses too; where it is missing, what comes later may do.
        register = getattr(threading, "_register_atexit", atexit.register)
        try:
            import concurrent.futures.thread  # noqa: F401  # its hook runs after ours: closing needs it

            register(_before_threads_end)
        except RuntimeError:
            _main_has_ended = True
    return not _main_has_ended


def _before_threads_end() -> None:
    global _main_has_ended  # noqa: PLW0603  # once a process
    _main_has_ended = True
    handlers = [handler for handler in tuple(_open) if handler.is_ours]
    running = [handler for handler in handlers if handler.is_running]
    _close([handler for handler in handlers if handler not in running])
    if not running:
        return
    if _at_work():
        _watch(running)
    else:
        _close(running)


def _watch(handlers: list[ExitHandler]) -> None:
    # No daemon, whoever makes it: the process has to wait.
    threading.Thread(
        target=_close_behind_others, args=(handlers,), name=THREAD, daemon=False
    ).start()


def _close_behind_others(handlers: list[ExitHandler]) -> None:
    """Close each once its loop has stopped, or no thread is at work that could still use it."""
    remaining = [handler for handler in handlers if handler in _open and handler.is_ours]
    while remaining:
        at_work = _at_work()
        due = [handler for handler in remaining if not (at_work and handler.is_running)]
        if due:
            _close(due)
        remaining = [
            handler
            for handler in remaining
            if handler in _open and handler.is_ours and handler not in due
        ]
        if remaining:
            time.sleep(_STEP)


def _at_work() -> list[threading.Thread]:
    """Return the threads that the interpreter will wait for, and that have not only to wait."""
    own_threads = {threading.main_thread(), threading.current_thread()}
    return [
        thread
        for thread in threading.enumerate()
        if not (
            thread.daemon or thread in own_threads or thread.name == THREAD or _is_anyios(thread)
        )
    ]


def _is_anyios(thread: threading.Thread) -> bool:
    return type(thread).__module__.startswith("anyio.")


def _close(handlers: Sequence[ExitHandler]) -> None:
    """Close all of them at once, and wait no longer than the most patient one; then spill."""
    if not handlers:
        return
    before = {handler: handler.closing.pending() for handler in handlers}
    threads: list[threading.Thread] = []
    for handler in handlers:
        act = handler.begin()
        if act is not None:
            thread = threading.Thread(target=_guarded, args=(act,), name=THREAD, daemon=True)
            threads.append(thread)
            thread.start()
    end = time.monotonic() + max([handler.patience for handler in handlers])
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    for handler in handlers:
        if not handler.is_ours:
            continue
        if not handler.is_running:
            handler.release_threads()
        handler.uninstall()
        handler.closing.tell_rest(before[handler])


def _guarded(act: Callable[[], object]) -> None:
    try:
        act()
    except Exception:
        log.exception("saving at the end of the process failed")


def _last() -> None:
    """Spill what is left, once no thread can be started any more."""
    for handler in tuple(_open):
        handler.uninstall()
        if handler.closing.runtime.home.stray() != "fork":
            handler.closing.tell_rest({})


# what is told


def tell(
    location: str,
    *,
    saved: dict[str, int],
    counts: dict[str, int],
    folder: str | None,
    lost: dict[str, int],
) -> None:
    """Say what was saved at exit, spilled to a folder, or lost: records by session."""
    message = f"nobody closed the manager of {location}"
    if saved:
        _say(f"{message}: saved {_named(saved)} at exit")
    if counts:
        _say(
            f"{message}, and it could not save any more: kept {_named(counts)} in {folder}; "
            "the next open of the session appends it"
        )
    if lost:
        _say(
            f"{message}: LOST {_named(lost)} at exit. Close it, with `async with connect(…)` or "
            "`await sessions.aclose()`, which say why something cannot be saved"
        )


def _named(counts: dict[str, int]) -> str:
    records, names = sum(counts.values()), sorted(counts)
    parts = [f"{name} ({counts[name]})" for name in names[:NAMED]]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    noun = "record" if records == 1 else "records"
    return f"{records} {noun} of {', '.join(parts)}{more}"


def _say(line: str) -> None:
    try:
        if sys.stderr is not None:  # pythonw has none
            sys.stderr.write(f"perdure: {line}\n")
            sys.stderr.flush()
            return
    except (OSError, ValueError):  # it was closed: a log may still take the line
        pass
    log.warning("%s", line)


def _asyncio_loop(loop: object) -> asyncio.AbstractEventLoop | None:
    """Return the loop if it is asyncio's; None for trio's token."""
    import asyncio

    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None
