"""The worker's HTTP server.

May import api and everything below it.
"""
