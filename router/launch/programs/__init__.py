"""Programs of helper processes: scripts that are run without the rest of the router (`python -I -S FILE`).

They import few modules of the standard library and nothing else, so that they start in 15 ms and take little memory.
"""
