"""Bodies of what the router itself answers."""

from worker.schemas import Body

NAMED: Body = {
    "model": {"type": "string", "minLength": 1},
    "extra_args": {"not": {}, "description": "Not supported: settings stand in the model's preset."},
}
FETCH: Body = {
    **NAMED,
    "model": {"type": "string", "minLength": 1, "description": "org/name, or org/name:revision."},
}
PIN: Body = {
    "model": {"type": "string", "minLength": 1},
    "pinned": {"type": "boolean", "description": "true unless stated."},
}
