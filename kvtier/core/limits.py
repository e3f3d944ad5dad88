"""Every bound in kvtier that is not a setting, each with its reason."""

__all__ = [
    "ABSENT_HASHES_MAX",
    "ABSENT_NS",
    "AGED_RUNS_MAX",
    "ANNOUNCED_BYTES_MAX",
    "ANNOUNCED_KEPT_NS",
    "ANNOUNCED_MAX",
    "BANDWIDTH_MIN_BYTES_PER_S",
    "BLOCK_BYTES_MAX",
    "CHAIN_BLOCKS_MAX",
    "CLAIMS_MAX",
    "CLOSING_BLOCKS_MAX",
    "COLD_TIMES_MAX",
    "DECISIONS_BYTES_MAX",
    "DECISIONS_MAX",
    "DEMOTION_BLOCKS_MAX",
    "DEMOTION_FREE_SHARE",
    "DEMOTION_WINDOW_BLOCKS",
    "DEMOTION_WINDOW_BLOCKS_MAX",
    "DEMOTION_WINDOW_SHARE",
    "DEMOTION_WINDOW_SHARE_MAX",
    "DRAINS_MAX",
    "DROP_GRACE_NS",
    "EMPTY_MS",
    "ENDED_REQUESTS_MAX",
    "ENGINE_SHARE",
    "EXISTENCE_CHECKS_LATE_MAX",
    "EXISTENCE_CHECKS_MAX",
    "EXISTENCE_CHECK_BLOCKS_MAX",
    "EXISTENCE_CHECK_GRACE_NS",
    "EXISTENCE_CHECK_PAUSE_MAX_NS",
    "EXISTENCE_CHECK_PAUSE_NS",
    "EXPLAINED_RUNS_MAX",
    "FEED_BLOCKS_MAX",
    "FEED_ROWS_AT_ONCE",
    "GAP_MAX_S",
    "GHOST_BLOCKS_MAX",
    "GHOST_NS",
    "HISTORY_BATCH_BLOCKS",
    "INDEX_ROWS_MAX",
    "KEPT_BLOCKS_MAX",
    "KEY_SPACES_MAX",
    "KIND_CHARACTERS_MAX",
    "LEASES_PER_SESSION_MAX",
    "LINGERING_STORES_MAX",
    "NEXT_VICTIMS_MAX",
    "OPEN_FILES_LEAST",
    "OUTCOMES_MAX",
    "OUTCOME_LATE_NS",
    "OUTCOME_RUNS_MAX",
    "PAGE_BYTES",
    "PREFETCH_ARENA_SHARE",
    "PRIORITY_KEPT_NS",
    "PRIORITY_MAX",
    "REQUEST_ID_CHARACTERS_MAX",
    "ROWS_TOLD_AT_ONCE",
    "SAMPLE_MAX_S",
    "SCOPES_WITHOUT_BLOCKS_MAX",
    "SESSIONS_MAX",
    "SIZE_KEPT_NS",
    "SLAB_VICTIMS_MAX",
    "STEPS_MAX",
    "STORE_ARENA_SHARE",
    "TENANTS_COUNTED_MAX",
    "THREADS_LEAST",
    "TRANSFER_BLOCKS",
    "TRANSFER_BLOCKS_MAX",
    "TRANSFER_BYTES",
    "USES_MAX",
    "USE_KEPT_NS",
    "VICTIMS_SCANNED_AT_ONCE",
    "VICTIMS_TAKEN_AT_ONCE",
    "WANTED_BLOCKS_MAX",
    "WRITE_ARENA_SHARE",
]

PAGE_BYTES = 4096
"""Alignment of slots and records: what direct I/O asks for on every disk met so far."""

BANDWIDTH_MIN_BYTES_PER_S = 64 << 20
"""A transfer slower than this is late: half of what gigabit Ethernet carries, at which speed a
block of an 8B model takes as long as its 64 tokens on a small GPU."""

BLOCK_BYTES_MAX = 0xFFFF_FFFF
"""What the index counts a block's bytes in: 32 bits, where blocks are of some megabytes."""

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

DEMOTION_BLOCKS_MAX = 64
"""Blocks offered to slower tiers in one event, taken or not: eight transfers, some milliseconds.
All that demotion looks ahead at may be refused, and took eighty at once on a busy machine."""

DEMOTION_WINDOW_SHARE = 0.125
"""How far demotion looks ahead of eviction: what is stored while so much of the CPU tier is written
below is no more than that, where the tiers keep up at all."""

DEMOTION_WINDOW_BLOCKS = 256
"""And no less far than this: the blocks of a long prompt."""

DEMOTION_WINDOW_SHARE_MAX = 0.25
"""In a small tier no farther than a quarter of it: as much as may wait to be written."""

DEMOTION_WINDOW_BLOCKS_MAX = 4096
"""Nor farther than this: half a millisecond for each look."""

WANTED_BLOCKS_MAX = 65_536
"""Blocks remembered that were asked for a second time and were not there: 10 MB."""

KEY_SPACES_MAX = 1024
"""Key spaces of which the size of a block in tokens is remembered: those of engines that come and
go for years."""

LINGERING_STORES_MAX = 65_536
"""Stores remembered until they are written because they are old: 20 MB. Of more than two hundred a
second the older ones are written when they have to go."""

CLOSING_BLOCKS_MAX = 131_072
"""Blocks looked at when the daemon stops, the latest: two seconds of the grace."""

TRANSFER_BLOCKS = 8
"""Blocks of one transfer: large enough for few large operations (24 MB at 3 MB a block), small
enough that the first blocks of a load are handed out while the next are still being read."""

TRANSFER_BYTES = 8 << 20
"""Of blocks smaller than 1 MiB a transfer takes more, up to this: at 2 MiB a transfer a drive waits
for us as long as we for it (bench/ssd.py at 256 KiB)."""

TRANSFER_BLOCKS_MAX = 64
"""Yet no more than these: a block costs some 50 us of our own, however small."""

EXISTENCE_CHECKS_MAX = 256
"""Lookups that wait for a shared tier at once; beyond it they are answered from what is known."""

EXISTENCE_CHECK_BLOCKS_MAX = 1024
"""Blocks asked of a shared tier in one lookup: 65,536 tokens in blocks of 64."""

EXISTENCE_CHECKS_LATE_MAX = 2
"""After this many late existence queries in a row, lookups stop sending them for a while."""

EXISTENCE_CHECK_PAUSE_NS = 250_000_000
"""The first such pause; each further late query doubles it."""

EXISTENCE_CHECK_PAUSE_MAX_NS = 8_000_000_000
"""The longest pause: a server that recovers is used again within seconds."""

ABSENT_NS = 5_000_000_000
"""A block that a shared tier did not have is not asked for again so soon: other nodes write what
they computed within seconds, and a prompt is rarely new on two nodes at once."""

ABSENT_HASHES_MAX = 65_536
"""Hashes remembered as absent: 10 MB."""

EXISTENCE_CHECK_GRACE_NS = 20_000_000
"""Kept back from a lookup's deadline to answer from the index when an existence query is late."""

DROP_GRACE_NS = 250_000_000
"""Kept back from a drop's deadline to report what could not be removed."""

EMPTY_MS = 1000
"""So long an engine need not ask for what no tier has any of: the first blocks that another engine
of its kind stores are found that much later."""

VICTIMS_SCANNED_AT_ONCE = 16_384
"""Eviction candidates sorted out in one pass over the blocks of a size: 30 ms a pass at a million
blocks is then under 2 us an eviction."""

VICTIMS_TAKEN_AT_ONCE = 64
"""Blocks evicted together for a call that needs so many slots: one at a time costs five times as
much, and more than this saves little."""

ANNOUNCED_BYTES_MAX = 1 << 18
"""Of hashes in one announcing call: the longest chain. A call is one event of the node, and while
it is taken in nobody else is answered."""

ANNOUNCED_MAX = 16
"""Requests of one announcing call: 30 ms, at a hundred blocks each."""

ENDED_REQUESTS_MAX = 1024
"""Ended requests named in one announcing call."""

OUTCOMES_MAX = 1024
"""Outcomes of one report: the requests of a second."""

STEPS_MAX = 1024
"""Steps of one report: those of a second, at a millisecond each."""

OUTCOME_RUNS_MAX = 64
"""Runs of blocks from one tier in an outcome: as a plan has them, with room."""

REQUEST_ID_CHARACTERS_MAX = 128
"""Of a request's id: four times a UUID."""

KIND_CHARACTERS_MAX = 32
"""Of a word for a sort of requests."""

PRIORITY_MAX = 1000
"""The highest priority of a request; more than anybody tells apart."""

GAP_MAX_S = 30 * 86_400
"""The longest gap, or time to live, that a client may name: a month, longer than any tier below
the SSD keeps anything that is not asked for."""

SAMPLE_MAX_S = 86_400
"""A step, a restore or a wait that is said to have taken longer than a day is a mistake."""

DECISIONS_MAX = 4096
"""Decisions remembered to be explained: some minutes of a busy node, and 8 MB."""

DECISIONS_BYTES_MAX = 32 << 20
"""Of the chains of these requests: 8 KiB each, which is a prompt of 32,000 tokens."""

COLD_TIMES_MAX = 65_536
"""Number of prompts whose measured compute time is kept, to compare restores with: 10 MB."""

OUTCOME_LATE_NS = 600_000_000_000
"""An outcome told later than ten minutes after its decision says more of the queue than of it."""

USES_MAX = 65_536
"""Requests remembered so that they count once: 10 MB, and minutes at hundreds a second."""

USE_KEPT_NS = 600_000_000_000
"""A request that is heard of again after ten minutes counts once more: longer than one waits for
its turn, shorter than a client takes to use a name twice."""

EXPLAINED_RUNS_MAX = 64
"""Runs that an explanation names for each tier; with more, the rest is one number."""

GHOST_NS = 1_200_000_000_000
"""Blocks that no tier has are remembered for twenty minutes: after ten, hardly any comes back that
a tier would still have had (conversation trace: no difference between ten minutes and for ever)."""

GHOST_BLOCKS_MAX = 1_048_576
"""Nor are more of them remembered than these: 200 MB."""

AGED_RUNS_MAX = 256
"""Runs of a history that grow older, or are forgotten, in one event: a millisecond. After a pause
the rest follows with the events that come."""

TENANTS_COUNTED_MAX = 4096
"""Tenants whose requests are counted, to tell whose are enough to learn from: 400 KB."""

KEPT_BLOCKS_MAX = 65_536
"""Blocks named by claims that keep them: 20 MB, and 5 ms to see how many of them are here."""

CLAIMS_MAX = 4096
"""Claims at once: pins, requests with a priority, and those that wait for their turn."""

PRIORITY_KEPT_NS = 600_000_000_000
"""How long the blocks of a request with a priority are kept where it names no time: most users who
come back do so within ten minutes."""

ANNOUNCED_KEPT_NS = 60_000_000_000
"""How long the blocks of an announced request are kept for its turn; an engine that does not get to
it within a minute computes sooner than it waits."""

PREFETCH_ARENA_SHARE = 0.125
"""Share of the arena that may be filled at once for nobody who waits."""

NEXT_VICTIMS_MAX = 512
"""How far a policy that ranks chains looks ahead for demotion: a millisecond, and more than is
evicted until the next look."""

HISTORY_BATCH_BLOCKS = 64
"""Blocks that came to a tier before the history is told: telling of one costs as much as of many
together."""

FEED_BLOCKS_MAX = 131_072
"""Changes that wait for a reader who is slow: 2 MB. Beyond, it is told all there is once more."""

ROWS_TOLD_AT_ONCE = 1024
"""Of the index that are learned, or forgotten, of a tier that an operator puts on, or takes off,
before requests have their turn: two milliseconds, and some three seconds for a million blocks."""

FEED_ROWS_AT_ONCE = 16_384
"""Of the index that are looked at for a reader before others have their turn: a millisecond. As
many blocks go in one message, of 256 KiB."""

OPEN_FILES_LEAST = 256
"""Open files needed for gRPC, the store, engines and scrapes. gRPC crashes with less than 30."""

THREADS_LEAST = 32
"""Threads needed for gRPC, the log, the tiers and HTTP: 24 of them on two cores."""
