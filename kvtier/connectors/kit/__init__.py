"""The connector kit: the parts of an engine connector that are not specific to one engine.

Nothing in this package imports an engine. A connector passes in plain values: paths, tensors,
callbacks.

=================  =============================================================================
``guard``          Hooks that never raise into the engine, and threads for calls that may never
                   return, which do not delay the engine's exit.
``weights``        A fingerprint of a model's weights, from the content of its files.
``adapters``       The same for LoRA adapters, requested once per request.
``chains``         The block hashes of a request, one chain for each rank.
``pages``          KV tensors as bytes: which bytes belong to a block, and in which order.
``copies``         Copies between KV tensors and arena slots; in host memory with NumPy.
``device``         Streams, fences and pinned memory of a GPU.
``device_copies``  Copies between GPU memory and arena slots, through staging buffers.
``residency``      Which tiers hold which blocks, from the changes that a client receives.
=================  =============================================================================

To write a connector, begin with ``kvtier.client``: its module header lists the calls in order.
Then decide what determines a block's content (weights, model configuration, layout, settings) and
build a ``KeySpace`` from it; ``weights`` and ``pages`` provide two of the parts. Guard every hook,
run every blocking call on a thread, and report a block as loaded only if its lease was still valid
after its copy was complete.
"""
