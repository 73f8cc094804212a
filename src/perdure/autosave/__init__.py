"""Autosave: when to save, over any store. Versions, deadlines, retries and shutdown.

`core`, `schedule` and `tracked` decide (pure, every method takes ``now``); `timer`, `writer`,
`jobs` and `engine` do (tasks, timers, the store); `reports` describes. Nothing here knows what a
record means.
"""
