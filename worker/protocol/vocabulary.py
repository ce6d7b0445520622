"""The rule by which the tokens of a draft model and of its target are the same. Pure functions."""

from collections.abc import Mapping

# Tokens that one of two equal tokenizers may have beyond the other: llama.cpp's limit (SPEC_VOCAB_MAX_SIZE_DIFFERENCE).
MOST_FURTHER_TOKENS = 128


def vocabulary_fault(target: Mapping[int, str], draft: Mapping[int, str]) -> str:
    """Return the reason for which a model cannot draft for another one; empty if it can. Both map numbers to tokens.

    All numbers that both have must stand for the same token. One may have MOST_FURTHER_TOKENS more than the other.
    """
    wrong = min((number for number in target.keys() & draft.keys() if target[number] != draft[number]), default=None)
    if wrong is not None:
        tokens = f"token {wrong} is {draft[wrong]!r} and not {target[wrong]!r}"
        return f"its tokenizer is another one: {tokens}; name a draft model of the same family"
    if abs(len(target) - len(draft)) > MOST_FURTHER_TOKENS:
        return f"its tokenizer has {len(draft)} tokens and not {len(target)}; name one of the same family"
    return ""
