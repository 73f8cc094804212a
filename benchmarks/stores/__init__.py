"""Every store under many sessions at once, over what its plain driver does with the same turns.

So many sessions talk at the same time, and every turn is acknowledged durable before the next one
begins. What perdure handed to the store, batch by batch, is replayed with the plain driver: the
same turns encoded in the event loop, in batches of the same sizes, as rows (objects, files) of
the same shape, with the same durability and as many connections, and no fence, lease or
retry. Rounds of the two alternate; a figure is the median over rounds of perdure's rate over
the driver's.

How late the event loop comes is measured beside it, and compared with the same load on the
store in memory, which has nothing to wait for.

For a store on a server, a proxy before it counts the round trips (or commands, or requests) of an
open, a close, and a heartbeat of many idle sessions; see `benchmarks.stores.network`.
"""

from benchmarks.stores.run import Options, run

__all__ = ["Options", "run"]
