"""Processes and devices of one machine: fork server, spawn, stop, heartbeat, reaping, NVML, worker client.

May import planner, errors, events and log. No module here decides which model runs.
"""
