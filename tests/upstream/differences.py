"""Tests of the SDKs that pass over their own stores and fail over perdure, and why.

By suite; patterns of the tests' names. docs/langgraph.md has what a user notices of it.
"""

_SQL = "it reads or changes SQLite tables of the SDK's"
_SWEEPER = "there is no start_ttl_sweeper(): call sweep_ttl() from a scheduler"

_CONNECTION = "no connection to a database is handed in: give a session manager"
_CONNECTIONS = "it breaks SQLite connections, or methods that only SQLiteSession has"
_CLOSED = "a session that is closed opens again at its next call"
_LOOP = "a session belongs to the event loop of its first call"
_MEDIA = "media are parts of the messages, and there is no media_store"
_BOUND = "there is no max_snapshots_per_run: a snapshot stores what is new in it"
_SPEC = "a store of perdure's is given as an object, not by the name of a backend"

DIFFERENCES: dict[str, dict[str, str]] = {
    "langgraph-checkpoint-sqlite": {
        "tests/test_delta_parent_walk.py::test_walk_step_looks_up*": _SQL,
        "tests/test_writes_task_path_migration.py::*": _SQL,
        "tests/test_store.py::test_nonnull_migrations": _SQL,
        "tests/test_store.py::test_vector_store_initialization": _SQL,
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
    "pydantic-ai-harness": {
        "tests/step_persistence/test_conversations.py::test_delete_removes_run_data*": (
            "the SDK's own SqliteConversationStore deletes runs in its own database"
        ),
        "*::TestSqliteRowDefenses::*": _SQL,
        "*::TestSqliteListSnapshots::test_skips_corrupt_rows": _SQL,
        "*::test_legacy_database_without_state_column_migrates": _SQL,
        "*::test_failed_state_migration_surfaces*": _SQL,
        "*::test_register_duplicate_run_raises": (
            "the newest registration of a run counts, so that a retry may repeat it"
        ),
        "*::test_shared_connection*": _CONNECTION,
        "*::test_rejects_both_database_and_connection": _CONNECTION,
        "*::TestSqliteStepStoreMedia::*": _MEDIA,
        "*::TestMediaStoreResolution::*": _MEDIA,
        "*::TestRetentionBound::*": _BOUND,
        "*::TestSqliteStorePruneEdgeCases::*": _BOUND,
        "*::TestFromSpecForwarding::*": _SPEC,
        "*::TestFromSpecBackendValidation::*": _SPEC,
        "*::test_keyed_writes_are_idempotent_after_snapshot_pruning": _BOUND,
        "*::test_hard_kill_leaves_model_frontier_and_unknown_effects": (
            "it starts a process of its own, which has the SDK's store"
        ),
    },
    "openai-agents": {
        "*::test_cancelled_*": _CONNECTIONS,
        "*::test_close_retries_*": _CONNECTIONS,
        "*::test_failed_*": _CONNECTIONS,
        "*::test_initialization_*": _CONNECTIONS,
        "*::test_operation_failure_*": _CONNECTIONS,
        "*::test_rollback_failure_*": _CONNECTIONS,
        "*post_commit_cancellation*": _CONNECTIONS,
        "*::test_sqlite_session_close*": _CONNECTIONS,
        "*::test_sqlite_session_failed_*": _CONNECTIONS,
        "*::test_sqlite_session_file_lock_*": _CONNECTIONS,
        "*::test_sqlite_session_keeps_connections_*": _CONNECTIONS,
        "*::test_sqlite_session_reaps_connections_*": _CONNECTIONS,
        "*::test_sqlite_session_rollback_*": _CONNECTIONS,
        "*corrupt*": _SQL,
        "*::test_async_sqlite_session_close*": _CLOSED,
        "*::test_settled_*_failure_invalidates_response_chain*": _CONNECTIONS,
        "*restore*": _CONNECTIONS,
        "tests/extensions/memory/test_encrypt_session.py::*pop*": (
            "EncryptedSession takes what stands in for SQLiteSession for one, and calls its insides"
        ),
        "*same_timestamp*": _SQL,
        "tests/test_tool_batch_failure_history.py::*": _CONNECTIONS,
        "tests/memory/test_session*.py::*run_sync*": _LOOP,
        "*::test_sqlite_session_concurrent_access": _LOOP,
        "*::test_session_limit_drops_unmatched_history_function_call_output*": (
            "get_items(limit) leaves out an output whose call it leaves out, as the Runner does"
        ),
    },
}
