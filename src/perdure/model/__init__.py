"""The values of perdure's model: frozen structs, and nothing that acts.

No clock, loop, disk or randomness may come in here.
"""
