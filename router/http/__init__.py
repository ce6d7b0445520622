"""HTTP server: application, transports, request pipeline with its access log, proxy to workers.

May import api and all packages below it. Nothing imports http but cli.
"""
