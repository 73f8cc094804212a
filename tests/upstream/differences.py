"""Tests of the SDKs that pass over their own stores and fail over perdure, and why.

By suite; patterns of the tests' names. docs/langgraph.md has what a user notices of it.
"""

_SQL = "it reads or changes SQLite tables of the SDK's"
_SWEEPER = "there is no start_ttl_sweeper(): call sweep_ttl() from a scheduler"

DIFFERENCES: dict[str, dict[str, str]] = {
    "langgraph-checkpoint-sqlite": {
        "tests/test_delta_parent_walk.py::test_walk_step_looks_up*": _SQL,
        "tests/test_writes_task_path_migration.py::*": _SQL,
        "tests/test_store.py::test_nonnull_migrations": _SQL,
        "tests/test_sqlite.py::*::test_checkpoint_search_sql_injection_prevention": (
            "no key of a filter is refused: none becomes SQL"
        ),
        "tests/test_store.py::test_sql_injection_vulnerability*": (
            "no key of a filter is refused: none becomes SQL"
        ),
        "tests/test_sqlite.py::*::test_informative_async_errors": (
            "the saver that has synchronous methods has the asynchronous ones, too"
        ),
        "tests/test_async_store.py::test_no_running_loop*": (
            "a synchronous call on the event loop raises WrongLoopError, not InvalidStateError"
        ),
        "tests/test_ttl.py::test*_ttl_sweeper": _SWEEPER,
        "tests/test_ttl.py::test_ttl_override_default": (
            "a read refreshes an item's time to live unless refresh_on_read is False, as LangGraph's "
            "interface says and its PostgreSQL store does"
        ),
    },
}
