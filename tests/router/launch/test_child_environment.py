"""The environment of worker processes: an allow-list of the router's own."""

import pytest

from router.launch.interface import Verb
from router.launch.spawn import environment, secrets

PLANTED = {
    "HF_TOKEN": "hf_planted", "HUGGING_FACE_HUB_TOKEN": "hf_planted_too", "ROUTER_API_KEY": "sk-planted",
    "OPENAI_API_KEY": "sk-planted-too", "AWS_SECRET_ACCESS_KEY": "aws-planted",
    "DATABASE_URL": "postgres://u:planted@h/d", "LD_PRELOAD": "/tmp/planted.so", "PYTHONSTARTUP": "/tmp/planted.py",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}  # fmt: skip
ORDINARY = {
    "PATH": "/bin", "HOME": "/home/u", "LANG": "C.UTF-8", "LC_ALL": "C", "TMPDIR": "/var/tmp", "HF_HOME": "/data/hf",
    "CUDA_CACHE_PATH": "/data/cuda", "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
}  # fmt: skip
NETWORK = {"HTTPS_PROXY": "http://u:pw@proxy:3128", "HF_ENDPOINT": "https://mirror", "SSL_CERT_FILE": "/etc/ca.pem"}
VERBS: tuple[Verb, ...] = ("download", "convert", "estimate", "serve")


def of(verb: Verb, *, extra: dict[str, str] | None = None, offline: bool = False, token: str = "") -> dict[str, str]:
    environ = PLANTED | ORDINARY | NETWORK
    return environment(
        environ, verb, tag="t", visible="GPU-b,GPU-a", threads=3, extra=extra or {}, offline=offline, hf_token=token
    )


@pytest.mark.parametrize("verb", VERBS)
def test_no_planted_secret_reaches_a_child(verb: Verb) -> None:
    assert "planted" not in repr(of(verb))


@pytest.mark.parametrize("verb", VERBS)
def test_ordinary_variables_are_passed_on(verb: Verb) -> None:
    assert ORDINARY.items() <= of(verb).items()


@pytest.mark.parametrize("verb", VERBS)
def test_a_worker_sees_its_own_devices_and_no_others(verb: Verb) -> None:
    env = of(verb, extra={"CUDA_VISIBLE_DEVICES": "7", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "FLEET_WORKER": "x"})
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["FLEET_WORKER"] == "t"


def test_only_a_download_reaches_the_hub() -> None:
    online = of("download", token="hf_given")
    assert NETWORK.items() <= online.items()
    assert online["HF_TOKEN"] == "hf_given"
    assert "HF_HUB_OFFLINE" not in online
    others = [of(verb, token="hf_given") for verb in VERBS if verb != "download"]
    for env in (*others, of("download", offline=True)):
        assert not NETWORK.keys() & env.keys()
        assert env["HF_HUB_OFFLINE"] == env["TRANSFORMERS_OFFLINE"] == "1"
        assert "HF_TOKEN" not in env


def test_a_preset_may_change_limits_and_bring_its_own_token_for_the_download() -> None:
    extra = {"OMP_NUM_THREADS": "8", "HF_TOKEN": "hf_of_this_model", "HF_HUB_OFFLINE": "0"}
    assert of("serve")["OMP_NUM_THREADS"] == "3"
    assert of("serve", extra=extra)["OMP_NUM_THREADS"] == "8"
    assert of("download", extra=extra, token="hf_given")["HF_TOKEN"] == "hf_of_this_model"
    assert "HF_TOKEN" not in of("serve", extra=extra)
    assert of("serve", extra=extra)["HF_HUB_OFFLINE"] == "1"


def test_secrets_of_the_environment_are_found() -> None:
    assert set(secrets(of("download", token="hf_given"))) == {"hf_given", NETWORK["HTTPS_PROXY"]}
