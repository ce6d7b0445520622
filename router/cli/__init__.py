"""Command line: `router serve` and the client commands (ps, estimate, check, load, prepare, ...).

May import every package of the router.
"""
