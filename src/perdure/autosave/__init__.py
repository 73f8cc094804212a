"""When to save: versions, deadlines, retries and shutdown, over any store.

`core` decides (pure, every method takes ``now``), `driver` does (tasks, timers, the
store), `wheel` holds timers for a hundred thousand sessions, `shutdown` reports.
Nothing here knows what a record means, or which store it goes to.
"""
