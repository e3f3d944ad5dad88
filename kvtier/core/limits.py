"""Every bound in kvtier that is not a setting, each with its reason."""

PAGE_BYTES = 4096
"""Alignment of slots and records: what direct I/O needs on every disk tested so far."""

BANDWIDTH_MIN_BYTES_PER_S = 64 << 20
"""Slower transfers are late: half the speed of gigabit Ethernet, at which a block of an 8B model
takes as long as computing its 64 tokens on a small GPU."""

BLOCK_BYTES_MAX = 0xFFFF_FFFF
"""The index counts a block's bytes in 32 bits; blocks have some megabytes."""

CHAIN_BLOCKS_MAX = 16_384
"""Blocks of one chain: a million tokens in blocks of 64. Their hashes take 256 KiB in a
message; gRPC accepts 4 MiB."""

INDEX_ROWS_MAX = 4_194_304
"""Index entries: 400 MB at about 100 bytes each. More blocks are not admitted."""

SCOPES_WITHOUT_BLOCKS_MAX = 65_536
"""Tenants remembered although they have no blocks left: 20 MB. With a salt per user or
conversation, their number is unlimited."""

SESSIONS_MAX = 64
"""Engines on one node: several times eight GPUs with one rank each."""

LEASES_PER_SESSION_MAX = 256
"""Open leases of one engine: more than the sequences an engine runs at once."""

STORE_ARENA_SHARE = 0.375
"""Share of the arena that all incomplete stores together may hold. With the writes that may be
queued for the two slower tiers, this leaves an eighth, so that a load finds room whatever hangs."""

ENGINE_SHARE = 2
"""One engine may hold twice what is still free in the share for stores, or for loads. A single
engine gets two thirds, and each one that hangs leaves a third to the next. (Switches share their
buffers like that: Choudhury and Hahne, Dynamic queue length thresholds, 1998.)"""

SIZE_KEPT_NS = 600_000_000_000
"""A block size that was not used for ten minutes loses its share of the arena: longer than an
engine pauses between bursts, and soon enough after an engine was stopped."""

DRAINS_MAX = 2
"""Slabs drained at once for a block size that has no other way to get room: two, so that one held
by a hung transfer does not block the size."""

SLAB_VICTIMS_MAX = 64
"""Victims examined to find the slab to drain; after that, any slab that can be drained will do."""

WRITE_ARENA_SHARE = 0.25
"""Share of the arena that may be queued for writing to one slower tier. More is not written there
(counted as throttled), because queued blocks are pinned and cannot be evicted."""

DEMOTION_FREE_SHARE = 0.125
"""While less than this share of the arena is free, blocks that no slower tier holds are demoted."""

DEMOTION_BLOCKS_MAX = 64
"""Blocks offered to slower tiers in one event, accepted or not: eight transfers, some milliseconds.
Everything in the demotion window may be refused, which took eighty at once on a busy machine."""

DEMOTION_WINDOW_SHARE = 0.125
"""How far demotion looks ahead of eviction: while this share of the CPU tier is written to slower
tiers, no more than that is stored, if the tiers keep up at all."""

DEMOTION_WINDOW_BLOCKS = 256
"""Minimum demotion window: the blocks of a long prompt."""

DEMOTION_WINDOW_SHARE_MAX = 0.25
"""Limit of the window in a small tier: a quarter of it, as much as may be queued for writing."""

DEMOTION_WINDOW_BLOCKS_MAX = 4096
"""Maximum demotion window: half a millisecond per scan."""

WANTED_BLOCKS_MAX = 65_536
"""Remembered blocks that were requested twice and not found: 10 MB."""

KEY_SPACES_MAX = 1024
"""Key spaces whose block size in tokens is remembered, for engines that come and go for years."""

LINGERING_STORES_MAX = 65_536
"""Stores remembered until they are old enough to be flushed: 20 MB. At more than two hundred per
second, the oldest are only written on eviction."""

CLOSING_BLOCKS_MAX = 131_072
"""Number of most recent blocks examined when the daemon stops: two seconds of the grace period."""

TRANSFER_BLOCKS = 8
"""Blocks per transfer: enough for few, large operations (24 MB at 3 MB per block), and few enough
that a load hands out the first blocks while the next are still being read."""

TRANSFER_BYTES = 8 << 20
"""A transfer of blocks below 1 MiB has more blocks, up to this size: at 2 MiB per transfer, a drive
waits for us as long as we for it (bench/ssd.py at 256 KiB)."""

TRANSFER_BLOCKS_MAX = 64
"""Maximum number of blocks per transfer: each costs about 50 us of CPU time, however small."""

EXISTENCE_CHECKS_MAX = 256
"""Lookups that wait for a shared tier at once; others are answered from the index."""

EXISTENCE_CHECK_BLOCKS_MAX = 1024
"""Blocks per existence check in a shared tier: 65,536 tokens in blocks of 64."""

EXISTENCE_CHECKS_LATE_MAX = 2
"""After this many late existence checks in a row, lookups stop asking for a while."""

EXISTENCE_CHECK_PAUSE_NS = 250_000_000
"""The first such pause; each further late check doubles it."""

EXISTENCE_CHECK_PAUSE_MAX_NS = 8_000_000_000
"""The longest pause: a server that recovers is used again within seconds."""

ABSENT_NS = 5_000_000_000
"""A block that a shared tier lacked is not queried again this soon: other nodes write computed
blocks within seconds, and a prompt is rarely new on two nodes at once."""

ABSENT_HASHES_MAX = 65_536
"""Hashes remembered as absent: 10 MB."""

EXISTENCE_CHECK_GRACE_NS = 20_000_000
"""Part of a lookup's deadline reserved for answering without a late existence check."""

DROP_GRACE_NS = 250_000_000
"""Part of a drop's deadline reserved for reporting what could not be removed."""

EMPTY_MS = 1000
"""How long an engine skips lookups for a key space without any blocks: the first blocks that
another engine of its kind stores are found this much later."""

VICTIMS_SCANNED_AT_ONCE = 16_384
"""Eviction candidates collected in one pass over the blocks of a size: at 30 ms per pass over a
million blocks, this is below 2 us per eviction."""

VICTIMS_TAKEN_AT_ONCE = 64
"""Blocks evicted together for a call that needs this many slots: one at a time takes five times as
long, and larger batches save little."""

ANNOUNCED_BYTES_MAX = 1 << 18
"""Hashes in one announce call, in bytes: the longest chain. A call is one event of the node,
which blocks all others."""

ANNOUNCED_MAX = 16
"""Requests per announce call: 30 ms at a hundred blocks each."""

ENDED_REQUESTS_MAX = 1024
"""Ended requests per announce call."""

OUTCOMES_MAX = 1024
"""Outcomes per report: the requests of a second."""

STEPS_MAX = 1024
"""Steps per report: those of a second, at a millisecond each."""

OUTCOME_RUNS_MAX = 64
"""Runs of blocks from one tier in an outcome: more than a plan has."""

REQUEST_ID_CHARACTERS_MAX = 128
"""Length of a request id: four times a UUID."""

KIND_CHARACTERS_MAX = 32
"""Length of a request's ``kind``."""

PRIORITY_MAX = 1000
"""Highest priority of a request: more levels than anybody needs."""

GAP_MAX_S = 30 * 86_400
"""Longest gap or time to live that a client may give: a month, longer than any tier below the SSD
keeps blocks that are not requested."""

SAMPLE_MAX_S = 86_400
"""A step, restore or wait reported as longer than a day is a mistake."""

DECISIONS_MAX = 4096
"""Decisions remembered for explanations: some minutes of a busy node, and 8 MB."""

DECISIONS_BYTES_MAX = 32 << 20
"""Size of the chains of these requests: 8 KiB each, a prompt of 32,000 tokens."""

COLD_TIMES_MAX = 65_536
"""Prompts whose measured compute time is kept for comparison with restores: 10 MB."""

OUTCOME_LATE_NS = 600_000_000_000
"""An outcome reported ten minutes after its decision says more about the queue than about it."""

USES_MAX = 65_536
"""Requests remembered so that they count once: 10 MB, and minutes at hundreds per second."""

USE_KEPT_NS = 600_000_000_000
"""A request id that reappears after ten minutes counts again: longer than requests are queued,
shorter than clients take to reuse an id."""

EXPLAINED_RUNS_MAX = 64
"""Runs per tier that an explanation lists; the rest is summed up."""

GHOST_NS = 1_200_000_000_000
"""Blocks that no tier holds are remembered for twenty minutes: after ten, hardly any comes back
that a tier would still hold (conversation trace: no difference between ten minutes and forever)."""

GHOST_BLOCKS_MAX = 1_048_576
"""Maximum number of these ghosts: 200 MB."""

AGED_RUNS_MAX = 256
"""Runs of a history that change their age bin, or are forgotten, in one event: a millisecond. After
a pause, the following events catch up."""

TENANTS_COUNTED_MAX = 4096
"""Tenants whose requests are counted, to find those with enough to learn from: 400 KB."""

KEPT_BLOCKS_MAX = 65_536
"""Blocks in claims that keep them: 20 MB, and 5 ms to count those that are present."""

CLAIMS_MAX = 4096
"""Claims at once: pins, requests with a priority, and announced requests."""

PRIORITY_KEPT_NS = 600_000_000_000
"""How long blocks of a request with a priority are kept without ``ttl_s``: most users who come back
do so within ten minutes."""

ANNOUNCED_KEPT_NS = 60_000_000_000
"""How long blocks of an announced request are kept: an engine that does not start it within a
minute is overloaded."""

PREFETCH_ARENA_SHARE = 0.125
"""Share of the arena that prefetches may fill at once."""

NEXT_VICTIMS_MAX = 512
"""How far demotion looks ahead with a policy that ranks chains: a millisecond, and more than is
evicted until the next time."""

HISTORY_BATCH_BLOCKS = 64
"""Blocks that enter a tier before the history is updated: one block costs as much as a batch."""

FEED_BLOCKS_MAX = 131_072
"""Changes queued for a slow reader: 2 MB. Beyond that, it gets the complete contents again."""

ROWS_TOLD_AT_ONCE = 1024
"""Index rows added or removed for a tier being attached or detached, before requests have their
turn: two milliseconds, and about three seconds for a million blocks."""

FEED_ROWS_AT_ONCE = 16_384
"""Index rows examined for a reader before others have their turn: a millisecond. One message, of
256 KiB, has as many blocks."""

OPEN_FILES_LEAST = 256
"""Open files needed for gRPC, the store, engines and scrapes. gRPC crashes below 30."""

THREADS_LEAST = 32
"""Threads needed for gRPC, the log, the tiers and HTTP: 24 on two cores."""
