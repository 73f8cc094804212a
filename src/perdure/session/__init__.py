"""Sessions, turns and their manager: what users hold.

    the manager          manager, connected, runtime, options, hooks, events, signals, process_exit
    a session's life     loading, keeping, flights, spilling, lost, closing, crash, clock
    a session            session, accepting, entries, turn, contents, view, rendering, display
    beside its messages  contributors, states; remembering; checkpointing
    who else writes      inbox, for whoever holds it or not; inside, for an agent's worker
    folding              folding, rebuilding, comparing
    as it was            asof, hindsight, returning, picture
    from outside         lives, tending, choosing; forking, renaming, forgetting, pruning, retention
    forks as one log     lineage, acknowledged, through, read_only, heirlooms, keepsakes, pieces
    where                places
    restores seen        restoring, planned, planning
    other formats        exchange, traced, pairs, remains

The first module of a row is where to begin.
"""
