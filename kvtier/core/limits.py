"""Every bound in kvtier that is not a setting, each with its reason."""

__all__ = [
    "ABSENT_HASHES_MAX",
    "ABSENT_NS",
    "BANDWIDTH_MIN_BYTES_PER_S",
    "CHAIN_BLOCKS_MAX",
    "DEMOTION_BLOCKS_MAX",
    "DEMOTION_FREE_SHARE",
    "DEMOTION_WINDOW_BLOCKS",
    "DRAINS_MAX",
    "DROP_GRACE_NS",
    "ENGINE_SHARE",
    "INDEX_ROWS_MAX",
    "LEASES_PER_SESSION_MAX",
    "PAGE_BYTES",
    "PROBES_LATE_MAX",
    "PROBES_MAX",
    "PROBE_BLOCKS_MAX",
    "PROBE_GRACE_NS",
    "PROBE_PAUSE_MAX_NS",
    "PROBE_PAUSE_NS",
    "SCOPES_WITHOUT_BLOCKS_MAX",
    "SESSIONS_MAX",
    "SIZE_KEPT_NS",
    "SLAB_VICTIMS_MAX",
    "STORE_ARENA_SHARE",
    "TRANSFER_BLOCKS",
    "TRANSFER_BLOCKS_MAX",
    "TRANSFER_BYTES",
    "VICTIMS_SCANNED_AT_ONCE",
    "VICTIMS_TAKEN_AT_ONCE",
    "WRITE_ARENA_SHARE",
]

PAGE_BYTES = 4096
"""Alignment of slots and records: what direct I/O asks for on every disk met so far."""

BANDWIDTH_MIN_BYTES_PER_S = 64 << 20
"""A transfer slower than this is late: half of what gigabit Ethernet carries, at which speed a
block of an 8B model takes as long as its 64 tokens on a small GPU."""

CHAIN_BLOCKS_MAX = 16_384
"""Blocks of one chain: a million tokens in blocks of 64, and a message of 256 KiB where gRPC takes
4 MiB."""

INDEX_ROWS_MAX = 4_194_304
"""Index entries: at about 100 bytes each, 400 MB. More blocks than that are not admitted."""

SCOPES_WITHOUT_BLOCKS_MAX = 65_536
"""Tenants remembered although none of their blocks is left: 20 MB. With a salt for each user, or
for each conversation, there is no end of them."""

SESSIONS_MAX = 64
"""Engines on one node: eight GPUs with a rank each, several times over."""

LEASES_PER_SESSION_MAX = 256
"""Open leases of one engine: more than the sequences an engine runs at once."""

STORE_ARENA_SHARE = 0.375
"""Share of the arena that all stores together may hold before they are completed. With what may
wait to be written to the two slower tiers that leaves an eighth, so that a load finds room whatever
hangs."""

ENGINE_SHARE = 2
"""Of what stores, or loads, may hold, one engine may hold twice what it leaves to the others. Alone
it so gets two thirds, and each one that hangs leaves a third to the next. (Switches share their
buffers like that: Choudhury and Hahne, Dynamic queue length thresholds, 1998.)"""

SIZE_KEPT_NS = 600_000_000_000
"""A block size that nobody used for ten minutes has no share of the arena any more: longer than
an engine pauses between two bursts, shorter than it takes to miss one that was stopped."""

DRAINS_MAX = 2
"""Slabs emptied at once for a block size that has no other way to room: two, so that one that a
hung transfer holds does not keep the size out."""

SLAB_VICTIMS_MAX = 64
"""Victims looked at to find the slab that is to be emptied; beyond, any that can be is taken."""

WRITE_ARENA_SHARE = 0.25
"""Share of the arena that may wait to be written to one slower tier. What comes beyond is not
written there (counted as throttled), because a waiting block is pinned and cannot be evicted."""

DEMOTION_FREE_SHARE = 0.125
"""While less than this share of the arena is free, blocks that no slower tier has are demoted."""

DEMOTION_BLOCKS_MAX = 16
"""Blocks demoted in one event: two transfers, and tens of microseconds."""

DEMOTION_WINDOW_BLOCKS = 256
"""How far demotion looks ahead of eviction: the blocks of a long prompt."""

TRANSFER_BLOCKS = 8
"""Blocks of one transfer: large enough for few large operations (24 MB at 3 MB a block), small
enough that the first blocks of a load are handed out while the next are still being read."""

TRANSFER_BYTES = 8 << 20
"""Of blocks smaller than 1 MiB a transfer takes more, up to this: at 2 MiB a transfer a drive waits
for us as long as we for it (bench/ssd.py at 256 KiB)."""

TRANSFER_BLOCKS_MAX = 64
"""Yet no more than these: a block costs some 50 us of our own, however small."""

PROBES_MAX = 256
"""Lookups that wait for a shared tier at once; beyond it they are answered from what is known."""

PROBE_BLOCKS_MAX = 1024
"""Blocks asked of a shared tier in one lookup: 65,536 tokens in blocks of 64."""

PROBES_LATE_MAX = 2
"""After so many probes in a row that came late, lookups pause asking."""

PROBE_PAUSE_NS = 250_000_000
"""The first such pause; each further late probe doubles it."""

PROBE_PAUSE_MAX_NS = 8_000_000_000
"""The longest pause: a server that recovers is used again within seconds."""

ABSENT_NS = 5_000_000_000
"""A block that a shared tier did not have is not asked for again so soon: other nodes write what
they computed within seconds, and a prompt is rarely new on two nodes at once."""

ABSENT_HASHES_MAX = 65_536
"""Hashes remembered as absent: 10 MB."""

PROBE_GRACE_NS = 20_000_000
"""Kept back from a lookup's deadline to answer with what is known when a probe is late."""

DROP_GRACE_NS = 250_000_000
"""Kept back from a drop's deadline to report what could not be removed."""

VICTIMS_SCANNED_AT_ONCE = 16_384
"""Eviction candidates sorted out in one pass over the blocks of a size: 30 ms a pass at a million
blocks is then under 2 us an eviction."""

VICTIMS_TAKEN_AT_ONCE = 64
"""Blocks evicted together for a call that needs so many slots: one at a time costs five times as
much, and more than this saves little."""
