"""A fake engine with a fixed answer that contains reasoning and tool calls."""

from tests.worker.fake_engine import FakeEngine
from tests.worker.serving import tokenizer
from worker.interface import GenerationRequest

# a chat template with tools, in the format of Hermes
TOOLS = (
    "{% if tools %}{{ tools | tojson }} <tool_call>name, arguments</tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# the same for a model that reasons first
THINKING = TOOLS.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}") + "{# </think> #}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
# reasoning, content and a call
SAID = f"They ask for Oslo.</think>\n\nLet me look. {CALL}"
# answers of a reasoning model: with a call, cut in the reasoning, without a call, with two calls
ANSWERS = (SAID, "just thoughts", "</think>\n\nfour words of text", "a</think>" + SAID[26:] * 2)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Speaking(FakeEngine):
    """An engine that answers every request with `text`."""

    def __init__(self, text: str, *, ctx_size: int = 2048):
        super().__init__(tokenizer(), ctx_size=ctx_size)
        self._text = text

    def script(self, request: GenerationRequest, index: int) -> str:
        return self._text

    def prompt(self) -> str:
        """Return the prompt of the last request as text."""
        return str(self.tokenizer.decode(list(self.requests[-1].prompt)))
