"""Which models exist and who may use them: names, aliases, shared workers, adapters, API keys, pulls from the hub.

May import fleet and everything below it.
"""
