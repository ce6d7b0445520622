"""From messages to tokens and back: chat templates, tools, reasoning, sampling options, guided decoding, logprobs.

May import the engine interface and everything below it.
"""
