"""Every bound in kvtier that is not a setting, each with its reason."""

__all__ = [
    "BANDWIDTH_MIN_BYTES_PER_S",
    "CHAIN_BLOCKS_MAX",
    "DROP_GRACE_NS",
    "INDEX_ROWS_MAX",
    "LEASES_PER_SESSION_MAX",
    "PAGE_BYTES",
    "PROBES_MAX",
    "PROBE_BLOCKS_MAX",
    "PROBE_GRACE_NS",
    "SCOPES_WITHOUT_BLOCKS_MAX",
    "SESSIONS_MAX",
    "STORE_ARENA_SHARE",
    "TRANSFER_BLOCKS_MAX",
    "VICTIMS_SCANNED_AT_ONCE",
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

STORE_ARENA_SHARE = 0.25
"""Share of the arena one engine may hold in stores that it has not completed: a stuck engine must
not take the tier from the others."""

WRITE_ARENA_SHARE = 0.25
"""Share of the arena that may wait to be written to a slower tier. What comes beyond is not
written there (counted as throttled), because a waiting block is pinned and cannot be evicted."""

TRANSFER_BLOCKS_MAX = 8
"""Blocks of one transfer: large enough for few large operations (24 MB at 3 MB a block), small
enough that the first blocks of a load are handed out while the next are still being read."""

PROBES_MAX = 256
"""Lookups that wait for a shared tier at once; beyond it they are answered from what is known."""

PROBE_BLOCKS_MAX = 1024
"""Blocks asked of a shared tier in one lookup: 65,536 tokens in blocks of 64."""

PROBE_GRACE_NS = 20_000_000
"""Kept back from a lookup's deadline to answer with what is known when a probe is late."""

DROP_GRACE_NS = 250_000_000
"""Kept back from a drop's deadline to report what could not be removed."""

VICTIMS_SCANNED_AT_ONCE = 4096
"""Eviction candidates sorted out in one pass over the index: 10 ms a pass at a million rows is then
under 3 us an eviction."""
