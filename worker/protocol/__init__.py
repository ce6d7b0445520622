"""The border between router and workers: messages, routes, and the schemas of all APIs.

Both sides import it, and it imports only the standard library. It is the only part of
`worker` that `router` imports.
"""
