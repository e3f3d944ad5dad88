"""The SSD tier: blocks in append-only segment files, read and written with direct I/O.

::

    store.py          SsdTier: the tier's operations
    options.py        its options
    settings.py       the section [ssd] of the configuration
    backend.py        opens and tunes the tier for the daemon
    space.py          checks that the volume has space for it
    doctor.py         the tier's checks for kvtier doctor
    append.py         writes blocks
    fetch.py          reads blocks
    purge.py          removes and erases blocks
    reclaim.py        moves valuable blocks when space is reclaimed
    victim.py         chooses the segment to reclaim next
    scrub.py          looks for damaged blocks
    damage.py         verifies single records and quarantines damaged ones
    directory.py      locks the directory and checks that it is still there
    store_limits.py   free space of the volume, write budget, age of blocks
    recovery.py       rebuilds segments and index from files
    fsck.py           checks a store that is not open
    segment_check.py  checks all records of one file
    pool.py           the segments of a store
    index.py          location of each block, in numpy columns
    segment.py        one file: its header page, records and footer
    record.py         one block in a segment, byte by byte
    disk.py           all calls to the operating system
"""
