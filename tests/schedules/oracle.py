"""What must be so after an episode: a fold of the raw log of its own, and the promises held against it.

Pure. Nothing of perdure's folds is used: records are lines of JSON. What is in doubt (cancelled, killed) may have happened or not,
whole; nothing else is allowed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.schedules.journal import HAPPENED, TAKES, Act, Journal, Token

MESSAGES = ("message", "tool_call", "tool_result")
CONTENT = (
    *MESSAGES,
    "memory_set",
    "memory_drop",
    "state",
    "turn",
    "retract",
    "context",
    "checkpoint",
)
"""Kinds that a copy has as its source has them."""


class Line(NamedTuple):
    """A record of a log."""

    seq: int
    epoch: int
    kind: str
    payload: bytes
    end: bool = True

    @property
    def value(self) -> Any:
        return json.loads(self.payload)


@dataclass
class Content:
    """What a session is, as its users read it."""

    context: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def difference(self, other: Content, *names: str) -> str:
        """Say how another one differs; nothing if it does not."""
        for name in names or ("context", "history", "memory", "state"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {_short(theirs)}, expected {_short(mine)}"
        return ""


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 12:
        return f"{len(value)} items, [{', '.join(map(str, value[:3]))} … {', '.join(map(str, value[-6:]))}]"
    return str(value)


def text_of(payload: bytes) -> str:
    """Return a message's text."""
    content = json.loads(payload).get("content")
    return content if isinstance(content, str) else json.dumps(content)


def fold(log: Sequence[Line]) -> Content:
    """Return what a log from its first record on says."""
    context: list[tuple[int, str]] = []
    memory: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for line in log:
        if line.kind in MESSAGES:
            context.append((line.seq, text_of(line.payload)))
        elif line.kind == "retract":
            context = [one for one in context if not takes(line, one[0])]
        elif line.kind == "context":
            context = [(line.seq, one["content"]) for one in line.value["messages"]]
        elif line.kind == "memory_set":
            memory[line.value["key"]] = line.value["value"]
        elif line.kind == "memory_drop":
            memory.pop(line.value["key"], None)
        elif line.kind == "state":
            name = line.value["name"].removeprefix("state/").removesuffix(".json")
            if line.value.get("dropped"):
                state.pop(name, None)
            else:
                state[name] = line.value.get("value")
    return Content([text for _, text in context], shown(log), memory, state)


def shown(log: Sequence[Line]) -> list[str]:
    """Return the messages of a log that were not taken back; a retraction that was taken back takes none back."""
    retractions: list[Line] = []
    texts: list[str] = []
    for line in reversed(log):
        if any(takes(retraction, line.seq) for retraction in retractions):
            continue
        if line.kind == "retract":
            retractions.append(line)
        elif line.kind in MESSAGES:
            texts.append(text_of(line.payload))
    return texts[::-1]


def takes(retraction: Line, seq: int) -> bool:
    """Say whether a retraction takes an earlier record back."""
    if "after" in retraction.value:
        return bool(retraction.value["after"] < seq)
    return any(first <= seq <= last for first, last in retraction.value["spans"])


class Failure(NamedTuple):
    """Something that cannot be."""

    label: str
    id: str
    """The session, or the act, that it is about."""
    text: str


@dataclass
class Found:
    """What there is when everything has ended."""

    logs: dict[str, list[Line]] = field(default_factory=dict)
    """By id, as they are read now."""
    views: dict[str, Content] = field(default_factory=dict)
    """As `load` shows them."""
    rebuilt: dict[str, Content] = field(default_factory=dict)
    """As `load` shows them when no document can be used."""
    opened: dict[str, Content] = field(default_factory=dict)
    """As `open` shows them, after what was posted was taken in; with its own log."""
    opened_logs: dict[str, list[Line]] = field(default_factory=dict)
    seen: dict[str, list[dict[int, Line]]] = field(default_factory=dict)
    """Earlier records by id, one life after the other: before anything was pruned."""


def judge(journal: Journal, found: Found) -> list[Failure]:
    """Return everything that cannot be."""
    failures: list[Failure] = []
    for id, log in sorted(found.logs.items()):
        failures += judge_log(journal, id, log)
        failures += judge_views(journal, found, id, log)
    for token in journal.tokens.values():
        failures += judge_token(journal, found, token)
    failures += judge_groups(journal, found)
    for act in journal.named(*TAKES):
        if act.outcome == HAPPENED:
            failures += judge_copy(journal, found, act)
    for act in journal.named("rollback"):
        if act.outcome == HAPPENED:
            failures += judge_rollback(found, act)
    failures += judge_reads(journal)
    return without_consequences(journal, failures)


def judge_log(journal: Journal, id: str, log: Sequence[Line]) -> Iterator[Failure]:
    """A log has no gap, no group without its end, and no text twice."""
    seqs = [line.seq for line in log]
    if seqs and seqs != list(range(seqs[0], seqs[0] + len(seqs))):
        yield Failure(
            made_label(journal, id, "log-gap"), id, f"the log of {id} has the records {_runs(seqs)}"
        )
    if log and not log[-1].end:
        yield Failure("torn-group", id, f"the log of {id} ends within a group, at {log[-1].seq}")
    texts = Counter(text_of(line.payload) for line in log if line.kind in MESSAGES)
    twice = sorted(text for text, times in texts.items() if times > 1)
    if twice:
        yield Failure("doubled", id, f"the log of {id} has {twice} more than once")


def _runs(seqs: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for seq in seqs:
        if runs and runs[-1][1] == seq - 1:
            runs[-1][1] = seq
        else:
            runs.append([seq, seq])
    return ", ".join(f"{a}–{b}" for a, b in runs)


def judge_views(journal: Journal, found: Found, id: str, log: Sequence[Line]) -> Iterator[Failure]:
    """What `load` and `open` show is what the log says, with and without documents."""
    view, rebuilt, opened = found.views.get(id), found.rebuilt.get(id), found.opened.get(id)
    whole = whole_log(found, id, log)
    if whole is not None:
        said = fold(whole)
        said.history = shown(log)
        if view is not None and (how := said.difference(view)):
            yield Failure(made_label(journal, id, "view-differs"), id, f"load({id}): {how}")
        if rebuilt is not None and (how := said.difference(rebuilt)):
            yield Failure(
                rebuild_label(journal, id, log), id, f"load({id}) without its documents: {how}"
            )
    elif view is not None and rebuilt is not None and (how := view.difference(rebuilt)):
        label = rebuild_label(journal, id, log)
        yield Failure(label, id, f"load({id}) without its documents, compared with them: {how}")
    after = found.opened_logs.get(id)
    if opened is not None and after is not None:
        whole = whole_log(found, id, after)
        if whole is not None:
            said = fold(whole)
            said.history = shown(after)
            if how := said.difference(opened):
                yield Failure(made_label(journal, id, "open-differs"), id, f"open({id}): {how}")
        elif view is not None and len(after) and after[-1].seq >= log[-1].seq:
            more = [
                text_of(line.payload)
                for line in after
                if line.seq > log[-1].seq and line.kind in MESSAGES
            ]
            if not any(
                line.kind in ("retract", "context") for line in after if line.seq > log[-1].seq
            ):
                if opened.context != view.context + more:
                    how = Content(context=view.context + more).difference(opened, "context")
                    yield Failure(made_label(journal, id, "open-differs"), id, f"open({id}): {how}")


def made_label(journal: Journal, id: str, label: str) -> str:
    """Name a failure after the copy or the fork that it is about."""
    for name in ("copy", "fork"):
        if any(one.name == name and one.ids[1] == id for one in journal.acts.values()):
            return f"{name}-not-equal"
    return label


def whole_log(found: Found, id: str, log: Sequence[Line]) -> list[Line] | None:
    """Return a log from its first record on, with what was pruned of it as it was seen before; None if it was not."""
    if not log or log[0].seq == 1:
        return list(log)
    ours = {line.seq: line for line in log}
    for life in found.seen.get(id, ()):
        if all(seq in life for seq in range(1, log[0].seq)):
            both = [seq for seq in ours if seq in life]
            if both and all(life[seq].payload == ours[seq].payload for seq in both):
                return [life[seq] for seq in range(1, log[0].seq)] + list(log)
    return None


def rebuild_label(journal: Journal, id: str, log: Sequence[Line]) -> str:
    """Name what a rebuild lost: of a fork that was pruned, of a copy, or of anything else."""
    if any(act.ids[1] == id for act in journal.named("copy")):
        return "copy-not-equal"
    if any(act.ids[1] == id for act in journal.named("fork")):
        pruned = {act.ids[0] for act in journal.named("prune")}
        if id in pruned:
            return "fork-rebuild"
        if journal.kin(id) & pruned:
            return "fork-of-pruned"
    return "rebuild-differs"


def judge_token(journal: Journal, found: Found, token: Token) -> Iterator[Failure]:
    """What was promised is there once, where it was said, until something that may have happened ended it."""
    promised = token.durable < float("inf") or (
        token.accepted < float("inf") and journal.closed.get(token.manager) == "clean"
    )
    if token.act.outcome != HAPPENED and token.key and token.durable == float("inf"):
        promised = False
    if not promised:
        return
    what = "durable" if token.durable < float("inf") else "accepted"
    since = min(token.accepted, token.act.began) if token.key else token.act.began
    missing, renamed = where(journal, found, token, token.id, since, set())
    if missing and not may_go_with_a_rename(journal, token):
        label = "rename-lost" if renamed else "post-lost" if token.key else "lost"
        yield Failure(
            label,
            token.id,
            f"{token.text} ({what}, record {token.seq} of epoch {token.epoch} of {token.id}) is in no log of {sorted(missing)}",
        )
    for id in {token.id, *missing}:
        for line in found.logs.get(id, ()):
            if (
                line.kind in MESSAGES
                and text_of(line.payload) == token.text
                and token.seq not in (0, line.seq)
            ):
                yield Failure(
                    "misplaced",
                    id,
                    f"{token.text} was record {token.seq}, the log has it as {line.seq}",
                )


def may_go_with_a_rename(journal: Journal, token: Token) -> bool:
    """Whether it was posted just while another process renamed, or found renamed: docs/sessions.md names that."""
    return bool(token.key) and any(
        act.who.partition(".")[0] != token.manager
        and act.began < token.act.left
        and token.act.began < act.ended
        for act in journal.acts.values()
        if act.name == "rename" and token.id in act.ids
    )


def where(
    journal: Journal, found: Found, token: Token, id: str, since: float, visited: set[str]
) -> tuple[set[str], bool]:
    """Return the ids that a text is missing in, none if it is in one, or may be gone; and whether by a rename."""
    if id in visited:
        return set(), False
    visited.add(id)
    if is_there(journal, found, token, id):
        return set(), False
    ends = journal.ends(id, since)
    if any(act.name in ("delete", "forget") for act in ends):
        return set(), False
    missing = {id}
    for act in ends:
        further, _ = where(journal, found, token, act.ids[1], act.began, visited)
        if not further:
            return set(), False
        missing |= further
    return missing, bool(ends)


def is_there(journal: Journal, found: Found, token: Token, id: str) -> bool:
    """Whether a session has a text: in its log, or in its context where that part of the log was pruned."""
    for log in (found.logs.get(id, ()), found.opened_logs.get(id, ())):
        if any(line.kind in MESSAGES and text_of(line.payload) == token.text for line in log):
            return True
    log = found.logs.get(id, [])
    if not log or log[0].seq == 1:
        return False
    if token.seq >= log[0].seq:
        return False
    kin = journal.kin(id)
    if not any(kin & set(act.ids) for act in journal.named("prune")):
        return False
    view = found.views.get(id)
    taken_back = any(
        kin & set(act.ids)
        for act in journal.named("rollback", "retract", "named turn", "failed turn")
    )
    return view is None or token.text in view.context or taken_back


def judge_groups(journal: Journal, found: Found) -> Iterator[Failure]:
    """A group is in a log whole, side by side, or not at all."""
    for id, log in found.logs.items():
        at = {text_of(line.payload): line.seq for line in log if line.kind in MESSAGES}
        for token in journal.tokens.values():
            if token.text != token.group[0] and token.text != token.group[-1]:
                continue
            there = [at[text] for text in token.group if text in at]
            if (
                there
                and there != list(range(there[0], there[0] + len(token.group)))
                and there[0] > log[0].seq
            ):
                yield Failure(
                    "torn-group",
                    id,
                    f"of the group {list(token.group)} the log of {id} has the records {there}",
                )
                break


def judge_copy(journal: Journal, found: Found, act: Act) -> Iterator[Failure]:
    """What an acknowledged fork, copy or rename begins with is what its source had, up to its point."""
    source, new, upto = act.ids[0], act.ids[1], act.result
    if upto == 0:  # nothing was there to copy, and what was never written gives way to others
        return
    if journal.ends(new, act.began) or new not in found.logs or type(upto) is not int:
        if not journal.ends(new, act.began) and new not in found.logs:
            yield Failure(
                f"{act.name}-not-equal",
                new,
                f"{act.name}({source}, {new}) was acknowledged, and there is no {new}",
            )
        return
    label = f"{act.name}-not-equal"
    ours = {line.seq: line for line in found.logs[new]}
    first = min(ours)
    kin = journal.kin(new)
    pruned = any(kin & set(one.ids) for one in journal.named("prune"))
    if first > 1 and not pruned:
        yield Failure(label, new, f"{new} begins at record {first}, and nothing was pruned")
        return
    gone = [seq for seq in range(first, upto + 1) if seq not in ours]
    if gone:
        yield Failure(
            label, new, f"{new} lacks the records {_runs(gone)} of {source}, up to {upto}"
        )
        return
    texts = {text_of(line.payload) for line in ours.values() if line.kind in MESSAGES}
    before = [
        token for token in journal.tokens.values()
        if token.id == source and token.seq and token.durable < act.began
    ]  # fmt: skip
    # Where another act was faster, there is nothing to rename, and an earlier rename to this name answers.
    is_again = act.name == "rename" and any(
        one is not act and one.ids == act.ids and one.began < act.ended
        for one in journal.named("rename", id=source)
    )
    certain: list[Token] = []
    doubtful: list[Token] = []
    for token in before:
        ends = [
            end
            for end in journal.ends(source, token.act.began)
            if end is not act and end.began < act.ended
        ]
        if not ends:
            certain.append(token)
        elif is_again and any(end.ids != act.ids for end in ends):
            continue  # whether it is anywhere, `judge_token` says
        elif all(end.ended > act.began for end in ends):  # else that life may have been over
            doubtful.append(token)
    for token in certain:
        if token.seq > upto and act.detail in ("at=None", ""):
            yield Failure(
                label,
                new,
                f"{token.text}, record {token.seq} of {source}, was durable before, and {new} ends at {upto}",
            )
            return
        if first <= token.seq <= upto and token.text not in texts:
            yield Failure(
                label,
                new,
                f"{token.text}, record {token.seq} of {source}, was durable before, and {new} lacks it",
            )
            return
    has = [token for token in doubtful if token.text in texts]
    lacks = [token for token in doubtful if token.text not in texts and first <= token.seq <= upto]
    made_anew = any(
        journal.makes(source, end.began, act.ended) for end in journal.ends(source, 0.0)
    )
    # An end within may have come first: then all of the later life is there, and nothing of the earlier one.
    is_later = all(one.epoch > other.epoch for one in has for other in lacks)
    if lacks and not (made_anew and is_later):
        yield Failure(
            label,
            new,
            f"{lacks[0].text}, record {lacks[0].seq} of {source}, was durable before, and {new}, up to {upto}, lacks it",
        )
        return
    theirs = {line.seq: line for line in found.logs.get(source, ())}
    if act.name != "rename" and not journal.ends(source, act.began):
        for seq in range(max(first, min(theirs, default=1)), upto + 1):
            mine, its = ours.get(seq), theirs.get(seq)
            if (
                its is not None
                and its.kind in CONTENT
                and (mine is None or mine.payload != its.payload)
            ):
                yield Failure(label, new, f"record {seq} of {new} is {mine}, in {source} {its}")
                return


def judge_rollback(found: Found, act: Act) -> Iterator[Failure]:
    """After a rollback a session is what it was at its checkpoint."""
    id = act.ids[0]
    log = whole_log(found, id, found.logs.get(id, []))
    if not log or not isinstance(act.result, str):
        return
    made = int(act.result.rpartition(" as ")[2])
    checkpoints = {line.value["id"]: line for line in log if line.kind == "checkpoint"}
    mine, old = checkpoints.get(made), checkpoints.get(int(act.result.split()[1]))
    if (
        mine is None
        or old is None
        or mine.value["label"] != f"rollback::{old.value['label']}#{old.value['id']}"
    ):
        return  # of an earlier life
    if old.value["state"].get("of") != "session":
        return
    then = fold([line for line in log if line.seq <= old.value["event_seq"]])
    now = fold([line for line in log if line.seq < mine.seq])
    if how := then.difference(now, "context", "memory", "state"):
        yield Failure("rollback-differs", id, f"{act.told()}: {how}")


def judge_reads(journal: Journal) -> Iterator[Failure]:
    """A read shows what was durable before it, where nothing may have taken that away."""
    for act in journal.acts.values():
        if act.name != "read" or act.outcome != HAPPENED:
            continue
        id = act.ids[0]
        if any(
            id in one.ids
            for one in journal.named(
                "delete", "forget", "rename", "rollback", "retract", "named turn", "failed turn"
            )
        ):
            continue
        kin = journal.kin(id)
        if any(
            kin & set(one.ids)
            for one in journal.named("rollback", "retract", "named turn", "failed turn")
        ):
            continue
        seen = set(act.result or ())
        for token in journal.tokens.values():
            if (
                token.id == id
                and token.seq
                and token.durable < act.began
                and token.text not in seen
            ):
                yield Failure(
                    "read-stale", id, f"{token.text} was durable before {act.told()[:80]}"
                )
                break


def without_consequences(journal: Journal, failures: list[Failure]) -> list[Failure]:
    """Leave out what follows from a copy that is not what its source was."""
    broken = {one.id for one in failures if one.label.endswith("-not-equal")}
    spread = set(broken)
    for act in journal.acts.values():
        if act.name in TAKES and act.ids[0] in spread:
            spread.add(act.ids[1])
    kept = [
        one
        for one in failures
        if one.id not in spread or one.label.endswith(("-not-equal", "-lost"))
    ]
    return list(dict.fromkeys(kept))


__all__ = ["Content", "Failure", "Found", "Line", "Mapping", "fold", "judge", "shown"]
