"""What an engine is set up with. Device, dtype and context limit belong to the loaded model."""

from dataclasses import dataclass

from kvtier.errors import StartError

__all__ = ["EngineSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The engine's sizes and bounds; raises StartError for those that contradict each other."""

    pool_bytes: int = 1 << 30
    """Memory for K and V: what does not fit is computed again or loaded from below."""
    pool_tokens: int = 0
    """The pool's size in tokens instead; 0: by ``pool_bytes``."""
    engine_block_tokens: int = 16
    """A page of attention, as in vLLM: little waste at the end, few enough rows to gather."""
    block_tokens: int = 64
    """A block below the GPU; a multiple of ``engine_block_tokens``."""
    max_batch_tokens: int = 512
    """New tokens of a step. More starve those that decode; fewer make prefill slower."""
    max_num_sequences: int = 64
    max_num_waiting: int = 1024
    """Beyond this, a request is turned away at once: it would wait longer than its client."""
    age_cap_ns: int = 5_000_000_000
    """After 5 s of waiting, arrival counts and the cached prefix does not."""
    is_poisoned: bool = False
    """For tests: fill each block handed out with NaN, so that a stale read shows at once."""

    def __post_init__(self) -> None:
        if self.engine_block_tokens < 1 or self.block_tokens % self.engine_block_tokens:
            raise StartError(
                "engine.block_tokens",
                f"{self.block_tokens} is no multiple of {self.engine_block_tokens}",
                "make it a multiple of engine.engine_block_tokens",
            )
        if self.max_batch_tokens < self.max_num_sequences:
            raise StartError(
                "engine.max_batch_tokens",
                f"{self.max_batch_tokens} is less than a token for each sequence",
                f"raise it to engine.max_sequences ({self.max_num_sequences}) or more",
            )

    def num_blocks(self, block_bytes: int) -> int:
        """Return the blocks of the pool; raises StartError where there would be none."""
        num_blocks = self.pool_bytes // block_bytes
        if self.pool_tokens:
            num_blocks = self.pool_tokens // self.engine_block_tokens
        if num_blocks < 1:
            raise StartError(
                "engine.pool",
                f"{self.pool_bytes} bytes hold no block of {block_bytes}",
                f"raise it to {block_bytes} or more",
            )
        return num_blocks
