"""The grammar of preset files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.ini import MAX_PRESET_BYTES, Document, Problem, parse

ENVIRON = {"HOME": "/home/me", "ODD": 'say "hi"', "BROKEN": "\udcff"}


def values(text: str) -> dict[str, str]:
    """The entries of a section `[m]` with this body; the body must be right."""
    document = parse(f"[m]\n{text}", environ=ENVIRON)
    assert not document.problems, [str(problem) for problem in document.problems]
    return {entry.key: entry.value for entry in document.sections[0].entries}


def complaints(text: str) -> list[str]:
    return [str(problem) for problem in parse(text, file="m.ini", environ=ENVIRON).problems]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("bare text", "bare text"),
        ("  padded  ", "padded"),
        ("", ""),
        ("a ; comment", "a"),
        ("a # comment", "a"),
        ("a#b;c", "a#b;c"),
        ("; only a comment", ""),
        ('"a ; b" ; comment', "a ; b"),
        (r'"tab\t quote\" slash\\ line\n"', 'tab\t quote" slash\\ line\n'),
        (r'"\u00e9\ud83d\ude00"', "é😀"),
        (r"'C:\path # x' # comment", r"C:\path # x"),
        ('"a" b', '"a" b'),
        ("it's", "it's"),
        ('{"a": "b ; c"} ; comment', '{"a": "b ; c"}'),
        ("{% if x %}y{% endif %}", "{% if x %}y{% endif %}"),
        ("[not json", "[not json"),
        ("${env:HOME}/models", "/home/me/models"),
        ('"${env:HOME}"', "/home/me"),
        ("'${env:HOME}'", "${env:HOME}"),
        ('{"a": "${env:ODD}"}', '{"a": "say \\"hi\\""}'),
        ("a = b", "a = b"),
    ],
)
def test_a_value_is_quoted_json_or_bare_text(written: str, value: str) -> None:
    assert values(f"key = {written}") == {"key": value}


def test_keys_keep_their_spelling_and_lines_their_number() -> None:
    document = parse("\ufeffversion = 1\n\n; c\n [*] ; all\r\n\t--ctx_size=1\r\n[a/b:c]\nLLAMA_ARG_X = y")
    assert not document.problems
    star, model = document.sections
    assert (star.name, star.line, star.entries[0].key, star.entries[0].line) == ("*", 4, "--ctx_size", 5)
    assert (model.name, model.entries[0].key) == ("a/b:c", "LLAMA_ARG_X")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ctx-size = 1", "m.ini:1: ctx-size stands before the first section; write [*] above it"),
        ("version = 2", "m.ini:1: version 2 is not known; this router reads version 1"),
        ("[a]\nb", "m.ini:2: [a] neither [section] nor key = value"),
        ("[a]\n9 = x", "m.ini:2: [a] neither [section] nor key = value"),
        ("[a", "m.ini:1: a [ without ]; sections are written [name]"),
        ("[a] b", "m.ini:1: text after [a]; a comment needs a blank before it"),
        ("[a]\n[a]", "m.ini:2: [a] this section already began in line 1; merge the two"),
        ('[a]\nk = "x', '[a] k: " without its closing "'),
        ("[a]\nk = 'x", "[a] k: ' without its closing '"),
        ('[a]\nk = "\\q"', 'm.ini:2: [a] k: \\q is no escape in "..."'),
        ('[a]\nk = "\\ud800"', "[a] k: the value has a NUL or half a surrogate pair"),
        ('[a]\nk = "\\u0000"', "[a] k: the value has a NUL or half a surrogate pair"),
        ("[a]\nk = ${env:BROKEN}", "[a] k: the value has a NUL or half a surrogate pair"),
        ("[a]\nk = ${env:NONE}", "m.ini:2: [a] k: the environment variable NONE is not set"),
        ("[a]\nk = ${env:A-B}", "[a] k: write ${env:NAME}, or single quotes to mean it literally"),
        ("[a]\nk = ${env:HOME", "[a] k: write ${env:NAME}, or single quotes to mean it literally"),
        ("[a]\nk = a\x00b", "m.ini:2: [a] control character U+0000; remove it"),
        *((f"[{name}]", "is no model name") for name in ("", "(a)", "-a", "a//b", "../a", "a/..", "é", "x" * 193)),
    ],
)
def test_each_fault_names_its_line(text: str, complaint: str) -> None:
    (problem,) = complaints(text)
    assert complaint in problem


def test_a_section_may_have_blanks_and_parentheses_in_its_name_as_in_files_of_llama_server() -> None:
    document = parse("[Qwen3 8B (low) ~5GB]\nctx-size = 1\n[a b/c d]\n")
    assert document.problems == ()
    assert [section.name for section in document.sections] == ["Qwen3 8B (low) ~5GB", "a b/c d"]


def test_all_faults_are_shown_not_only_the_first() -> None:
    assert len(complaints("a = 1\n[b]\nc\nd = ${env:NONE}\n[b]\n[e")) == 5


def test_a_file_larger_than_a_mebibyte_is_refused() -> None:
    assert complaints(";" * (MAX_PRESET_BYTES + 1)) == ["m.ini: is larger than 1 MiB"]


def test_a_problem_is_one_line_with_its_way_out() -> None:
    problem = Problem("models.ini", 14, "qwen", "ctx-sise", 'unknown key "ctx-sise"', "ctx-size")
    assert str(problem) == 'models.ini:14: [qwen] unknown key "ctx-sise"; did you mean "ctx-size"?'
    assert str(Problem("--port", 0, "", "port", "is no number")) == "--port: is no number"
    assert str(Problem("models/a\nb\x1b[31m", 0, "", "", "is not listed")) == "models/a\\x0ab\\x1b[31m: is not listed"


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("[]=\"'{};#\\$:\n\r\t \0"), max_size=200))
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    document = parse(text, file="m.ini", environ=ENVIRON)
    assert isinstance(document, Document)
    assert all(problem.line <= text.count("\n") + 1 for problem in document.problems)


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers() | st.lists(st.booleans()), max_size=4))
def test_json_comes_back_as_it_was(value: dict[str, object]) -> None:
    written = json.dumps(value)
    assert json.loads(values(f"key = {written} ; comment")["key"]) == value
