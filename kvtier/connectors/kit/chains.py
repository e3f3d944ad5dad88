"""The block hashes of a request: one chain for each rank, over all tokens known so far."""

from collections.abc import Mapping, Sequence

from kvtier.core.identity import BlockHash, chain_root, hash_blocks

__all__ = ["RankChains"]


class RankChains:
    """One chain per rank, all of the same length; hashes differ since key spaces do."""

    def __init__(
        self,
        key_spaces: Sequence[bytes],
        tenant: bytes,
        block_tokens: int,
        extra_keys: Mapping[int, bytes] | None = None,
    ) -> None:
        """``extra_keys`` maps a block's index to what determines its content besides tokens."""
        self._roots = [chain_root(key_space, tenant) for key_space in key_spaces]
        self._chains: list[list[BlockHash]] = [[] for _ in key_spaces]
        self._block_tokens = block_tokens
        self._extra_keys = extra_keys or {}

    def __len__(self) -> int:
        return len(self._chains[0])

    def extend(self, tokens: Sequence[int]) -> None:
        """Hash the blocks that ``tokens`` completes; it begins with the tokens hashed before."""
        first = len(self)
        start = first * self._block_tokens
        if len(tokens) - start < self._block_tokens:
            return
        fresh = list(tokens[start:])
        extra = {index - first: key for index, key in self._extra_keys.items() if index >= first}
        for root, chain in zip(self._roots, self._chains, strict=True):
            parent = chain[-1] if chain else root
            chain.extend(hash_blocks(parent, fresh, self._block_tokens, extra))

    def first(self, num_blocks: int) -> tuple[tuple[BlockHash, ...], ...]:
        """Return the hashes of the leading blocks, by rank."""
        return tuple(tuple(chain[:num_blocks]) for chain in self._chains)
