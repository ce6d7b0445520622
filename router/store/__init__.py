"""Files of models on disk: the catalogue, snapshots, the hub cache, converted copies. It loads no weights.

May import memory and everything below it.
"""
