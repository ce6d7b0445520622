"""The router's own options and its keys."""

import contextlib
import hashlib
import pwd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import xdg
from router.config.api_keys import ApiKey, configured_keys, parse_keys
from router.config.settings import OPTIONS, Settings, hub_cache, is_local, parse
from router.errors import ConfigError
from router.planner.ledger import DeviceShare
from tests.router.preset_texts import read
from worker.protocol.memory import MIB


def parsed(given: dict[str, str] | None = None, environ: dict[str, str] | None = None) -> Settings:
    """The settings; there must be no problem."""
    found, problems = parse(given or {}, environ or {})
    assert not problems, [str(problem) for problem in problems]
    return found


def complaints(given: dict[str, str], environ: dict[str, str] | None = None) -> list[str]:
    return [str(problem) for problem in parse(given, environ or {})[1]]


def test_without_flags_the_defaults_apply() -> None:
    assert parsed() == Settings(hub_cache="/.cache/huggingface/hub")
    for option in OPTIONS:
        default = getattr(Settings(), option.field)
        if default not in (None, "", (), {}) and not option.unset:
            assert option.kind(option.kind.write(default)) == default


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("models-cache", "off", False),
        ("models-memory-margin", "2048", {"": 2048 * MIB}),
        ("models-memory-margin", "cuda:0=2048,cpu=4GiB", {"": 1024 * MIB, "cuda:0": 2048 * MIB, "cpu": 4096 * MIB}),
        ("device-limit", "cuda:0=90%,cpu=6000", {"cuda:0": DeviceShare(0.9), "cpu": 6000 * MIB}),
        ("host", "::1", "::1"),
        ("host", "127.0.0.1,[::1]", "127.0.0.1,::1"),
        ("host", "/run/router.sock", "/run/router.sock"),
        ("api-key", "a,b", ("a", "b")),
        ("timeout", "0", 0.0),
        ("timeout", "-1", 0.0),
        ("evict-timeout", "-1", -1.0),
        ("sse-ping-interval", "-1", -1.0),
        ("max-body-size", "8", 8 * MIB),
        ("log-level", "WARN", "warning"),
        ("cors-origins", "localhost,https://a.example", ("localhost", "https://a.example")),
        ("allowed-hosts", "*.a.example,[::1],b", ("*.a.example", "::1", "b")),
        ("allowed-hosts", "[::1],[fe80::2]", ("::1", "fe80::2")),
        ("allowed-hosts", '["[::1]", "a.example"]', ("::1", "a.example")),
    ],
)
def test_an_option_sets_its_field(flag: str, text: str, value: Any) -> None:
    given = {"admin-key": "a", flag: text} if flag == "allowed-hosts" else {flag: text}
    assert getattr(parsed(given), flag.replace("-", "_")) == value


def test_models_of_lmi_and_others_may_be_named_together() -> None:
    models = ("[a:v1]=org/x", "b::Python=file:llama", "org/y")
    assert parsed({"model": ",".join(models)}).model == models
    (option,) = (option for option in OPTIONS if option.flag == "model")
    assert option.kind(option.kind.write(models)) == models


def test_a_flag_wins_over_the_routers_variable_and_that_over_llama_servers() -> None:
    environ = {"ROUTER_PORT": "1", "LLAMA_ARG_PORT": "2", "ROUTER_HOST": "", "LLAMA_ARG_HOST": "localhost"}
    assert parsed({"port": "3"}, environ).port == 3
    assert parsed({}, environ).port == 1
    assert parsed({}, {**environ, "ROUTER_PORT": ""}).port == 2
    assert parsed({}, environ).host == "localhost"
    assert parsed({}, {"HF_TOKEN": "hf_x"}).hf_token == "hf_x"
    assert parsed({}, {"ROUTER_DEVICE_LIMIT": "cpu=50%"}).device_limit == {"cpu": DeviceShare(0.5)}
    assert parsed({}, {"LLAMA_API_KEY": "k"}).api_key == ("k",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": "99999"}, '--port: "99999" is not a whole number from 0 to 65535'),
        ({"model": ""}, "--model: names no model; write a folder or org/name, or remove it"),
        ({"model": "org/x,test::PyTorch=org/y"}, '--model: "PyTorch" is an engine that is not offered; remove it'),
        ({"model": "ALL"}, "--model: ALL loads the models of --models-dir; give that as well"),
        ({"model": "ALL", "models-dir": "/m", "model-names": "a"}, "--model-names: is given 1 times for 0 models"),
        ({"hf-repo": " ,"}, "--hf-repo: names no model; write a folder or org/name, or remove it"),
        ({"swap-patience": "-3"}, '--swap-patience: "-3" is not a time'),
        ({"drain-timeout": "-1"}, "--drain-timeout: this time cannot be turned off (-1)"),
        ({"models-memory-margin": "tpu=5"}, '--models-memory-margin: "tpu" is no device'),
        ({"device-limit": "600"}, '--device-limit: "600" names no device; write DEV=MiB'),
        ({"device-limit": "cpu=0%"}, '--device-limit: "0%" is not a share above 0 and up to 1'),
        ({"device-limit": "cpu=600"}, "--device-limit: cpu=600 leaves nothing beside the margin of 1024 MiB; raise it"),
        ({"device-limit": "cpu=600", "models-memory-margin": "cpu=600"}, "cpu=600 leaves nothing beside the margin"),
        ({"log-level": "loud"}, "--log-level: 'loud' is not one of 'debug', 'info', 'warning', 'error'."),
        ({"unknown-model": "default"}, "--unknown-model: default needs --default-model"),
        ({"max-body-size": "1GiB"}, "--max-body-size: at most 512 MiB"),
        ({"cors-origins": "a.example"}, '--cors-origins: "a.example" is no origin'),
        ({"cors-origins": "*,localhost"}, "--cors-origins: * already allows all origins"),
        ({"allowed-hosts": "a b"}, '--allowed-hosts: "a b" is no host name'),
        ({"allowed-hosts": "127.0.0.1:80"}, '--allowed-hosts: "127.0.0.1:80" is more than a name or address'),
        ({"allowed-hosts": "[::1]:80"}, '--allowed-hosts: "[::1]:80" is more than a name or address'),
        ({"host": "0.0.0.0"}, "--host: 0.0.0.0 is open to other machines; give --api-key-file, or --allow-unauthent"),
        (
            {"allowed-hosts": "llm.example.com,[::1]"},
            "--allowed-hosts: llm.example.com is a name for other machines; give --api-key-file, or --allow-unauthent",
        ),
        ({"allowed-hosts": "*"}, "--allowed-hosts: * is a name for other machines"),
        ({"allowed-hosts": "evil.sock"}, "--allowed-hosts: evil.sock is a name for other machines"),
        ({"allowed-hosts": "a", "host": "0.0.0.0"}, "--host: 0.0.0.0 is open to other machines"),
        ({"host": "300.1.1.1"}, "--host: 300.1.1.1 is no address; write four numbers up to 255, or a name"),
        ({"host": "127.0.0.1,::"}, "--host: :: is open to other machines"),
        ({"host": "box.example"}, "--host: box.example is open to other machines"),
        ({"host": "127.0.0.1,"}, "--host: an address is empty"),
        ({"host": "::1,[::1]:80"}, '--host: "[::1]:80" is more than a name or address; the port is --port'),
        ({"host": "127.0.0.1:80"}, '--host: "127.0.0.1:80" is more than a name or address; the port is --port'),
        (
            {"host": "http://localhost"},
            '--host: "http://localhost" is more than a name or address; the port is --port',
        ),
        ({"api-key": "k", "allow-unauthenticated": "on"}, "--allow-unauthenticated: keys are given as well"),
        ({"api-key": "k,k"}, "--api-key: the same key stands there twice"),
        ({"api-key": "k", "admin-key": "k"}, "--admin-key: a key is given to users as well"),
    ],
)
def test_a_wrong_or_contradictory_setting_has_one_clear_message(given: dict[str, str], message: str) -> None:
    (problem,) = complaints(given)
    assert problem.startswith(message) or message in problem


def test_a_fault_names_the_variable_it_came_from() -> None:
    assert complaints({}, {"LLAMA_ARG_PORT": "x"})[0].startswith("LLAMA_ARG_PORT: ")


@pytest.mark.parametrize("flag", ["api-key", "admin-key", "hf-token"])
def test_a_secret_is_never_repeated(flag: str) -> None:
    (problem,) = complaints({flag: "very secret"})
    assert "secret" not in problem
    found = parsed({flag: "verysecret"})
    assert "verysecret" not in repr(found)


@pytest.mark.parametrize("flag", ["api-key", "api-key-file", "admin-key", "admin-key-file", "allow-unauthenticated"])
def test_a_public_address_is_allowed_with_any_kind_of_key_or_explicitly_without(flag: str) -> None:
    assert parsed({"host": "0.0.0.0", flag: "on"}).host == "0.0.0.0"
    assert parsed({"allowed-hosts": "llm.example.com", flag: "on"}).allowed_hosts == ("llm.example.com",)


def test_names_of_this_machine_are_allowed_hosts_without_a_key() -> None:
    names = ("localhost", "ui.localhost", "127.0.0.2", "::1")
    assert parsed({"allowed-hosts": ",".join(names)}).allowed_hosts == names


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("a.localhost", True),
     ("/x/y.sock", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_only_loopback_and_socket_files_are_local(host: str, local: bool) -> None:
    assert is_local(host) is local


@pytest.mark.parametrize(
    ("given", "workers"),
    [({}, 0), ({"models-max": "3"}, 3), ({"models-memory-margin": "0"}, 4), ({"models-memory-margin": "cpu=0"}, 0),
     ({"models-memory-margin": "0", "models-max": "0"}, 0)],
)  # fmt: skip
def test_without_a_margin_a_count_decides(given: dict[str, str], workers: int) -> None:
    assert parsed(given).workers_at_once == workers


def test_a_margin_holds_for_all_devices_that_have_none_of_their_own() -> None:
    found = parsed({"models-memory-margin": "cuda:0=2048"})
    assert (found.margin("cuda:0"), found.margin("cuda:1")) == (2048 * MIB, 1024 * MIB)


def test_the_hub_cache_is_where_the_hub_library_looks() -> None:
    assert hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == "/a"
    assert hub_cache({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}) == "/a"
    assert hub_cache({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}) == "/b/hub"
    assert hub_cache({"XDG_CACHE_HOME": "/c", "HOME": "/d"}) == "/c/huggingface/hub"
    assert hub_cache({"HOME": "/d"}) == "/d/.cache/huggingface/hub"


@given(st.dictionaries(st.sampled_from([option.flag for option in OPTIONS]), st.text(max_size=12)))
def test_any_text_for_any_option_is_read_or_refused(given: dict[str, str]) -> None:
    parse(given, {})


# Keys


def sha(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def test_a_line_of_a_key_file_has_a_key_and_its_rights() -> None:
    text = f"""# keys
sk-one name=alice models=qwen*,demo-? max-concurrent=2   # a comment
sk#two
sha256:{sha("three").hex()} admin name=root
"""
    assert parse_keys(text, False) == (
        ApiKey(name="alice", digest=sha("sk-one"), models=("qwen*", "demo-?"), max_concurrent=2),
        ApiKey(digest=sha("sk#two")),
        ApiKey(name="root", digest=sha("three"), admin=True),
    )
    assert parse_keys("a", True) == (ApiKey(digest=sha("a"), admin=True),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clé", "keys:1: the key must be 1 to 512 ASCII characters"),
        ("sha256:123", "keys:1: the key must be"),
        ("x" * 513, "keys:1: the key must be"),
        ("a\n\nsecret1\na", "keys:4: the same key as in line 1"),
        ("secret1 max-concurrent=0", "keys:1: max-concurrent= needs a number of 1 or more"),
        ("secret1 name=", "keys:1: name= needs a plain value"),
        ("secret1 models=,", "keys:1: models= needs a plain value"),
        ("secret1 models=a admin", "keys:1: an admin key may use every model"),
        ("secret1 secret2", "keys:1: after the key only name=, admin, models= and max-concurrent= may stand"),
    ],
)
def test_a_message_about_a_key_file_does_not_contain_the_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, False, file="keys")
    (problem,) = caught.value.problems
    assert problem.startswith(message)
    assert "secret" not in problem


def test_keys_of_flags_and_files_are_one_set() -> None:
    found = parsed({"api-key": "a,b", "admin-key": "c", "api-key-file": "u", "admin-key-file": "v"})
    keys = configured_keys(found, user_file="d\ne admin", admin_file="f")
    assert [(key.digest, key.admin) for key in keys] == [
        (sha("a"), False), (sha("b"), False), (sha("c"), True), (sha("d"), False), (sha("e"), True), (sha("f"), True),
    ]  # fmt: skip


def test_a_key_file_must_have_a_key_and_no_key_that_is_given_elsewhere() -> None:
    found = parsed({"api-key": "a", "api-key-file": "u", "admin-key-file": "v"})
    with pytest.raises(ConfigError) as caught:
        configured_keys(found, user_file="# none", admin_file="a")
    assert caught.value.problems == [
        "u: has no key; write one a line",
        "v: has a key that is given elsewhere as well; remove one of the two",
    ]


@given(st.text(max_size=80), st.booleans())
def test_any_key_file_is_read_or_refused(text: str, admin: bool) -> None:
    with contextlib.suppress(ConfigError):
        assert all(len(key.digest) == 32 for key in parse_keys(text, admin))


def test_a_negative_variable_of_llama_server_turns_a_switch_off_with_any_value() -> None:
    for value in ("1", "true", "0", "whatever"):
        settings, problems = parse({}, {"LLAMA_ARG_NO_ENDPOINT_SLOTS": value, "LLAMA_ARG_ENDPOINT_SLOTS": "1"})
        assert (settings.slots, problems) == (False, ())
        loaded = read("[m]\nmodel = demo:a", environ={"LLAMA_ARG_NO_CACHE_PROMPT": value})
        assert not loaded.presets["m"].prefix_caching
    environ = {"LLAMA_ARG_NO_MODELS_AUTOLOAD": "1", "ROUTER_MODELS_AUTOLOAD": "on"}
    assert parse({}, environ)[0].models_autoload, "the router's own name is stronger"
    assert parse({}, {"LLAMA_ARG_NO_MODELS_AUTOLOAD": ""})[0].models_autoload


def test_variables_that_give_one_key_other_values_by_equal_texts_cause_a_warning() -> None:
    loaded = read("[m]\nmodel = demo:a", environ={"LLAMA_ARG_EMBEDDINGS": "1", "LLAMA_ARG_RERANKING": "1"})
    assert [str(each) for each in loaded.warnings] == [
        "LLAMA_ARG_RERANKING: has no effect beside LLAMA_ARG_EMBEDDINGS; remove one of the two"
    ]


def test_the_message_for_a_user_without_a_home_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> pwd.struct_passwd:
        raise KeyError(user)  # as in a container whose user is a bare number

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"this user has no home, and HOME is not set; give a --state-dir"):
        xdg.state("")
    assert xdg.state("/somewhere") == Path("/somewhere")
