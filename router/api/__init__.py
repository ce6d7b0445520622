"""Responses of the router itself, one module per API: lists of models, loads, health, logs. No tokens are computed.

May import registry and everything below it.
"""
