"""Who makes room for whom: block sizes, which share the arena slab by slab.

Theory
------
A block can take the place of another only if both have the same size; else a whole slab has to
change hands. Were that decided by age alone, whoever stores most would in the end have all slabs.
So each size in use has a *fair share*, the slabs divided by the sizes in use. A size below its
share takes from those above theirs; one that has its share makes room among its own blocks. What a
size does not need others may have, and a size that nobody uses any more has no share.
"""

from collections.abc import Mapping, Set

__all__ = ["donors"]


def donors(size: int, slabs_of: Mapping[int, int], in_use: Set[int], num_slabs: int) -> list[int]:
    """Return the block sizes that are to make room for ``size``, first who should first.

    ``slabs_of`` tells how many of the ``num_slabs`` slabs each size has. Changes nothing.

    >>> donors(1, {1: 3, 37: 5}, {1, 37}, 8)
    [37, 1]
    >>> donors(1, {1: 5, 37: 3}, {1, 37}, 8)
    [1, 37]
    >>> donors(1, {1: 5, 37: 3}, {1}, 8)
    [37, 1]
    """
    fair = num_slabs // len(in_use | {size})
    others = sorted(slabs_of.keys() - {size}, key=lambda other: (-slabs_of[other], other))
    idle = [other for other in others if other not in in_use]
    rich = [other for other in others if other in in_use and slabs_of[other] > fair]
    poor = [other for other in others if other in in_use and slabs_of[other] <= fair]
    own = [size] if size in slabs_of else []
    if slabs_of.get(size, 0) < fair:
        return [*idle, *rich, *own, *poor]
    return [*idle, *own, *rich, *poor]
