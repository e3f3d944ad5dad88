"""The SSD tier: blocks packed into append-only files, read and written past the page cache.

::

store.py       SsdTier: what the tier does
options.py     what it may be told
append.py      writing                        reclaim.py   keeping what is read when space is made
fetch.py       reading                        victim.py    which segment goes
purge.py       erasing                        volume.py    what the file system has left
quarantine.py  marking what is damaged        budget.py    what may be written in a day
scrub.py       looking for damage             verdict.py   is a record what it says?
presence.py    is it still our directory?     recovery.py  from files back to segments and index
fsck.py        a store that nobody has open   checkup.py   all records of one of its files
index.py       which block is where, in numpy columns
pool.py        the segments there are
segment.py     one file: its header page, its records, its footer
resync.py      the next record behind a bad one
record.py      one block in a segment, byte by byte
disk.py        the only calls to the operating system
"""

from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import Durability, SsdOptions
from kvtier.tiers.ssd.store import SsdTier

__all__ = ["DirectIO", "Durability", "SsdOptions", "SsdTier"]
