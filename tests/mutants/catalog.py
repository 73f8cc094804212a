"""The mutants that are known by name, and which tests may notice those of each group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One or more changes that are made together."""

    name: str
    group: str
    changes: tuple[tuple[str, str], ...]
    """Each a function and an operator, as `operators` describes them."""

    def __str__(self) -> str:
        return f"{self.name} ({' + '.join(f'{where}: {how}' for where, how in self.changes)})"


@dataclass(frozen=True)
class Group:
    """A part of the library."""

    tests: tuple[str, ...]
    """Below tests/: what may notice its mutants, the likeliest first."""
    packages: tuple[str, ...]
    """Below perdure: where a seed draws from. A part of a name is no part of a package."""
    last: tuple[str, ...] = ()
    """Tests that take long and start processes: for what has survived all others."""
    options: tuple[str, ...] = ()
    """For pytest."""


GROUPS = {
    "properties": Group(
        ("properties/test_autosave.py", "properties/test_autosave_core.py"),
        (),
        options=("--hypothesis-profile=many",),
    ),
    "autosave": Group(("autosave", "session", "properties"), ("autosave",)),
    "files": Group(
        (
            "stores/file",
            "stores/test_file_takeover.py",
            "records",
            "_lib",
            "conformance/test_file.py",
            "cli/test_salvage.py",
        ),
        ("stores.file", "records.records", "_lib.files"),
        tuple(
            f"crash/test_crash.py::{name}"
            for name in (
                "test_a_cut_of_power_after_any_call_loses_nothing",
                "test_a_holder_that_was_stopped_at_any_call_writes_nothing_behind_the_seal",
                "test_holders_that_were_stopped_one_after_the_other_keep_the_seal",
                "test_a_kill_at_any_call_loses_nothing",
            )
        ),
    ),
    "sqlite": Group(
        ("stores/sqlite", "conformance/test_sqlite.py", "cli/test_integrity.py"), ("stores.sqlite",)
    ),
    "lease": Group(("lease", "session", "conformance/test_file.py"), ("lease",)),
    "restore": Group(
        ("restore", "stores/test_opening.py", "session", "stores/wrapped"), ("restore",)
    ),
    "checkpoints": Group(("checkpoints", "session"), ("checkpoints",)),
    "agent": Group(
        (
            "agent",
            "archive/test_agent_home.py",
            "config",
            "memory",
            "providers/test_streams.py",
            "session/test_slips.py",
        ),
        ("agent",),
    ),
    "wrapped": Group(("stores/wrapped", "conformance/test_wrapped.py"), ("stores.wrapped",)),
}

_KNOWN = """
properties
no-longest-delay  Schedule.due_at : drop assign due 3
longest-delay-at-the-next-change  Schedule.due_at : set assign due 3 min(due, first + o.max_delay * t.earliness) if first + o.max_delay < t.last_at else due
clean-once-written  Core._ok : set assign t.durable 1 t.version && Core._ok : set assign t.records 1 None
edits-while-saving-forgotten  Core._ok : drop call arm 1
no-retry  Core._failed : drop call arm 1
the-first-change-at-zero  Core.append : set compare 6 not t.first_at
a-group-in-parts  Autosaver.grouped : drop call hold 1 && Autosaver.grouped : drop call release 1
all-waiters-woken  Tracked.take_waiters : set assign due 2 len(waiters) && Autosaver._durable : once while 1
waiters-never-leave  Autosaver._woken : drop call drop_waiter 1
waiters-not-woken  Writer._settle_one : drop call wake 1
two-saves-at-a-time  Schedule.arm : without bool 1 2
jitter-to-later  Core.__init__ : swap arith 2 +
slots-rounded-up  Wheel.add : set arith 1 (self._order[0] + 1) * self.width
a-timeout-is-a-success  Writer._carry : set call in_doubt 1 Outcome(Status.OK)
a-crash-is-a-success  autosave:outcome_of : set return 3 Outcome(Status.OK)
save-waits-for-the-debounce  Schedule.due_at : without bool 1 3
ready-but-nobody-told  Schedule.arm : drop assign self.nudged 1
bytes-never-given-back  Core._ok : drop assign self.registry.dirty_bytes 1
a-job-beside-a-save  BackgroundJobs._until_free : never test 1
a-save-beside-a-job  BackgroundJobs._run : drop call hold 1 && BackgroundJobs._run : drop call release 1
contributors-hold-for-ever  Core.prepared : drop assign t.preparing 1
one-batch-and-no-more  Writer.begin : once while 1 && Autosaver._settled : drop call _begin_due 1
records-sent-from-the-start  Core._take : set compare 4 count >= len(records)
a-failure-makes-it-younger  Core.completed : set assign t.first_at 1 now
held-back-but-captured  Schedule.arm : without bool 2 1
quarantine-weighs-nothing  Core._leave : without bool 1 1
a-refused-group-hides-others  Core._refused : set assign t.narrow 1 0
lost-but-ready  Core._leave : drop call drop 1
a-prefix-twice  Core._take : set arith 3 max(t.durable, 1)

autosave
as1  Core.capture : without bool 1 3
as2  Core._take : set assign t.hurry 1 False
as3  Core._take : never test 1
as4  Core.completed : drop assign t.first_at 1
as5  Core.completed : never if 5
as6  Core._failed : take call max 1 2
as7  Core._ok : drop assign self.registry.dirty_bytes 1
as8  Core._refused : swap compare 1 <=
as9  Core.hold : drop call drop 1
as10 Schedule.arm : without bool 1 2
as12 Schedule.due_at : drop assign due 3
as13 Schedule.due_at : set name t.last_at 1 first
as14 Schedule.due_at : take call max 1 1
as15 Schedule.arm : plus assign slot 1
as16 Schedule.arm : swap compare 7 <=
as17 Schedule.flush : drop assign self._due_before 1
as18 Schedule.make_urgent : drop assign t.retry_at 1
as19 Schedule.backoff_cap : never test 1
as20 Schedule.control : take call min 2 2
as21 Breaker.failed : swap compare 2 <=
as22 Breaker.allowance : without bool 1 2
as23 Breaker.succeeded : drop assign self.failed_in_a_row 1
as24 Core.append : without bool 2 2
as25 Core._admit : double name self.engine.quarantine_bytes 1
as26 Core._fill : take arith 1 1
as27 whole_groups : without bool 1 1
as28 whole_groups : take arith 1 1
as30 Writer._settle : drop return 1
as31 Writer._settle : set name CHUNK 1 1000
as32 Autosaver.untrack : set assign ended 1 True
as33 Autosaver.flush : drop call ask_quiet 1
as34 Autosaver._stop : drop call ask_quiet 1
as35 Autosaver._stop : drop call seal 1
as36 Autosaver._stop : drop assign self._core.stopped 1
as37 Wheel.pop : set arith 1 (self._order[0] + 1) * self.width
as38 SessionRegistry.blocking : without bool 1 1

files
f1  file:LogWriter._write_to : drop call sync_data 1
f2  file:LogWriter._write_to : drop with 1
f3  file:LogWriter._write_to : drop call drop_cache 1 && file:LogWriter._write_to : drop call _abandon_tail 2
f4  file:LogWriter._append : drop if 3
f5  file:LogWriter._new_entries : always if 2
f6  file:LogWriter._tail_file : swap compare 3 >=
f7  file:LogWriter._write_to : never if 1
f8  file:LogWriter._require_fit : without bool 1 2
f9  file:LogWriter._write : without bool 1 2
f10 Fence.is_valid : drop if 1
f11 Fence.is_valid : without bool 1 2
f12 remove_lower_leases : set call sorted 1 sorted(filter(None, map(LEASE.epoch, names)), reverse=True)
f13 _Taking._seal : drop call sync_file 1
f14 _Taking._seal : never if 1
f15 _Taking._begin_epoch : drop call sync_path 1
f16 create_segment : drop call sync_data 1
f17 create_segment : drop call sync 1
f18 _Taking._begin_epoch : drop call require_folded 1
f19 file:write : drop call sync 1
f20 file:write : drop call sync 2
f21 file:write : drop call require_held 2
f22 file:write : drop call sync 3
f23 file:_document : without bool 1 2
f24 file:plan : drop if 1
f25 file:_newest_span : never if 5
f26 records:_record : set call int 1 -1 && records:_record : swap compare 3 ==
f27 records:_record : without bool 1 3
f28 Folder.publish : drop call sync 1
f29 Folder.write_temporary : never if 1
f30 Folder._open : drop call fchmod 1
f31 Folder._mkdir : drop call sync 1
f32 _require_private : set name _OTHERS_WRITE 1 stat.S_IWOTH

sqlite
q1  sql:do_save : without and 2
q2  sql:do_save : without and 4
q3  sqlite:append_one : without bool 1 3
q4  records:new_entries : never if 2
q5  LogReader.take : never if 4
q6  LogReader._verified : set assign is_next 1 True
q7  LogReader._verified : set assign is_within 1 True
q8  sqlite:release : without bool 1 2
q9  sqlite:delete : set call held_row 1 find(con, key)
q10 sqlite:Engine._commit_failed : drop call close 1
q11 sqlite:Engine.transaction : set call execute 1 con.execute("BEGIN")
q12 sqlite:renew_heartbeat : drop call execute 1

lease
l1 OwnerWatch.note_beat : halve name self._ttl 1
l2 OwnerWatch.note_beat : without bool 1 2
l3 Terms.allows : without bool 7 1
l4 acquire_lease : set compare 7 waited > wait + 5
l5 acquire_lease : never if 4
l6 new_posts : set assign new 1 iter(items)

restore
r1  snapshot_of : set compare 3 snapshot.agent_id != key.agent
r2  snapshot_of : swap compare 4 <
r3  snapshot_of : without bool 1 2
r4  _version_problem : swap compare 1 >=
r5  restore:restore : set call min 1 min(since, counted)
r6  restore:_take_in : swap compare 1 >=
r7  restore:_take_in : always if 3
r8  restore:restore : take bool 1 2
r9  restore:restore : drop assign restored.head 1
r10 restore:restore : drop call require_plain 1

checkpoints
c1 problems_of : set compare 2 link.previous != previous and number is None
c2 problems_of : never if 1
c3 problems_of : swap compare 4 <
c4 checkpoints:_compared : swap compare 1 >
c5 _Runs.wrong : without list 1 2
c6 checkpoints:verified : drop assign problems 2
c7 CheckpointChain.apply : drop call _bury 1
c8 CheckpointChain._add : always if 3
c9 checkpoints:replayed : drop call problem 1
c10 checkpoints:verified : drop assign problems 3
c11 _tell_of_checkpoint : without bool 3 3

agent
g1  verdict : set compare 3 effect.state in {'planned', 'begun'}
g2  verdict : without bool 1 1
g3  is_unknown : without list 1 1
g4  verdict : never test 5
g5  AgentLedger._leftovers : without bool 2 2
g6  AgentLedger.answer : set name waiting[-1].id 1 waiting[0].id
g7  _asked : drop call save 1
g8  calls:refusal : set compare 8 not answer
g9  agent:refusal : without bool 2 2
g10 Permissions.verdict : drop if 1
g11 Permissions.block : drop call _forget 2
g12 Agent.deny : drop call save 1
g13 is_intact : set return 1 True
g14 WorkerEventDispatcher.dispatch : exit raise 1
g15 agent:MemoryManager.__init__ : set assign self.builder 1 CompactionSnapshotBuilder()

wrapped
w1 DataKey._associated_data : without list 1 3
w2 DataKey.transform : drop call update 3
w3 wrapped:associated_data : without list 1 5
w4 Compression.decompress : drop if 3
"""


def _parsed(text: str) -> dict[str, Mutant]:
    found: dict[str, Mutant] = {}
    group = ""
    for line in filter(None, text.splitlines()):
        if line in GROUPS:
            group = line
            continue
        name, rest = line.split(maxsplit=1)
        changes = [change.partition(" : ") for change in rest.split(" && ")]
        assert name not in found, name
        found[name] = Mutant(name, group, tuple((to, how) for to, _, how in changes))
    return found


KNOWN = _parsed(_KNOWN)
