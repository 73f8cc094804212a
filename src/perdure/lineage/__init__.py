"""One log for forks and pruned sessions, around any store.

`store` numbers a fork's records behind its parent's and reads both as one log; `history` is what
was moved out of a log.
"""
