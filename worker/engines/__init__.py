"""Engines: what computes tokens inside a worker. Each engine is a package behind `worker.interface`.

May import interface, detokenizer, images, errors and protocol.
"""
