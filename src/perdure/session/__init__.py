"""Sessions, turns and their manager: what users hold.

    the manager          manager, connected, runtime, options, hooks, signals, process_exit
    opening and closing  open, lifecycle, spill, lost, shutdown, crash, clock
    a session            session, base, entries, turn, contents, view
    next to its messages contributors, checkpoints
    other writers        inbox, for any process; internals, for an agent's worker
    folding              fold, rebuild
    as it was            point_in_time, rollback, plain_json
    from outside         exclusive, key_lock, filter; fork, rename, delete, prune, retention
    restores             plan
    other formats        export

The first module of a row is where to begin.
"""
