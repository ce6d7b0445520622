"""The official clients for a worker on TCP."""

import anthropic
import ollama
import openai

from tests.worker.serving import TOKEN, Serving


def openai_client(world: Serving, key: str = TOKEN) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=key, max_retries=0)


def anthropic_client(world: Serving) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=world.url, auth_token=TOKEN, api_key=None, max_retries=0)


def ollama_client(world: Serving) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=world.url, headers={"Authorization": f"Bearer {TOKEN}"})
