"""Memory estimates: the bytes of a model on each device, from checkpoint headers, traces and earlier loads.

May import launch, config and everything below them. `learned` and `checkpoint` read and write files; the other modules
are pure.
"""
