"""Sessions, turns and their manager: what users hold.

    the manager          manager, connected, runtime, events, options
    opening and closing  open, lifecycle, spill, shutdown
    a session            session, base, contents
    with its messages    partial, contributors, checkpoints
    what sessions share  scope
    other writers        inbox, for any process; internals, for an agent's worker
    folding              fold, rebuild
    as it was            point_in_time
    the store            stored, media, refused
    from outside         fork, delete, prune, retention
    copies               copier, copied, reach
    restores             plan
    listings             directory
    other formats        export

The first module of a row is where to begin.
"""
