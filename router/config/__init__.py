"""Settings and presets: INI files, options, precedence, effective settings, XDG folders.

May import planner, errors, events and log.
"""
