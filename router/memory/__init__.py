"""Memory estimates: weights, KV cache, activations, process overhead, sharding, learned estimates, checkpoint reader.

May import launch, config and everything below them.
"""
