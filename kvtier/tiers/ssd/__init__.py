"""The SSD tier: blocks packed into append-only files, read and written past the page cache.

::

store.py      SsdTier: what the tier does
index.py      which block is where, in numpy columns
segment.py    one file: its header page, its records, its footer
record.py     one block in a segment, byte by byte
recovery.py   from the files of a directory back to segments and index
disk.py       the only calls to the operating system
"""

from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.store import Durability, SsdOptions, SsdTier

__all__ = ["DirectIO", "Durability", "SsdOptions", "SsdTier"]
