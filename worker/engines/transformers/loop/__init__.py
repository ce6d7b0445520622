"""The step loop and its work: generation or encoding, with the requests that wait and run.

May import run, sample, schedule, load, attention and device of this engine, and worker.interface and everything below
it.
"""
