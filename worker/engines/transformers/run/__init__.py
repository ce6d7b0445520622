"""Model execution: paged and aligned runners, steps in flight, CUDA graphs, self-check, vision, pooling.

May import load, attention, sample, schedule and device.
"""
