"""HTTP server: application, request pipeline, proxy to workers, access log, metrics endpoint, OpenAPI, static page.

May import api and all packages below it. Nothing imports http but cli.
"""
