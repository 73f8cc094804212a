"""Removing the oldest files of a log: those that lie wholly below a record.

First a mark says which file the log begins with, durably; then the older ones go. The chain of
files is followed as far as it reaches, and may end at the mark: so a kill at any step leaves
a log that reads well, with more of the old in it than was asked for at worst.

Blocking; one hop into a thread.
"""

from __future__ import annotations

import os

from perdure._lib.files import Folder
from perdure.stores.file import chain
from perdure.stores.file.chain import Segment
from perdure.stores.file.layout import LOG, segment_name, segment_of, start_name, start_of
from perdure.stores.file.writing import Writer

__all__ = ["trim"]


def trim(writer: Writer, below: int) -> int:
    """Remove files whose records are all older than one, as the holder; return their bytes.

    Raises:
        LeaseLostError: The session is somebody else's by now.

    """
    with writer.lock:
        folder = writer.folder()
        try:
            writer.require_mine()
            with folder.enter(LOG) as log:
                tip = chain.find_tip(log, writer.key)
                if tip is None:
                    return 0
                first = chain.walk(log, tip, writer.key, down_to=max(below, 1) - 1)[-1]
                return _begin_with(log, first)
        finally:
            writer.rest()


def _begin_with(log: Folder, first: Segment) -> int:
    place = (first.epoch, first.number)
    names = log.names()
    old = [found for found in filter(None, map(segment_of, names)) if found < place]
    if not old:
        return 0
    os.close(log.open(start_name(*place), os.O_WRONLY | os.O_CREAT))
    log.sync()
    for start in filter(None, map(start_of, names)):
        if start < place:
            log.remove(start_name(*start))
    freed = 0
    for segment in sorted(old, reverse=True):  # the chain may end nowhere but at the mark
        name = segment_name(*segment)
        found = log.stat(name)
        if found is not None and log.remove(name):
            freed += found.st_size
    log.sync()
    return freed
