"""Everything that both the router and a worker read: messages, routes, schemas of all APIs, shared constants, tables.

The only part of `worker` that `router` imports. Imports the standard library and nothing else.
"""
