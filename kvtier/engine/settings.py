"""The engine's settings. Device, dtype and context limit belong to the loaded model."""

from dataclasses import dataclass

from kvtier.errors import StartError

__all__ = ["EngineSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes and limits of the engine; raises StartError for contradictory ones."""

    pool_bytes: int = 1 << 30
    """Memory for K and V; what does not fit is recomputed or loaded from the tiers below."""
    pool_tokens: int = 0
    """Size of the pool in tokens; 0: use ``pool_bytes``."""
    engine_block_tokens: int = 16
    """Size of an attention page, as in vLLM: little waste at the end, few enough rows to gather."""
    block_tokens: int = 64
    """Size of a block below the GPU; a multiple of ``engine_block_tokens``."""
    max_batch_tokens: int = 512
    """New tokens per step. More starve decoding sequences; fewer make prefill slower."""
    max_num_sequences: int = 64
    max_num_waiting: int = 1024
    """Further requests are rejected at once: they would wait longer than their clients."""
    age_cap_ns: int = 5_000_000_000
    """After 5 s of waiting, requests are ordered by arrival instead of cached prefix."""
    is_poisoned: bool = False
    """For tests: fill each allocated block with NaN, so that a stale read shows at once."""

    def __post_init__(self) -> None:
        if self.engine_block_tokens < 1 or self.block_tokens % self.engine_block_tokens:
            raise StartError(
                "engine.block_tokens",
                f"{self.block_tokens} is not a multiple of {self.engine_block_tokens}",
                "make it a multiple of engine.engine_block_tokens",
            )
        if self.max_batch_tokens < self.max_num_sequences:
            raise StartError(
                "engine.max_batch_tokens",
                f"{self.max_batch_tokens} is less than one token per sequence",
                f"raise it to at least engine.max_sequences ({self.max_num_sequences})",
            )

    def num_blocks(self, block_bytes: int) -> int:
        """Return the number of blocks in the pool; raises StartError if there would be none."""
        num_blocks = self.pool_bytes // block_bytes
        if self.pool_tokens:
            num_blocks = self.pool_tokens // self.engine_block_tokens
        if num_blocks < 1:
            raise StartError(
                "engine.pool",
                f"{self.pool_bytes} bytes are less than one block ({block_bytes} bytes)",
                f"raise it to at least {block_bytes}",
            )
        return num_blocks
