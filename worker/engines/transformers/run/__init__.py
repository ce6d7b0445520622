"""Model execution: paged and aligned runners, steps in flight, CUDA graphs, self-check, vision, pooling.

May import load, attention, sample, schedule and device of this engine, and worker.interface and everything below it.
"""
