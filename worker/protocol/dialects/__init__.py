"""The HTTP APIs (dialects): one module per API with the schemas of its requests and responses.

The request readers of the worker take types and ranges from these tables, and the OpenAPI document is written from
them, so both agree. Imports worker.protocol and the standard library only.
"""

from enum import Enum


class Dialect(Enum):
    """One API dialect."""

    OPENAI = "openai"
    LLAMA_SERVER = "llama_server"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    RESPONSES = "responses"
    LMI = "lmi"
    ERICLLM = "ericllm"
    FASTCHAT = "fastchat"
    ADMIN = "admin"
