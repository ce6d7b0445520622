"""The worker's HTTP server: it authenticates requests, calls the API function of the route, and writes the response.

May import `worker.api` and every package below it.
"""
