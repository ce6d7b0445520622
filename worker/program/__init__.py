"""The worker program: entry point and verbs, fork server, process supervision, tensor-parallel ranks.

May import every package of the worker.
"""
