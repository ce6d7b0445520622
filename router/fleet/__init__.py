"""Workers and leases: the fleet, worker lifecycles, admission, failures and back-off, load costs, prefetch.

The fleet decides and records in one step; worker lifecycles carry it out. May import store and the packages below it.
"""
