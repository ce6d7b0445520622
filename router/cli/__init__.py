"""Command line: `router serve` and the client commands (ps, run, check, estimate, prepare, download).

May import every package of the router.
"""
