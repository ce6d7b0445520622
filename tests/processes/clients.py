"""The official clients of the APIs, connected to a router of `upstreams.world`."""

from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai

from tests.processes.upstreams import World


def async_openai(up: World, **further: Any) -> openai.AsyncOpenAI:
    client = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(up.socket)))
    options = {"api_key": "k", "max_retries": 0, **further}
    return openai.AsyncOpenAI(base_url="http://localhost/v1", http_client=client, **options)


def async_anthropic(up: World, **further: Any) -> anthropic.AsyncAnthropic:
    client = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(up.socket)))
    options = {"api_key": "k", "max_retries": 0, **further}
    return anthropic.AsyncAnthropic(base_url="http://localhost", http_client=client, **options)


def async_ollama(up: World, **further: Any) -> ollama.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(up.socket))
    return ollama.AsyncClient(host="http://localhost", transport=transport, **further)
