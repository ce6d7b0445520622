"""Sampling: from logits to tokens, with top-k search, grammar masks and copies to the host.

May import schedule and device of this engine, and worker.interface and everything below it.
"""
