"""One module per API: JSON to generation requests, and generated text back to JSON.

May import prompt and everything below it.
"""
