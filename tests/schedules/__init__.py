"""Random schedules: public operations of many tasks and two processes, judged from the log.

An episode is short: a fresh store, a few sessions, a few dozen operations at once, some of them cancelled, and a process beside
that may be killed or stopped. `journal` is what was asked and answered, `acts` the operations, `episode` runs them, `oracle` reads the
log with a fold of its own and says what cannot be, `search` runs episode after episode. ``python -m tests.explore --schedules`` is the
command.
"""
