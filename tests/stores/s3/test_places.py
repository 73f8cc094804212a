"""Who comes late finds its place taken, also after commits were merged away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from perdure.errors import LeaseHeldError, StoreUnavailableError
from perdure.records.manifest import FoldedDocument, Manifest
from perdure.records.records import MESSAGE, Entry
from perdure.store import Batch, Status
from perdure.stores.objects import documents, layout, leases, log, reader
from perdure.stores.objects.log import ObjectLogWriter
from tests.stores.s3.schedules import KEY, Requests, World, acquire, take, texts_of

FOLDER = layout.folder_of(KEY)


@pytest.fixture(autouse=True)
def merged_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MIN_COMMITS", 1)


class Late(Requests):
    """Something happens right before the next write of a name that fits."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.before: Any = None
        self.lose = False

    def create(self, name: str, data: bytes) -> str | None:
        happens, self.before = self.before, None
        if happens is not None and "/log/" in name:
            happens()
        tag = super().create(name, data)
        if self.lose and "/log/" in name:
            self.lose = False
            raise StoreUnavailableError("no answer in time", unwritten=False)
        return tag


@pytest.fixture
def bucket() -> Any:
    return Late(World(0, faults=0))


def batch(writer: ObjectLogWriter, first: int, *texts: str) -> Batch:
    return Batch(
        KEY, writer.epoch, first, tuple(Entry(MESSAGE, b'"%b"' % t.encode()) for t in texts)
    )


def append(writer: ObjectLogWriter, *texts: str) -> None:
    """Append each text in a commit of its own."""
    for text in texts:
        assert writer.append(batch(writer, writer.head + 1, text)).status is Status.OK


def fold(bucket: Any, writer: ObjectLogWriter, data: bytes) -> None:
    folded = {"x.json": FoldedDocument.of(writer.head, data)}
    manifest = Manifest(key=KEY, epoch=writer.epoch, as_of_seq=writer.head, documents=folded)
    documents.fold(bucket, writer, {"x.json": data}, manifest)


def objects(bucket: Any) -> list[int]:
    return [layout.first_of(one.name) for one in bucket.listed(f"{FOLDER}/log/")]


def test_an_append_that_slept_through_a_takeover_and_a_merge_is_refused(bucket: Any) -> None:
    other = Requests(bucket.world)
    old = take(bucket, 0, "old")
    append(old, "a", "b", "c")

    def meanwhile() -> None:
        new = take(other, 1, "new")  # type: ignore[arg-type]
        append(new, "d", "e", "f")
        documents.compact(other, new)  # type: ignore[arg-type]
        assert objects(other) == [1, 4, 5, 8]  # epoch records, what lies before one, the newest

    bucket.before = meanwhile
    outcome = old.append(batch(old, 5, "lost"))
    assert outcome.status is Status.CONFLICT
    assert old.append(batch(old, 5, "lost")).status is Status.CONFLICT
    assert texts_of(bucket, None) == ["a", "b", "c", "d", "e", "f"]


def test_a_resend_behind_a_takeover_and_a_merge_is_told_the_truth(bucket: Any) -> None:
    """The answer was lost, the records were not: the same again is OK, and more is refused."""
    other = Requests(bucket.world)
    for again, status in ((("b",), Status.OK), (("b", "more"), Status.CONFLICT)):
        bucket.world.objects.clear()
        old = take(bucket, 0, "old")
        append(old, "a")
        bucket.lose = True
        assert old.append(batch(old, 3, "b")).status is Status.IN_DOUBT
        new = take(other, 1, "new")  # type: ignore[arg-type]
        append(new, "c", "d")
        documents.compact(other, new)  # type: ignore[arg-type]
        assert 3 in objects(other)  # its place is kept, its records lie in a segment
        assert old.append(batch(old, 3, *again)).status is status
        assert texts_of(bucket, None) == ["a", "b", "c", "d"]


def test_an_answer_that_was_lost_doubles_nothing(bucket: Any) -> None:
    writer = take(bucket, 0, "one")
    bucket.lose = True
    assert writer.append(batch(writer, 2, "a", "b")).status is Status.IN_DOUBT
    assert writer.append(batch(writer, 2, "a", "b", "c")).status is Status.OK
    assert writer.append(batch(writer, 5, "d")).status is Status.OK
    assert texts_of(bucket, None) == ["a", "b", "c", "d"]


def test_a_sender_that_changes_its_mind_after_a_lost_answer_is_refused(bucket: Any) -> None:
    writer = take(bucket, 0, "one")
    bucket.lose = True
    assert writer.append(batch(writer, 2, "a")).status is Status.IN_DOUBT
    assert writer.append(batch(writer, 2, "other")).status is Status.PERMANENT
    assert texts_of(bucket, None) == ["a"]


def test_a_taker_that_slept_through_a_merge_takes_its_record_back(bucket: Any) -> None:
    """The place that it saw free was taken, and made free again, while it slept."""
    other = Requests(bucket.world)
    holder = take(other, 0, "holder")  # type: ignore[arg-type]
    append(holder, "a")

    def meanwhile() -> None:
        append(holder, "b", "c", "d")
        documents.compact(other, holder)  # type: ignore[arg-type]
        assert objects(other) == [1, 5]

    bucket.before = meanwhile
    with pytest.raises(LeaseHeldError):
        take(bucket, 1, "sleeper")
    assert objects(other) == [1, 5]
    append(holder, "e")
    assert texts_of(bucket, None) == ["a", "b", "c", "d", "e"]
    assert take(bucket, 1, "sleeper").epoch_seq == 7


def test_a_taker_that_slept_through_a_delete_takes_its_record_back(bucket: Any) -> None:
    from perdure.stores.objects import documents

    other = Requests(bucket.world)
    holder = take(other, 0, "holder")  # type: ignore[arg-type]
    append(holder, "a")
    bucket.before = lambda: documents.delete(other, holder)  # type: ignore[arg-type]
    with pytest.raises(LeaseHeldError):
        take(bucket, 1, "sleeper")
    assert texts_of(bucket, None) == []
    new = take(bucket, 1, "sleeper")
    assert (new.epoch, new.epoch_seq, new.generation) == (2, 1, 2)
    append(new, "b")
    assert texts_of(bucket, None) == ["b"]


def test_a_taker_that_died_between_its_two_steps_blocks_nobody(bucket: Any) -> None:
    class Dies(Requests):
        def replace(self, name: str, data: bytes, tag: str) -> str | None:
            raise StoreUnavailableError("gone", unwritten=True)

    holder = take(bucket, 0, "holder")
    append(holder, "a")
    with pytest.raises(StoreUnavailableError):
        take(Dies(bucket.world), 1, "dies")  # type: ignore[arg-type]
    assert holder.append(batch(holder, 3, "late")).status is Status.CONFLICT
    with pytest.raises(LeaseHeldError):
        take(bucket, 1, "next")
    seen = reader.read_head(bucket, KEY)
    assert seen is not None
    assert (seen[0].epoch, seen[0].owner) == (2, "dies")
    new = take(bucket, 2, "next")
    append(new, "b")
    assert texts_of(bucket, None) == ["a", "b"]


def test_a_write_that_arrives_after_its_place_was_merged_away_is_not_read(bucket: Any) -> None:
    writer = take(bucket, 0, "one")
    append(writer, "a", "b", "c")
    name = layout.log_name(FOLDER, 1, 3)
    data = bucket.get(name).data
    documents.compact(bucket, writer)
    assert bucket.get(name) is None
    assert bucket.create(name, data) is not None  # it was under way all the time
    append(writer, "d")
    documents.compact(bucket, writer)
    assert texts_of(bucket, None) == ["a", "b", "c", "d"]
    assert take(bucket, 1, "next").epoch_seq == 6


def test_a_fold_of_an_epoch_that_is_over_takes_nothing_away(bucket: Any) -> None:
    old = take(bucket, 0, "old")
    append(old, "a", "b", "c")
    take(bucket, 1, "new")
    before = dict(bucket.world.objects)
    with pytest.raises(Exception, match="may not write"):
        documents.compact(bucket, old)
    assert before.items() <= bucket.world.objects.items()


def test_merging_again_and_again_keeps_segments_few_and_large(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MAX_SEGMENT", 20_000)
    monkeypatch.setattr(log, "_MARK_EVERY", 1000)
    writer = take(bucket, 0, "one")
    wanted = []
    for round_ in range(120):
        texts = [f"{round_}-{n}-{'x' * 50}" for n in range(3)]
        append(writer, *texts)
        wanted += texts
        documents.compact(bucket, writer)
    seen = reader.read_head(bucket, KEY)
    assert seen is not None
    sizes = [segment.size for segment in seen[0].segments]
    assert max(sizes) <= 20_000
    assert len(sizes) <= 12
    assert all(len(segment.marks) > 5 for segment in seen[0].segments if segment.size > 10_000)
    assert texts_of(bucket, None) == wanted
    for after in range(0, 362, 7):
        assert len(reader.entries(bucket, KEY, after + 1, 361)) == 361 - after


def test_a_head_that_arrives_after_its_sender_gave_it_up_is_not_taken_for_undone(
    bucket: Any,
) -> None:
    from perdure.stores.objects import documents

    late: list[Any] = []

    class LateHead(Requests):
        def replace(self, name: str, data: bytes, tag: str) -> str | None:
            if not late:
                late.append(lambda: self.world.replace(name, data, tag))
                raise StoreUnavailableError("no answer in time", unwritten=False)
            return super().replace(name, data, tag)

    holder = take(bucket, 0, "holder")
    append(holder, "a")
    documents.delete(bucket, holder)
    new = take(LateHead(bucket.world), 1, "new")  # type: ignore[arg-type]
    assert late[0]() is None  # it finds another head
    append(new, "b")
    assert texts_of(bucket, None) == ["b"]
    assert take(bucket, 2, "next").epoch_seq == 3


@pytest.mark.parametrize("what", ["nothing", "append", "fold"])
def test_what_was_written_between_the_reads_and_the_take_is_not_missed(
    bucket: Any, what: str
) -> None:
    holder = take(bucket, 0, "holder")
    append(holder, "a")
    fold(bucket, holder, b"old")
    other = Requests(bucket.world)

    def meanwhile() -> None:
        if what != "nothing":
            append(holder, "b")
        if what == "fold":
            fold(other, holder, b"new")

    bucket.before = meanwhile
    found = documents.found(bucket, acquire(bucket, 1, "taker"), whole=True)
    if what == "fold":
        assert found is None
        read = documents.documents(bucket, KEY, None)
        assert read.found["x.json"].data == b"new"
    else:
        assert found is not None
        assert found.documents.found["x.json"].data == b"old"
        assert found.records is not None
        seqs = [record.seq for record in found.records]
        assert seqs == ([3, 4] if what == "append" else [3])


def test_a_taker_follows_a_holder_that_goes_on_writing(bucket: Any) -> None:
    other = Requests(bucket.world)
    holder = take(other, 0, "holder")  # type: ignore[arg-type]
    texts = iter("abcdefgh")

    def meanwhile() -> None:
        text = next(texts, None)
        if text is not None:
            append(holder, text)
            bucket.before = meanwhile

    bucket.before = meanwhile
    taken = take(bucket, 1, "taker")
    assert (taken.epoch, taken.epoch_seq) == (2, 10)
    assert texts_of(bucket, None) == list("abcdefgh")
    assert holder.append(batch(holder, 10, "late")).status is Status.CONFLICT


def test_a_released_head_that_names_an_older_commit_is_followed_to_the_end(bucket: Any) -> None:
    """The answers to the last appends were lost: their writer did not know of them."""
    writer = take(bucket, 0, "one")
    append(writer, "a", "b", "c")
    leases.release(bucket, writer)
    current = reader.read_head(bucket, KEY)
    assert current is not None
    assert current[0].newest == 4
    stale = msgspec.structs.replace(current[0], newest=2)
    assert leases.replace_head(bucket, KEY, current, stale) is not None
    acquired = acquire(bucket, 1, "two")
    plan, new = acquired.plan, acquired.writer
    assert new.epoch_seq == 5
    assert plan is not None
    records = reader.rest_of(bucket, plan, plan.after, whole=False)
    assert records is not None
    assert [record.seq for record in records] == [2, 3, 4, 5]
    append(new, "d")
    assert texts_of(bucket, None) == ["a", "b", "c", "d"]


def test_a_released_session_that_another_one_took_at_half_is_not_taken_twice(bucket: Any) -> None:
    """Its epoch record is where the released head says that the log ends."""

    class Dies(Requests):
        def replace(self, name: str, data: bytes, tag: str) -> str | None:
            raise StoreUnavailableError("gone", unwritten=True)

    writer = take(bucket, 0, "one")
    append(writer, "a")
    leases.release(bucket, writer)
    with pytest.raises(StoreUnavailableError):
        take(Dies(bucket.world), 1, "dies")  # type: ignore[arg-type]
    with pytest.raises(LeaseHeldError):
        take(bucket, 1, "next")
    new = take(bucket, 2, "next")
    assert new.epoch_seq == 4
    append(new, "b")
    assert texts_of(bucket, None) == ["a", "b"]
