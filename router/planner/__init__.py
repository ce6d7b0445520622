"""Which worker starts where, and which models are evicted for it.

PURE: values in, values out. May import errors only.
"""
