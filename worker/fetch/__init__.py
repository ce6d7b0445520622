"""Downloads: fetch, verify and convert model files; the demo models.

May import engines and everything below them. The only package that uses the network.
"""
