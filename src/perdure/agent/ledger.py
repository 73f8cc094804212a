"""An agent's ledger: admitted messages, effects and approvals that have begun and not ended.

Each change is a record of the session, appended synchronously; the caller makes it durable where
that matters. Without a kept history no message is admitted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal, final

import anyio
import msgspec

from perdure._lib.ids import random_id
from perdure.agent.effects import given_result, is_unknown
from perdure.errors import SessionError
from perdure.memory.ledger import (
    MOST,
    OVER,
    Admitted,
    Approval,
    Effect,
    Ledger,
    Policy,
    change_entry,
)
from perdure.memory.traces import begun_by
from perdure.records.media import holds_references
from perdure.records.messages import Message, ToolCall, encode_message
from perdure.records.records import ADMITTED, APPROVAL, EFFECT, MESSAGE, TURN, Entry
from perdure.session.internals import accept, contents_of, ledger_of, registry_of, store_of
from perdure.session.session import Session, SessionView

# Reading a whole ledger, with its messages
#
# A message whose turn began at once is in the log once, in its turn, and the ledger has only that
# record's number; all others are in the ledger itself. A number counts only if its record belongs
# to the turn: a log that was imported from another runtime's state has other numbers.


async def whole_ledger(session: Session | SessionView) -> Ledger:
    """Return what is under way, with all messages; one that is not in the store is left out."""
    ledger = await ledger_of(session)
    for message in ledger.messages():
        if not message.message:
            ledger.fill(message.id, await _said(session, message))
        elif holds_references(bytes(message.message)):
            [(_, whole)] = await contents_of(session).filled([(0, bytes(message.message))])
            ledger.fill(message.id, whole)
    return ledger


async def _said(session: Session | SessionView, message: Admitted) -> bytes | None:
    """Return a message from where its turn has it; None if that turn is not there."""
    if message.seq is None:
        return None
    payload = None
    log = store_of(session).read_log(session.key, before=message.seq + 1, reverse=True)
    async with contextlib.aclosing(log) as chunks:
        async for chunk in chunks:
            # Backwards: first the message itself, then the record that began its turn.
            for record in chunk.records:
                if payload is not None and record.kind == TURN:
                    return payload if begun_by(record) == message.turn else None
                if payload is None and (record.seq, record.kind) != (message.seq, MESSAGE):
                    return None
                payload = payload or record.payload
    return None


Decision = Literal["replay", "skip", "done"]
"""Call the tool again with the same key; leave it; it was done."""


@final
class AgentLedger:
    """Keep one agent's ledger.

    Args:
        session: The agent's.
        keeps_messages: Whether what is posted may be kept.
        clock: Seconds since 1970.

    """

    def __init__(
        self,
        session: Session,
        *,
        keeps_messages: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._session = session
        self._keeps_messages = keeps_messages
        self._clock = clock
        self._book = Ledger()
        self._waiting: dict[str, anyio.Event] = {}
        self._fresh: dict[str, dict[str, Any]] = {}
        self._beginning: tuple[str, str] | None = None
        self.underway: set[str] = set()
        """The ids of messages that wait for their turn here, or have it."""

    async def load(self) -> None:
        """Read what is under way; nothing of it runs here."""
        self._book = await whole_ledger(self._session)
        for effect in self.effects:
            if effect.state == "begun":
                # Not appended: to every reader, what a former process began is unknown anyway.
                self._noted(EFFECT, effect.id, state="unknown")

    # messages

    @property
    def messages(self) -> tuple[Admitted, ...]:
        """Messages whose turn has not ended, the running one's among them; oldest first."""
        return self._book.messages()

    def admit(self, message: Message, asked: str | None, *, at_once: bool = False) -> str | None:
        """Note a message before it waits for its turn; return its entry's id.

        Args:
            message: What the user says.
            asked: The turn's id, if its sender chose one.
            at_once: Whether its turn begins now, and its admission is not reported before: it
                is then recorded by `said`, and is in the log once.

        Raises:
            NotStorableError: It cannot be stored.
            SessionError: As many as a ledger holds are unanswered.

        """
        if not self._keeps_messages:
            return None
        if not self._book.has_room(len(self._fresh) + 1):
            raise SessionError(
                f"agent {self._session.id!r} has {MOST} messages that are not answered: continue "
                "them, resume(), or give up on them, dismiss()",
                agent=self._session.id,
            )
        now = self._clock()
        stored = encode_message(message, registry_of(self._session), now=now).payload
        fields: dict[str, Any] = {"message": msgspec.Raw(stored), "at": now}
        if asked is not None:
            fields["asked"] = asked
        name = random_id()
        if at_once:
            # No record yet: `said` makes one with the message in its turn, or `keep` one of its
            # own.
            self._fresh[name] = fields
        else:
            self._change(ADMITTED, name, **fields)
        return name

    def keep(self, id: str | None) -> None:
        """Note a message whose turn does not begin at once after all."""
        fields = self._fresh.pop(id or "", None)
        if id is not None and fields is not None:
            self._change(ADMITTED, id, **fields)

    def said(self, seq: int) -> None:
        """Note that the running turn has its message, in the record before: make it one group."""
        name, turn = self._beginning or ("", "")
        fields = self._fresh.pop(name, None)
        if fields is not None:
            message = bytes(fields.pop("message"))
            self._change(ADMITTED, name, **fields, turn=turn, attempts=1, seq=seq)
            self._book.fill(name, message)

    def begin(self, id: str | None, turn: str) -> None:
        """Note that a message's turn has begun; what was half done before is passed over."""
        self._beginning = None if id is None else (id, turn)
        for message in self.messages:
            if message.id == id:
                self._change(ADMITTED, id, turn=turn, attempts=message.attempts + 1, error=None)
            elif message.turn is not None:
                self._change(ADMITTED, message.id, state=OVER, how="passed over")
        pending: list[Effect | Approval] = [*self.effects, *self.approvals]
        turns = {entry.turn for entry in pending}
        over = [entry for other in sorted(turns - {turn}) for entry in self._leftovers(other)]
        if over:
            accept(self._session, tuple(over))

    def refuse(self, id: str | None) -> None:
        """Record that a message is refused; what was not noted yet never is."""
        if id is not None and self._fresh.pop(id, None) is None:
            self._change(ADMITTED, id, state=OVER, how="refused")

    def drop(self, id: str) -> None:
        """Record that a message will not be answered, and that its turn is not waited for."""
        turns = [message.turn for message in self.messages if message.id == id]
        leftovers = [entry for turn in turns if turn is not None for entry in self._leftovers(turn)]
        accept(self._session, (*leftovers, self._noted(ADMITTED, id, state=OVER, how="dismissed")))

    def closing(self, id: str | None, turn: str, *, how: str) -> tuple[Entry, ...]:
        """Return what to append with the end of a message's turn."""
        leftovers = self._leftovers(turn)
        # It was never noted: there is nothing to close.
        if id is None or self._fresh.pop(id, None) is not None:
            return leftovers
        return (*leftovers, self._noted(ADMITTED, id, state=OVER, how=how))

    def failing(self, id: str | None, error: BaseException) -> tuple[Entry, ...]:
        """Return what to append with the end of a turn that has failed."""
        return () if id is None else (self._noted(ADMITTED, id, error=type(error).__name__),)

    def _leftovers(self, turn: str) -> tuple[Entry, ...]:
        """End what is no longer waited for once a turn is over; an unknown effect stays.

        A result that was given to the turn, and that it has not come to, is appended.
        """
        return (
            *(
                encode_message(
                    Message(role="tool", tool_result=given_result(effect)), now=self._clock()
                )
                for effect in self.effects
                if (effect.turn, effect.state, effect.decision) == (turn, "decided", "done")
                and self._keeps_messages
            ),
            *(
                self._noted(APPROVAL, approval.id, state=OVER, how="withdrawn")
                for approval in self.approvals
                if approval.turn == turn
            ),
            *(
                self._noted(EFFECT, approval.id, state=OVER, how=approval.decision or "not begun")
                for approval in self.effects
                if approval.turn == turn and not is_unknown(approval)
            ),
        )

    # effects

    @property
    def effects(self) -> tuple[Effect, ...]:
        """Calls of tools with side effects whose outcome is not known; oldest first."""
        return self._book.effects()

    def effect_of(self, turn: str, call: ToolCall) -> Effect | None:
        """Return what is known of a call that has no result; None for nothing."""
        for effect in reversed(self.effects):
            if (effect.turn, effect.call, effect.told) == (turn, call.id, False):
                return effect
        return None

    def effect(self, id: str) -> Effect:
        """Return the effect of an id, or the newest of a call's id.

        Raises:
            SessionError: There is none whose outcome is not known.

        """
        effects = [effect for effect in self.effects if id in {effect.id, effect.call}]
        if not effects:
            raise SessionError(
                f"agent {self._session.id!r} knows of no effect {id!r} that is unknown",
                agent=self._session.id,
                effect=id,
            )
        return effects[-1]

    def plan(self, turn: str, call: ToolCall, policy: Policy, *, begun: bool) -> Effect:
        """Note a call before it is made."""
        key = random_id()
        state = "begun" if begun else "planned"
        names = {"turn": turn, "call": call.id, "tool": call.name}
        self._change(EFFECT, key, at=self._clock(), policy=policy, state=state, **names)
        return self.effect(key)

    def begun(self, effect: Effect) -> None:
        """Note that a call is about to be made."""
        if effect.state != "begun":
            self._change(EFFECT, effect.id, state="begun", decision=None)

    def cut(self, turn: str) -> tuple[Entry, ...]:
        """Return what to append with the end of a turn that was cut short amid its calls."""
        return tuple(
            self._noted(EFFECT, effect.id, state="unknown")
            for effect in self.effects
            if (effect.turn, effect.state) == (turn, "begun")
        )

    def unknown(self, effect: Effect, *, told: bool = False) -> Effect:
        """Record that the outcome of a call is unknown, and whether the model has that answer."""
        self._change(EFFECT, effect.id, state="unknown", told=told)
        return self.effect(effect.id)

    def settled(self, effect: Effect, how: str) -> None:
        """Note what came of a call."""
        self._change(EFFECT, effect.id, state=OVER, how=how)

    def decide(self, effect: Effect, decision: Decision, result: bytes = b"null") -> None:
        """Record the decision on a call, and wake the tasks that wait for it."""
        raw = msgspec.Raw(result)
        self._change(EFFECT, effect.id, state="decided", decision=decision, result=raw)
        self._wake(effect.id)

    async def decided(self, effect: Effect) -> Effect:
        """Wait for the decision."""
        while (now := self.effect(effect.id)).state != "decided":
            await self._woken(effect.id)
        return now

    # approvals

    @property
    def approvals(self) -> tuple[Approval, ...]:
        """Calls that were to be approved, and have no result; oldest first."""
        return self._book.approvals()

    def approval_of(self, turn: str, call: ToolCall) -> Approval | None:
        """Return what is known of a call's approval, None for nothing."""
        for approval in reversed(self.approvals):
            if (approval.turn, approval.call) == (turn, call.id):
                return approval
        return None

    def ask(self, turn: str, call: ToolCall) -> Approval:
        """Record that a call waits for approval."""
        known = self.approval_of(turn, call)
        if known is not None:
            return known
        names = {"turn": turn, "call": call.id, "tool": call.name}
        self._change(APPROVAL, random_id(), at=self._clock(), **names)
        return self.approvals[-1]

    def answer(self, call_id: str, answer: str, why: str | None = None) -> Approval:
        """Record the answer, and wake the task that waits for it.

        Raises:
            SessionError: No such call waits.

        """
        waiting = [
            approval
            for approval in self.approvals
            if approval.call == call_id and approval.answer is None
        ]
        if not waiting:
            raise SessionError(
                f"no call {call_id!r} of agent {self._session.id!r} waits for an approval",
                agent=self._session.id,
                call=call_id,
            )
        self._change(APPROVAL, waiting[-1].id, answer=answer, why=why)
        self._wake(waiting[-1].id)
        return waiting[-1]

    async def answered(self, approval: Approval) -> Approval:
        """Wait for the answer."""
        while True:
            now = next(known for known in self.approvals if known.id == approval.id)
            if now.answer is not None:
                return now
            await self._woken(approval.id)

    def end_approval(self, turn: str, call: ToolCall) -> bool:
        """Note that a call needs no approval any more; False if it has needed none."""
        known = self.approval_of(turn, call)
        if known is not None:
            self._change(APPROVAL, known.id, state=OVER)
        return known is not None

    # how

    def _change(self, kind: str, id: str, **fields: Any) -> None:
        accept(self._session, (self._noted(kind, id, **fields),))

    def _noted(self, kind: str, id: str, **fields: Any) -> Entry:
        entry = change_entry(kind, id, **fields)
        self._book.feed(*entry[:2])
        return entry

    def _wake(self, id: str) -> None:
        event = self._waiting.pop(id, None)
        if event is not None:
            event.set()

    async def _woken(self, id: str) -> None:
        await self._waiting.setdefault(id, anyio.Event()).wait()
