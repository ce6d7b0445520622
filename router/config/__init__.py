"""Configuration: the INI format, presets and their keys, precedence, router options, and watched files.

May import planner, errors, events, log and worker.protocol.
"""
