"""Sessions whose whole content somebody outside knows, record by record.

`write` makes one with everything that a fork has to take along, and writes down as a `Story` what it
is at the end of each group; `problems_of` compares a session that is said to be a fork of it with that.
Nothing here reads a document, or asks a copier what a copy has to be.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import random
from typing import Any, NamedTuple

from perdure import Message, Retention, Session, SessionManager
from perdure.records.chunks import name_of
from perdure.records.keys import SessionKey
from perdure.records.records import BASE, ENDING, EPOCH, FORK, GAP, Record
from perdure.store import Store
from tests.images import part, png

OF_THE_LOG = frozenset({BASE, ENDING, EPOCH, FORK, GAP})
"""Kinds that say something about one log; a copy has a gap there."""


class Line(NamedTuple):
    """A record."""

    kind: str
    payload: str
    """Its hash."""
    end: bool

    @classmethod
    def of(cls, record: Record) -> Line:
        payload = hashlib.sha256(record.payload).hexdigest()
        return cls(record.kind, payload, record.end)


class Moment(NamedTuple):
    """What a session is at the end of a group."""

    said: int
    """The place of its newest message in `Story.cells`."""
    memory: dict[str, Any]
    states: dict[str, Any]
    given: dict[int, Any]
    """The states of its checkpoints that were given."""
    captured: frozenset[int]
    """Its checkpoints of itself."""
    title: str | None


class Story:
    """A session, from its first record to its last."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.cells: list[tuple[int, str, str]] = [(-1, "", "")]
        """Messages: which one is before it, its text, and its image's blob, if it has one."""
        self.ends: list[int] = [0]
        self.moments: list[Moment] = [Moment(0, {}, {}, {}, frozenset(), None)]
        self.turns: dict[str, int] = {}
        """The last records of its turns that have ended."""
        self.lines: dict[int, Line] = {}
        """Its log, when it was whole for the last time."""
        self.first = 1
        """The last record that was pruned, else its first one: where a fork of it begins."""

    @property
    def head(self) -> int:
        """The last record that says something."""
        return max(seq for seq, line in self.lines.items() if line.kind not in OF_THE_LOG)

    def points(self) -> list[int]:
        """Return the records that it can be forked at."""
        ends = [seq for seq in self.ends if seq >= self.first and seq in self.lines]
        return [seq for seq in ends if self.lines[seq].kind not in OF_THE_LOG]

    def at(self, seq: int) -> Moment:
        return self.moments[bisect.bisect_right(self.ends, seq) - 1]

    def said(self, seq: int) -> list[tuple[str, str]]:
        """Return the messages of the context, each with its image's blob."""
        found, place = [], self.at(seq).said
        while place > 0:
            place, text, image = self.cells[place]
            found.append((text, image))
        return found[::-1]

    def note(self, seq: int, **changed: Any) -> None:
        self.ends.append(seq)
        self.moments.append(self.moments[-1]._replace(**changed))

    def say(self, seq: int, text: str, image: str = "") -> None:
        self.cells.append((self.moments[-1].said, text, image))
        self.note(seq, said=len(self.cells) - 1)


class _Cut(Exception):
    """A turn that comes to no end."""


class _Teller:
    """Whoever writes a session, and its story with it."""

    def __init__(self, story: Story, dice: random.Random) -> None:
        self._story = story
        self._dice = dice
        self._number = 0

    async def write(self, sessions: SessionManager, records: int) -> None:
        dice = self._dice
        pruned_at = dice.randint(records // 3, records) if dice.random() < 0.5 else 2 * records
        captures = dice.random() < 0.4
        head = 0
        while head < records:
            async with sessions.open(self._story.id) as session:
                self._story.note(session.version)
                until = min(records, session.version + dice.randint(records // 8, records // 2))
                while session.version < until:
                    await self._act(session, captures=captures)
                await session.save()
                head = session.version
                await session.aclose()
            if head >= pruned_at:
                keep = Retention(keep_turns=dice.randint(1, 20))
                await sessions.prune(keep, id=self._story.id)
                pruned_at = 2 * records

    async def _act(self, session: Session, *, captures: bool) -> None:
        self._number += 1
        act, story, dice = self._dice.random(), self._story, self._dice
        turn = f"turn {self._number}"
        if act < 0.1:  # a turn that is cut, and tried again
            before = story.moments[-1].said
            with contextlib.suppress(_Cut):
                async with session.turn(turn):
                    self._talk(session)
                    raise _Cut
            story.note(session.version)
            async with session.turn(turn):
                story.note(session.version, said=before)
                self._talk(session)
            self._ended(session, turn)
        elif act < 0.14:
            back = self._dice.choice(story.ends[-12:])
            story.note(await session.retract(after=back), said=story.at(back).said)
        elif act < 0.16:
            story.note(session.describe(title=turn), title=turn)
        elif act < 0.2:
            captured = captures and dice.random() < 0.5
            state = None if captured else ["z" * dice.choice((10, 9000)), self._number]
            made = await session.checkpoints.create(turn, state=state)
            last = story.moments[-1]
            if state is None:
                story.note(session.version, captured=last.captured | {made.id})
            else:
                story.note(session.version, given={**last.given, made.id: state})
        else:
            async with session.turn(turn):
                self._talk(session)
            self._ended(session, turn)

    def _ended(self, session: Session, turn: str) -> None:
        self._story.note(session.version)
        self._story.turns[turn] = session.version

    def _talk(self, session: Session) -> None:
        dice, story = self._dice, self._story
        for number in range(dice.randint(1, 5)):
            text = f"{self._number}.{number} {'x' * dice.choice((20, 100, 400))}"
            if dice.random() < 0.015:
                image = png(dice.randint(66_000, 90_000), dice.getrandbits(32))
                said = [{"type": "text", "text": text}, part(image)]
                story.say(session.append(Message.user(said)), text, name_of(image))
            elif number % 2:
                story.say(session.append(Message.assistant(text)), text)
            else:
                story.say(session.append(Message.user(text)), text)
        value = ["y" * dice.choice((10, 3000)), self._number, story.id]
        name = f"key {dice.randrange(6)}"
        if dice.random() < 0.2:
            session.memory.set(name, value)
            story.note(session.version, memory={**story.moments[-1].memory, name: value})
        elif dice.random() < 0.2:
            session.state.set(name, value)
            story.note(session.version, states={**story.moments[-1].states, name: value})


async def log_of(store: Store, id: SessionKey) -> list[Record]:
    return [record async for chunk in store.read_log(id) for record in chunk.records]


async def write(sessions: SessionManager, id: str, records: int, dice: random.Random) -> Story:
    """Make a session of so many records, and return what it is at each of them."""
    story = Story(id)
    await _Teller(story, dice).write(sessions, records)
    log = await log_of(sessions._store.inner, SessionKey(id))
    story.lines = {record.seq: Line.of(record) for record in log}
    story.first = (await sessions._store.beginning_of(SessionKey(id))).cut or 1
    return story


# What is wrong with a session that is said to be a fork?


def of_log(story: Story, at: int, log: list[Record], *, pruned: bool) -> list[str]:
    """Compare the records of a full fork with those of its source up to one of them.

    Args:
        story: What the source was before anybody forked it.
        at: The last record that both have.
        log: The fork's.
        pruned: Whether the source may have been pruned since.

    """
    first = log[0].seq
    wrong = []
    if log[0].kind != EPOCH or first < story.first or (first > story.first and not pruned):
        wrong.append(f"begins with record {first}, a {log[0].kind}, and not with {story.first}")
    if [record.seq for record in log] != list(range(first, first + len(log))) or log[-1].seq < at:
        wrong.append(f"has a hole, or ends before {at}: {first} to {log[-1].seq}, {len(log)}")
    for record in log[1:]:
        line = story.lines.get(record.seq)
        if record.seq > at or (line is None and record.kind == GAP):  # its own; of the source's log
            continue
        ours = Line.of(record)
        is_gap = line is not None and line.kind in OF_THE_LOG
        if line is None or (ours.kind != GAP if is_gap else ours != line):
            wrong.append(f"record {record.seq} is {ours}, and was {line}")
    return wrong[:5]


async def of_view(story: Story, at: int, view: Any) -> list[str]:
    """Compare what a session shows with what its source was at a record."""
    moment, texts = story.at(at), [text for text, _ in story.said(at)]
    context = [message.text for message in view.context()]
    memory = {key: await view.memory.get(key) for key in await view.memory.keys()}
    states = {key: await view.state.get(key) for key in await view.state.keys()}
    wrong = []
    if context != texts:
        differs = next(
            (n for n, (a, b) in enumerate(zip(context, texts, strict=False)) if a != b), "end"
        )
        wrong.append(f"has {len(context)} messages for {len(texts)}, from {differs} on others")
    if view.info.metadata.title != moment.title:
        wrong.append(f"has the title {view.info.metadata.title} for {moment.title}")
    if memory != moment.memory:
        wrong.append(f"remembers {sorted(memory)} for {sorted(moment.memory)}, or other values")
    if states != moment.states:
        wrong.append(f"has the states {sorted(states)} for {sorted(moment.states)}, or others")
    return wrong


async def of_blobs(story: Story, at: int, view: Any, store: Store, *, full: bool) -> list[str]:
    """Look for what a session names, and cannot be read."""
    moment, wrong = story.at(at), []
    for text, image in story.said(at):
        if image and await store.get_blob("", image) is None:
            wrong.append(f"has lost the image of {text[:10]!r}")
    made = {one.id for one in await view.checkpoints.states()}
    wanted = moment.given.keys() | (moment.captured if full else set())
    if made != wanted:
        wrong.append(f"has the checkpoints {sorted(made)} for {sorted(wanted)}")
    for id in made & wanted:
        restored = await view.checkpoints.restore(id)
        if id in moment.given and restored.state != moment.given[id]:
            wrong.append(f"has another state at checkpoint {id}")
    return wrong
