"""Checkpoints of a session, and the kernel events between them.

Decisions are pure (`chain`, `chunks`, `tree`, `difference`, `retention`); `engine` acts. What it
needs of a session it asks of a `Journal`, so nothing here knows sessions or stores.
"""
