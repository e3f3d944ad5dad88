"""Paged attention for transformers' model code.

Theory
------
transformers looks up the attention function by name, and passes every unknown keyword of the
model's forward call to it. So the model's code stays unchanged, and ``batch`` defines where each
token's K and V go in the pool and which blocks each sequence reads.

A batch is flat, (1, total tokens): the new tokens of all sequences, one after another. K and V of
all of them are written with one index operation; then each sequence gathers its blocks and attends
to exactly its own tokens, never to the unused end of its last block.

Measured on two cores (9 heads on 3, head dim 64, float32): reading 375 blocks as rows of one matrix
takes 0.07 ms, as a five-dimensional index 0.34 ms; attention with ``enable_gqa`` takes 0.26 ms for
one token after 2,048, with repeated heads 3.5 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.engine.pool import BlockPool

__all__ = ["ATTENTION_NAME", "AttentionBatch", "Span", "paged_attention", "register_attention"]

ATTENTION_NAME = "kvtier_paged"
"""The value of a model's ``attn_implementation``."""

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Keywords that request a kind of attention which is not implemented here."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a batch: ``num_new`` tokens after ``num_past`` in the pool."""

    num_past: int
    num_new: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Part:
    """A span with the indexes that every layer needs, computed once per batch."""

    start: int
    end: int
    length: int
    block_rows: torch.Tensor
    mask: torch.Tensor | None


class AttentionBatch:
    """Maps the tokens of one forward call to rows of the pool, and attends to them."""

    def __init__(self, pool: BlockPool, spans: Sequence[Span]) -> None:
        self._shape = pool.shape
        self._rows = pool.rows()
        self._token_rows = pool.token_rows()
        device = pool.tensor.device
        tokens_per_block = pool.shape.block_tokens
        block_stride = pool.shape.num_layers * 2  # rows from one block to the next
        write_rows: list[torch.Tensor] = []
        self._parts: list[_Part] = []
        start = 0
        for span in spans:
            end, length = start + span.num_new, span.num_past + span.num_new
            num_blocks = -(-length // tokens_per_block)
            block_rows = torch.tensor(span.blocks[:num_blocks], dtype=torch.int64) * block_stride
            positions = torch.arange(span.num_past, length)
            first_rows = block_rows[positions // tokens_per_block] * tokens_per_block
            write_rows.append(first_rows + positions % tokens_per_block)
            mask = self._causal_mask(span).to(device)[None, None] if span.num_new > 1 else None
            self._parts.append(_Part(start, end, length, block_rows.to(device), mask))
            start = end
        self.num_tokens = start
        self._write_rows = torch.cat(write_rows).to(device)

    def _causal_mask(self, span: Span) -> torch.Tensor:
        """Return the additive mask: a new token sees the past, itself and new tokens before it."""
        length = span.num_past + span.num_new
        mask = torch.full((span.num_new, length), float("-inf"), dtype=self._shape.dtype)
        return mask.triu_(diagonal=span.num_past + 1)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the new tokens' K and V of one layer to the pool.

        Each has the shape (1, KV heads, tokens, head dim).
        """
        tokens_per_block = self._shape.block_tokens
        for is_value, states in enumerate((key, value)):
            rows = self._write_rows + (layer * 2 + is_value) * tokens_per_block
            self._token_rows.index_copy_(0, rows, states[0].transpose(0, 1).flatten(1))

    def attend(self, layer: int, query: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Return the attention of (1, heads, tokens, head dim) as (1, tokens, heads, head dim)."""
        outputs = [
            scaled_dot_product_attention(
                query[:, :, part.start : part.end],
                self._read(part, layer * 2),
                self._read(part, layer * 2 + 1),
                attn_mask=part.mask,
                scale=scaling,
                enable_gqa=True,
            )
            for part in self._parts
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return joined.transpose(1, 2)

    def _read(self, part: _Part, row: int) -> torch.Tensor:
        """Return one sequence's K or V of one layer as (1, KV heads, length, head dim)."""
        gathered = self._rows.index_select(0, part.block_rows + row)
        states = gathered.view(-1, self._shape.num_kv_heads, self._shape.head_dim)[: part.length]
        return states.transpose(0, 1)[None]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    batch: AttentionBatch,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Write the batch's K and V and attend to the pool: transformers' attention interface."""
    assert attention_mask is None, "the batch alone determines the mask"
    assert batch.num_tokens == query.shape[2], "the batch must describe every token"
    wanted = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    assert not wanted, f"the model needs {wanted}, which loading should have refused"
    layer = module.layer_idx
    assert isinstance(layer, int)
    batch.write(layer, key, value)
    return batch.attend(layer, query, scaling), None


def _no_mask(*_args: object, **_kwargs: object) -> None:
    """Return no mask: transformers would treat the flat batch as one sequence."""


def register_attention() -> None:
    """Register ``ATTENTION_NAME`` in transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
