"""Chat templates by llama-server's names: the prompt of one conversation in each, written by hand."""

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.config.chat_templates import NAMES, NOT_OFFERED, jinja
from router.config.effective import effective
from tests.router.preset_texts import Disk, complaint, complaints, one, read

SYSTEM, FIRST, ANSWER, SECOND = " be brief ", "hello ", " hi ", "again"
CHAT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": SECOND},
]
BAR, LOW = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
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
    "<|end_of_role|>again<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>\n",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_llama_server_gives_its_prompt(name: str) -> None:
    # the settings of transformers' chat templates
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.Undefined)
    template = environment.from_string(jinja(name))
    assert template.render(messages=CHAT, bos_token="<s>", add_generation_prompt=True) == PROMPTS[name]


def test_a_preset_names_a_template() -> None:
    preset = one("chat-template = chatml")
    assert preset.chat_template == jinja("chatml")
    assert ("chat-template", "chatml", "models.ini:3") in effective(preset)
    assert one("chat-template = {{ messages }}").chat_template == "{{ messages }}"


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_a_name_without_a_template_here_stands_for_the_checkpoints_own(name: str) -> None:
    line = f"[m]\nmodel = ./models/qwen\nchat-template = {name}"
    own = Disk()
    own.texts["/etc/llm/models/qwen/tokenizer_config.json"] = '{"chat_template": "{{ messages }}"}'
    loaded = read(line, disk=own)
    assert loaded.presets["m"].chat_template == ""
    (warning,) = map(str, loaded.warnings)
    assert warning.startswith(f"models.ini:3: [m] chat-template: {name} is not offered by this version; the")
    assert read(f"[m]\nhf-repo = org/name\nchat-template = {name}").presets["m"].chat_template == ""
    own.texts["/etc/llm/models/qwen/tokenizer_config.json"] = "{}"
    (problem,) = complaints(line, disk=own)
    assert f"{name} is not offered by this version, and /etc/llm/models/qwen has no template of its own; wr" in problem


def test_a_template_in_a_file_of_its_own_counts_as_the_checkpoints() -> None:
    loaded = read(
        "[*]\nchat-template = kimi-k2\n[m]\nmodel = ./models/qwen\n[n]\nmodel = demo:a",
        disk=Disk("/etc/llm/models/qwen/chat_template.jinja"),
    )
    assert [preset.chat_template for preset in loaded.presets.values()] == ["", ""]
    assert len(loaded.warnings) == 1


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    assert not set(NAMES) & NOT_OFFERED
    assert len(NAMES) + len(NOT_OFFERED) == 54
    message = complaint("chat-template = chatlm")
    assert message.endswith('"chatlm" is neither Jinja text nor the name of a template; did you mean chatml?')
    assert complaint("chat-template = kimi-k3").endswith("did you mean kimi-k2?")
