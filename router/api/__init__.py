"""Responses of the router itself, one module per API: lists of models, loads, health, metrics, logs.

No tokens are computed here. May import registry and everything below it.
"""
