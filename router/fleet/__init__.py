"""Workers and leases: fleet, worker lifecycle, admission queue, failures and back-off, load cost, prefetch.

May import store and everything below it. The fleet decides and records in one step; worker lifecycles act.
"""
