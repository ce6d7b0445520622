"""Keys, hosts and origins: who may use which route."""

from collections.abc import Mapping

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from router.config.api_keys import parse_keys
from router.config.settings import Settings
from router.errors import ApiError, Forbidden, QueueFull, Unauthorized
from router.registry.auth import Access
from worker.protocol.routes import AccessLevel

USER, ADMIN, LIMITED = "user-key", "admin-key", "limited-key"


def request(headers: Mapping[str, str], method: str = "GET"):  # type: ignore[no-untyped-def]
    return make_mocked_request(method, "/", headers={"Host": "localhost", **headers})


def headers(given: Mapping[str, str]) -> Mapping[str, str]:
    return CIMultiDict({"Host": "localhost", **given})


def bearer(key: str) -> Mapping[str, str]:
    return headers({"Authorization": f"Bearer {key}"})


def keys(text: str) -> Access:
    return Access(parse_keys(text, False), Settings())


def test_without_keys_everybody_may_do_everything() -> None:
    access = Access((), Settings())
    assert access.is_admin(access.authorize(headers({}), AccessLevel.ADMIN))


def test_once_keys_exist_only_the_public_plane_is_open() -> None:
    access = keys(USER)
    access.authorize(headers({}), AccessLevel.PUBLIC)
    with pytest.raises(Unauthorized):
        access.authorize(headers({}), AccessLevel.USER)
    for right in (bearer(USER), headers({"X-Api-Key": USER}), headers({"Authorization": f"bearer {USER}"})):
        access.authorize(right, AccessLevel.USER)
    for wrong in ("", USER.upper(), USER + "x", "é"):
        with pytest.raises(Unauthorized):
            access.authorize(bearer(wrong), AccessLevel.USER)


def test_a_key_is_an_admin_until_an_admin_key_exists() -> None:
    access = keys(USER)
    access.authorize(bearer(USER), AccessLevel.ADMIN)
    access = keys(f"{USER}\n{ADMIN} admin")
    access.authorize(bearer(ADMIN), AccessLevel.ADMIN)
    with pytest.raises(Forbidden):
        access.authorize(bearer(USER), AccessLevel.ADMIN)


def test_a_key_limited_to_models_is_no_admin() -> None:
    access = keys(f"{LIMITED} models=qwen*,embed")
    key = access.authorize(bearer(LIMITED), AccessLevel.USER)
    assert [Access.may_use(key, name) for name in ("qwen3", "embed", "llama")] == [True, True, False]
    with pytest.raises(Forbidden):
        access.authorize(bearer(LIMITED), AccessLevel.ADMIN)


def test_a_key_runs_no_more_at_once_than_it_may() -> None:
    access = keys(f"{USER} max-concurrent=1")
    key = access.authorize(bearer(USER), AccessLevel.USER)
    with access.running(key):
        with pytest.raises(QueueFull) as full, access.running(key):
            pass
        assert full.value.reason == "key_concurrency"
    with access.running(key):
        pass


def test_metrics_are_public_only_if_configured() -> None:
    with pytest.raises(Unauthorized):
        keys(USER).authorize(headers({}), AccessLevel.METRICS)
    open_ = Access(parse_keys(USER, False), Settings(metrics_public=True))
    open_.authorize(headers({}), AccessLevel.METRICS)
    with pytest.raises(Unauthorized):
        open_.authorize(headers({}), AccessLevel.USER)


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.0.1:8080", "[::1]", "[::1]:8080", "10.1.2.3", "box", "a.localhost", ""]
)
def test_a_host_that_cannot_be_rebound_is_fine(host: str) -> None:
    Access((), Settings()).check_host(headers({"Host": host}))


@pytest.mark.parametrize(
    "host",
    [
        "[::1", "[evil]", "évil", "localhost?x", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example",
        "user@localhost", "a/b", "a,b", "1.2.3",
    ],
)  # fmt: skip
def test_other_hosts_are_refused_without_keys(host: str) -> None:
    with pytest.raises(ApiError):
        Access((), Settings()).check_host(headers({"Host": host}))


def test_hosts_can_be_allowed_and_keys_make_the_check_needless() -> None:
    Access((), Settings(allowed_hosts=("ai.example", "*.lan.example"))).check_host(headers({"Host": "ai.example:80"}))
    Access((), Settings(allowed_hosts=("ai.example", "*.lan.example"))).check_host(headers({"Host": "x.lan.example"}))
    Access((), Settings(allowed_hosts=("*",))).check_host(headers({"Host": "any.example"}))
    keys(USER).check_host(headers({"Host": "any.example"}))
    with pytest.raises(Forbidden):
        Access(parse_keys(USER, False), Settings(allowed_hosts=("ai.example",))).check_host(
            headers({"Host": "evil.example"})
        )


def test_a_foreign_page_cannot_change_anything() -> None:
    access = Access((), Settings(cors_origins=("https://ui.example", "localhost")))
    foreign = headers({"Origin": "https://evil.example"})
    access.check_origin(foreign, changes_state=False)
    with pytest.raises(Forbidden):
        access.check_origin(foreign, changes_state=True)
    with pytest.raises(Forbidden):
        access.check_origin(headers({"Origin": "null"}), changes_state=True)
    with pytest.raises(Forbidden):
        access.check_origin(headers({"Sec-Fetch-Site": "cross-site"}), changes_state=True)
    for origin in ("https://ui.example", "http://localhost:3000", "http://127.0.0.1:1", "http://[::1]:2"):
        access.check_origin(headers({"Origin": origin}), changes_state=True)
    own = headers({"Origin": "http://box:8080", "Host": "box:8080"})
    Access((), Settings()).check_origin(own, changes_state=True)


@pytest.mark.parametrize("origin", ["http://[bad", "http://[x]", "http://127.0.0.1%x.evil", "http://localhost:é", ""])
def test_an_origin_that_cannot_be_read_is_foreign(origin: str) -> None:
    access = Access((), Settings(cors_origins=("localhost",)))
    with pytest.raises(Forbidden):
        access.check_origin(headers({"Origin": origin}), changes_state=True)


def test_a_preflight_repeats_only_names_of_headers() -> None:
    access = Access((), Settings(cors_origins=("*",)))
    for asked, answered in (("authorization, x-a", True), ("é", False), ("", False)):
        headers = {"Origin": "https://any.example", "Access-Control-Request-Headers": asked}
        allowed = access.cors_headers(request(headers, "OPTIONS"))["Access-Control-Allow-Headers"]
        assert (allowed == asked) is answered


def test_an_allowed_page_may_read_the_response_headers() -> None:
    access = Access((), Settings(cors_origins=("localhost",)))
    asked = {"Origin": "http://localhost:3000"}
    readable = access.cors_headers(request(asked, "POST"))["Access-Control-Expose-Headers"].split(", ")
    assert {"X-Request-Id", "X-Router-Model", "X-Ignored-Fields", "Retry-After"} <= set(readable)
    assert "Access-Control-Expose-Headers" not in access.cors_headers(request(asked, "OPTIONS"))


def test_cors_headers_never_allow_credentials() -> None:
    access = Access((), Settings(cors_origins=("*",)))
    headers = access.cors_headers(request({"Origin": "https://any.example"}, "OPTIONS"))
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Credentials" not in headers
    assert Access((), Settings()).cors_headers(request({"Origin": "https://any.example"})) == {}
