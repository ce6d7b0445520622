"""The worker program: entry point and verbs, fork server, supervision of the process.

May import every package of the worker.
"""
