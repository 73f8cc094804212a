"""Limits on a server's connections: how many there are, and how long each may keep it waiting.

uvicorn has limits of its own for what is idle between two requests, for the size of a header, and
for the requests that run; these are for what it leaves open. A connection whose request has not
come in full ends after a time, and so does one whose client does not read on: a time in which
nothing more of the answer was sent, however much is left. When there are too many, the one that
has waited longest for its request makes room.
"""

from __future__ import annotations

from asyncio import TimerHandle
from typing import Any, Final, final

from perdure._lib.lazy import import_extra
from perdure._lib.platform import descriptor_limit
from perdure.errors import ConfigError

_EXTRA: Final = {"used_by": "perdure serve", "extra": "serve"}
h11: Any = import_extra("h11", name="h11", **_EXTRA)
H11Protocol: Any = import_extra(
    "uvicorn.protocols.http.h11_impl", name="uvicorn", **_EXTRA
).H11Protocol

TIMEOUT: Final = 15.0
TO_READ_AT_STOP: Final = 2.0
"""Seconds for a client to continue reading when the server stops, which waits for it."""
MOST: Final = 4096
"""Connections by default, if there are descriptors for them."""
EACH: Final = 4
"""Descriptors for a connection: its own, two of the session that it uses, and one in reserve."""
FOR_PROBES: Final = 16
"""Connections beyond the limit, so that probes are always answered."""


def connection_limit(given: int | None) -> int:
    """Return how many connections there may be: as given, or as descriptors allow.

    Raises:
        ConfigError: There are not so many descriptors.

    """
    descriptors = descriptor_limit()
    most = MOST if descriptors is None else max(descriptors // EACH, 1)
    if given is None:
        return min(MOST, most)
    if descriptors is not None and given > most:
        raise ConfigError(
            f"--max-connections {given}: the {descriptors} files that this process may open are "
            f"enough for {most}; raise that limit (ulimit -n)",
            option="max-connections",
            value=given,
        )
    return given


@final
class ConnectionLimits:
    """The connections of a server: what uvicorn's ``http=`` takes is its `protocol`.

    Args:
        most: How many there may be, besides some for probes. None: as many as descriptors allow.
        timeout: Seconds for a request to come in full, and for a client to continue reading.

    """

    def __init__(self, *, most: int | None = None, timeout: float = TIMEOUT) -> None:
        self.timeout: float = timeout
        self.waiting: dict[Any, None] = {}
        """Those whose request has not come in full; they have waited longest at the front."""
        self._most = connection_limit(most) + FOR_PROBES

    @property
    def backlog(self) -> int:
        """The number of connections that are accepted at once, before any is counted."""
        return max(8, min(2048, self._most // 4))

    def protocol(self, **options: Any) -> Any:
        """Return what serves a connection."""
        return _Connection(self, **options)

    def make_room(self, newest: Any) -> None:
        """Close what waits for a request longest, if there are too many now."""
        if len(newest.connections) > self._most:
            oldest = next(iter(self.waiting), newest)
            self.waiting.pop(oldest, None)
            oldest.transport.abort()


class _Connection(H11Protocol):  # type: ignore[misc]  # imported when used
    """A connection with a limit of time."""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._to_read = limits.timeout
        self._arrival: TimerHandle | None = None
        self._reading: TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Writing is paused as long as anything is unsent, be it a byte: also when that is the end
        # of an answer, and the transport closes, which waits for it.
        transport.set_write_buffer_limits(0)
        self._look()
        self._limits.make_room(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.DONE:  # what comes now is another request
            self._arrival = _cancelled(self._arrival)
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.waiting.pop(self, None)
        self._arrival, self._reading = _cancelled(self._arrival), _cancelled(self._reading)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_less()

    def resume_writing(self) -> None:
        self._reading = _cancelled(self._reading)
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        self._to_read = min(self._to_read, TO_READ_AT_STOP)
        if self._reading is not None:
            self._reading.cancel()
            self._expect_less()

    def _expect_less(self) -> None:
        """End after a time, unless less is unsent by then."""
        unsent = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self._to_read, self._end_unless_less, unsent)

    def _end_unless_less(self, unsent: int) -> None:
        # Nothing is added meanwhile: uvicorn does not send while writing is paused.
        if self.transport.get_write_buffer_size() < unsent:
            self._expect_less()
        else:
            self.transport.abort()

    def _look(self) -> None:
        """See whether a request is to come, or to come in full."""
        if self.transport.is_closing() or self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            self._limits.waiting.pop(self, None)
            self._arrival = _cancelled(self._arrival)
        elif self._arrival is None:
            self._limits.waiting[self] = None
            self._arrival = self.loop.call_later(self._limits.timeout, self._give_up)

    def _give_up(self) -> None:
        self._limits.waiting.pop(self, None)
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:  # nothing is answered yet
            if self.cycle is not None:  # who waits for the body learns that none will come
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            headers = [("connection", "close"), ("content-length", "0")]
            answer = h11.Response(status_code=408, headers=headers, reason="Request Timeout")
            self.transport.write(self.conn.send(answer))
        self.transport.close()


def _cancelled(timer: TimerHandle | None) -> TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
