"""Model files on disk: snapshots, the hub cache, converted copies.

May import memory and everything below it.
"""
