"""The exact memory estimate: the model's own code on meta tensors, with live bytes counted.

May import engines and everything below them.
"""
