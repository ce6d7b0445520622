"""Processes and devices of one machine: fork server, spawn, stop, heartbeat, reaping, NVML, worker client.

May import planner, errors, events, log and worker.protocol. No module here decides which model runs.
"""
