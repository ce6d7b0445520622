"""Workers and leases: fleet, scheduler, worker lifecycles, admission, failures and back-off, load costs, prefetch.

The scheduler decides and records in one step; lifecycles carry it out. May import store and the packages below it.
"""
