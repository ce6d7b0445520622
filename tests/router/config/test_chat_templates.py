"""Chat templates by llama-server's names: the prompt of one conversation in each, written by hand."""

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.config.chat_templates import FALLBACKS, NAMES, jinja
from router.config.effective import effective
from tests.router.preset_texts import Disk, complaint, one, read

SYSTEM, FIRST, ANSWER, SECOND = " be brief ", "hello ", " hi ", "again"
CHAT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": SECOND},
]
BAR, LOW = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
COLON = "\N{FULLWIDTH COLON}"
EOS = f"<{BAR}end{LOW}of{LOW}sentence{BAR}>"

PROMPTS = {
    "chatml": "<|im_start|>system\n be brief <|im_end|>\n<|im_start|>user\nhello <|im_end|>\n<|im_start|>assistant\n"
    " hi <|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST]  be brief \nhello  [/INST] hi </s>[INST] again [/INST]",
    "llama2-sys": "<s>[INST] <<SYS>>\n be brief \n<</SYS>>\n\nhello  [/INST] hi </s>[INST] again [/INST]",
    "llama2-sys-bos": "<s>[INST] <<SYS>>\n be brief \n<</SYS>>\n\nhello  [/INST] hi </s><s>[INST] again [/INST]",
    "llama2-sys-strip": "<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nhello [/INST]hi</s>[INST] again [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nhello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nagain<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama4": "<s><|header_start|>system<|header_end|>\n\nbe brief<|eot|><|header_start|>user<|header_end|>\n\nhello"
    "<|eot|><|header_start|>assistant<|header_end|>\n\nhi<|eot|><|header_start|>user<|header_end|>\n\nagain<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n",
    "mistral-v1": "<s> [INST]  be brief \n\nhello  [/INST]  hi </s> [INST] again [/INST]",
    "mistral-v3": "<s>[INST]  be brief \n\nhello [/INST] hi</s>[INST] again[/INST]",
    "mistral-v3-tekken": "<s>[INST] be brief \n\nhello [/INST] hi </s>[INST]again[/INST]",
    "mistral-v7": "<s>[SYSTEM_PROMPT]  be brief [/SYSTEM_PROMPT][INST] hello [/INST]  hi </s>[INST] again[/INST]",
    "mistral-v7-tekken": "<s>[SYSTEM_PROMPT] be brief [/SYSTEM_PROMPT][INST]hello [/INST] hi </s>[INST]again[/INST]",
    "gemma": "<s><start_of_turn>user\nbe brief\n\nhello<end_of_turn>\n<start_of_turn>model\nhi<end_of_turn>\n"
    "<start_of_turn>user\nagain<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|system|>\n be brief <|end|>\n<|user|>\nhello <|end|>\n<|assistant|>\n hi <|end|>\n<|user|>\nagain"
    "<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|> be brief <|im_end|><|im_start|>user<|im_sep|>hello <|im_end|>"
    "<|im_start|>assistant<|im_sep|> hi <|im_end|><|im_start|>user<|im_sep|>again<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "zephyr": "<|system|>\n be brief <|endoftext|>\n<|user|>\nhello <|endoftext|>\n<|assistant|>\n hi <|endoftext|>\n"
    "<|user|>\nagain<|endoftext|>\n<|assistant|>\n",
    "vicuna": "<s> be brief \n\nUSER: hello \nASSISTANT:  hi </s>\nUSER: again\nASSISTANT:",
    "vicuna-orca": "<s>SYSTEM:  be brief \nUSER: hello \nASSISTANT:  hi </s>\nUSER: again\nASSISTANT:",
    "openchat": "<s> be brief <|end_of_turn|>GPT4 Correct User: hello <|end_of_turn|>GPT4 Correct Assistant:  hi "
    "<|end_of_turn|>GPT4 Correct User: again<|end_of_turn|>GPT4 Correct Assistant:",
    "deepseek": "<s> be brief ### Instruction:\nhello \n### Response:\n hi \n<|EOT|>\n### Instruction:\nagain\n"
    "### Response:\n",
    "deepseek2": f"<s> be brief \n\nUser: hello \n\nAssistant:  hi {EOS}User: again\n\nAssistant:",
    "deepseek3": f"<s> be brief \n\n<{BAR}User{BAR}>hello <{BAR}Assistant{BAR}> hi {EOS}<{BAR}User{BAR}>again"
    f"<{BAR}Assistant{BAR}>",
    "command-r": "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>be brief<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|USER_TOKEN|>hello<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>hi<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>again<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "falcon3": "<|system|>\n be brief \n<|user|>\nhello \n<|assistant|>\n hi \n<|user|>\nagain\n<|assistant|>\n",
    "granite": "<|start_of_role|>system<|end_of_role|> be brief <|end_of_text|>\n<|start_of_role|>user<|end_of_role|>"
    "hello <|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|> hi <|end_of_text|>\n<|start_of_role|>user"
    "<|end_of_role|>again<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "bailing": "<role>SYSTEM</role> be brief <role>HUMAN</role>hello <role>ASSISTANT</role> hi <role>HUMAN</role>again"
    "<role>ASSISTANT</role>",
    "bailing-think": "<role>SYSTEM</role> be brief <role>HUMAN</role>hello <role>ASSISTANT</role> hi <role>HUMAN</role>"
    "again<role>ASSISTANT</role><think>",
    "bailing2": "<role>SYSTEM</role> be brief <|role_end|><role>HUMAN</role>hello <|role_end|><role>ASSISTANT</role> hi"
    " <|role_end|><role>HUMAN</role>again<|role_end|><role>ASSISTANT</role>",
    "chatglm3": "[gMASK]sop<|system|>\n  be brief <|user|>\n hello <|assistant|>\n  hi <|user|>\n again<|assistant|>",
    "chatglm4": "[gMASK]<sop><|system|>\n be brief <|user|>\nhello <|assistant|>\n hi <|user|>\nagain<|assistant|>\n",
    "deepseek-ocr": "<s> be brief hello  hi again",
    "exaone-moe": "<|system|>\nbe brief<|endofturn|>\n<|user|>\nhello<|endofturn|>\n<|assistant|>\nhi<|endofturn|>\n"
    "<|user|>\nagain<|endofturn|>\n<|assistant|>\n",
    "exaone3": "[|system|]be brief[|endofturn|]\n[|user|]hello\n[|assistant|]hi[|endofturn|]\n[|user|]again\n"
    "[|assistant|]",
    "exaone4": "[|system|]be brief[|endofturn|]\n[|user|]hello\n[|assistant|]hi[|endofturn|]\n[|user|]again\n"
    "[|assistant|]",
    "gigachat": "<s> be brief <|message_sep|>user<|role_sep|>hello <|message_sep|>available functions<|role_sep|>[]"
    "<|message_sep|>assistant<|role_sep|> hi <|message_sep|>user<|role_sep|>again<|message_sep|>available functions"
    "<|role_sep|>[]<|message_sep|>assistant<|role_sep|>",
    "glmedge": "<|system|>\n be brief <|user|>\nhello <|assistant|>\n hi <|user|>\nagain<|assistant|>",
    "gpt-oss": "<|start|>system<|message|> be brief <|end|><|start|>user<|message|>hello <|end|><|start|>assistant"
    "<|message|> hi <|return|><|start|>user<|message|>again<|end|><|start|>assistant",
    "grok-2": "System: be brief<|separator|>\n\nHuman: hello<|separator|>\n\nAssistant:  hi <|separator|>\n\n"
    "Human: again<|separator|>\n\nAssistant:",
    "hunyuan-dense": f"<s> be brief <{BAR}hy_place{LOW}holder{LOW}no{LOW}3{BAR}><{BAR}hy_User{BAR}>hello "
    f"<{BAR}hy_Assistant{BAR}> hi <{BAR}hy_place{LOW}holder{LOW}no{LOW}2{BAR}><{BAR}hy_User{BAR}>again"
    f"<{BAR}hy_Assistant{BAR}>",
    "hunyuan-moe": "<|startoftext|> be brief <|extra_4|><|startoftext|>hello <|extra_0|> hi <|eos|><|startoftext|>again"
    "<|extra_0|>",
    "hunyuan-vl": f"<s> be brief <{BAR}hy_place{LOW}holder{LOW}no{LOW}3{BAR}>hello <{BAR}hy_User{BAR}> hi "
    f"<{BAR}hy_Assistant{BAR}>again<{BAR}hy_User{BAR}>",
    "kimi-k2": "<|im_system|>system<|im_middle|> be brief <|im_end|><|im_user|>user<|im_middle|>hello <|im_end|>"
    "<|im_assistant|>assistant<|im_middle|> hi <|im_end|><|im_user|>user<|im_middle|>again<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
    "megrez": "<|role_start|>system<|role_end|> be brief <|turn_end|><|role_start|>user<|role_end|>hello <|turn_end|>"
    "<|role_start|>assistant<|role_end|> hi <|turn_end|><|role_start|>user<|role_end|>again<|turn_end|>"
    "<|role_start|>assistant<|role_end|>",
    "minicpm": "<s>be brief<用户>hello<AI>hi<用户>again<AI>",
    "monarch": "<s>system\n be brief </s>\n<s>user\nhello </s>\n<s>assistant\n hi </s>\n<s>user\nagain</s>\n"
    "<s>assistant\n",
    "orion": "<s>Human:  be brief \n\nhello \n\nAssistant: </s> hi </s>Human: again\n\nAssistant: </s>",
    "pangu-embedded": f"[unused9]系统{COLON} be brief [unused10][unused9]用户{COLON}hello [unused10]"
    f"[unused9]助手{COLON} hi [unused10][unused9]用户{COLON}again[unused10][unused9]助手{COLON}",
    "rwkv-world": "System: be brief\n\nUser: hello\n\nAssistant: hi\n\nUser: again\n\nAssistant:",
    "seed_oss": "<seed:bos>system\n be brief <seed:eos><seed:bos>user\nhello <seed:eos><seed:bos>assistant\nhi"
    "<seed:eos><seed:bos>user\nagain<seed:eos><seed:bos>assistant\n",
    "smolvlm": "<|im_start|> be brief \n\nUser: hello <end_of_utterance>\nAssistant:  hi <end_of_utterance>\n"
    "User: again<end_of_utterance>\nAssistant:",
    "solar-open": "<|begin|>system<|content|> be brief <|end|><|begin|>user<|content|>hello <|end|><|begin|>assistant"
    "<|content|> hi <|end|><|begin|>user<|content|>again<|end|><|begin|>assistant",
    "yandex": "<s> Пользователь:  be brief \nhello \n\n Ассистент:  hi \n\n Пользователь: again\n\n Ассистент:[SEP]",
}
PROMPTS["granite-4.0"] = PROMPTS["granite-4.1"] = PROMPTS["granite"]


def prompt(name: str, messages: list[dict[str, str]]) -> str:
    # the settings of transformers' chat templates
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.Undefined)
    return environment.from_string(jinja(name)).render(messages=messages, bos_token="<s>", add_generation_prompt=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_llama_server_gives_its_prompt(name: str) -> None:
    assert prompt(name, CHAT) == PROMPTS[name]


def test_some_formats_begin_with_a_system_message_in_any_case() -> None:
    first = "<role>SYSTEM</role>detailed thinking off<|role_end|>"
    assert prompt("bailing2", CHAT[1:2]) == f"{first}<role>HUMAN</role>hello <|role_end|><role>ASSISTANT</role>"
    user = f"[unused9]用户{COLON}hello [unused10]"
    assert prompt("pangu-embedded", CHAT[1:2]) == f"[unused9]系统{COLON}[unused10]{user}[unused9]助手{COLON}"


def test_a_preset_names_a_template() -> None:
    preset = one("chat-template = chatml")
    assert preset.chat_template == jinja("chatml")
    assert ("chat-template", "chatml", "models.ini:3") in effective(preset)
    assert one("chat-template = {{ messages }}").chat_template == "{{ messages }}"


@pytest.mark.parametrize("name", sorted(FALLBACKS))
def test_the_checkpoints_own_template_takes_precedence_over_some_names(name: str) -> None:
    line = f"[m]\nmodel = ./models/qwen\nchat-template = {name}"
    own = Disk()
    own.texts["/etc/llm/models/qwen/tokenizer_config.json"] = '{"chat_template": "{{ messages }}"}'
    loaded = read(line, disk=own)
    assert loaded.presets["m"].chat_template == ""
    (warning,) = map(str, loaded.warnings)
    assert warning.startswith(
        f"models.ini:3: [m] chat-template: the checkpoint's own template takes precedence over {name}"
    )
    assert read(f"[m]\nhf-repo = org/name\nchat-template = {name}").presets["m"].chat_template == ""
    own.texts["/etc/llm/models/qwen/tokenizer_config.json"] = "{}"
    loaded = read(line, disk=own)
    assert (loaded.presets["m"].chat_template, loaded.warnings) == (jinja(name), ())


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{"])
def test_a_damaged_file_may_contain_a_template(content: str) -> None:
    disk = Disk()
    disk.texts["/etc/llm/models/qwen/tokenizer_config.json"] = content
    loaded = read("[m]\nmodel = ./models/qwen\nchat-template = kimi-k2", disk=disk)
    assert loaded.presets["m"].chat_template == ""


def test_a_template_in_a_file_of_its_own_counts_as_the_checkpoints() -> None:
    loaded = read(
        "[*]\nchat-template = kimi-k2\n[m]\nmodel = ./models/qwen\n[n]\nmodel = demo:a",
        disk=Disk("/etc/llm/models/qwen/chat_template.jinja"),
    )
    assert [preset.chat_template for preset in loaded.presets.values()] == ["", ""]
    assert len(loaded.warnings) == 1


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    assert len(set(NAMES)) == 54
    message = complaint("chat-template = chatlm")
    assert message.endswith('"chatlm" is neither Jinja text nor the name of a template; did you mean chatml?')
    assert complaint("chat-template = kimi-k3").endswith("did you mean kimi-k2?")
