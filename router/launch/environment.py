"""The environment of worker processes: an allow-list of the router's own, plus devices and limits.

A variable that is not named here is not passed on, above all no secret. Only `download` uses a network, and only it
gets a hub token.
"""

from collections.abc import Mapping
from typing import Literal

Verb = Literal["download", "convert", "estimate", "serve"]

TAG = "FLEET_WORKER"  # the variable that names the run that a process belongs to; its descendants inherit it

KEPT = frozenset(
    {
        # the system
        "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH",
        # caches, which only name folders
        "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_MODULES_CACHE", "TORCH_HOME",
        "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    }
)  # fmt: skip
KEPT_PREFIXES = ("LC_", "CUDA_", "PYTORCH_")

KEPT_ONLINE = frozenset(
    {
        "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HF_ENDPOINT", "HF_TOKEN_PATH",
        "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    }
)  # fmt: skip
KEPT_ONLINE_PREFIXES = ("HF_HUB_", "HF_XET_")

HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN")

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PROXY")


def environment(
    environ: Mapping[str, str],
    verb: Verb,
    *,
    tag: str,
    visible: str,
    threads: int,
    extra: Mapping[str, str],
    offline: bool,
    hf_token: str,
) -> dict[str, str]:
    """The whole environment of a process of `verb`.

    `environ`: the router's own. `visible`: CUDA_VISIBLE_DEVICES, empty for none. `extra`: the preset's. It may change
    limits, but neither the devices nor the access to the hub, and it cannot give a hub token to a serving worker.
    """
    online = verb == "download" and not offline
    kept = {name: value for name, value in environ.items() if _is_kept(name, online=online)}
    if online and hf_token:
        kept["HF_TOKEN"] = hf_token
    count = str(max(1, threads))
    limits = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS"),
        count,
    )
    limits |= {"MALLOC_ARENA_MAX": "2", "HF_HUB_DISABLE_TELEMETRY": "1"}
    allowed = {name: value for name, value in extra.items() if online or name not in HUB_TOKENS}
    fixed = {TAG: tag, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
    if not online:
        fixed |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    return kept | limits | allowed | fixed  # later ones win


def secrets(env: Mapping[str, str]) -> tuple[str, ...]:
    """Values that must not appear in a log. Very short ones are left out: masking them would garble it."""
    return tuple(
        value for name, value in env.items() if len(value) >= 6 and any(word in name.upper() for word in _SECRET_WORDS)
    )


def _is_kept(name: str, *, online: bool) -> bool:
    if name in KEPT or name.startswith(KEPT_PREFIXES):
        return True
    return online and (name in KEPT_ONLINE or name.startswith(KEPT_ONLINE_PREFIXES))
