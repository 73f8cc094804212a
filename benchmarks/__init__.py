"""What perdure costs: figures as ratios within one run, so that they travel between machines.

    python -m benchmarks save      a turn's save over a plain write and fdatasync of its bytes
    python -m benchmarks live      one process with very many sessions
    python -m benchmarks imports   importing, and the first connect
    python -m benchmarks restore   opening a long session over a short one
    python -m benchmarks checkpoints  a checkpoint of a long session over a short one

Each has a target, and every run says whether it is met.
"""
