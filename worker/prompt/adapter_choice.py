"""Selection of LoRA adapters by `adapters` or `lora`, in the forms that clients send:

"french"                          by name; "" selects none
["french", "german"]              one for each of several prompts (LMI), or one for all
[{"id": 0, "scale": 1.0}]         by index in the list of GET /lora-adapters (llama-server); [] selects none
[{"name": "french", "scale": 1}]
"""

from typing import Any

from worker.errors import InvalidValue, UnsupportedField
from worker.interface import AdapterChoice
from worker.prompt.body_reader import BodyFields, to_integer

_MAX_SCALE = 1e6  # limit of a scale; typical values are between 0 and 2
AdapterChoices = tuple[AdapterChoice | None, ...]


def read(fields: BodyFields, *names: str, prompts: int = 1) -> AdapterChoices:
    """Return the adapter of each prompt; None if the body does not select one. Raise InvalidValue or
    UnsupportedField."""
    value = fields.any_of(fields.take, *names)
    if value is None:
        return (None,) * prompts
    param = fields.path + next(name for name in names if fields.take(name) is not None)
    if isinstance(value, str):
        return (AdapterChoice(value),) * prompts
    if not isinstance(value, list):
        raise InvalidValue(f"{param} must be a name, or an array of names or of {{id, scale}}", param=param)
    if value and all(isinstance(item, str) for item in value):
        if len(value) not in (1, prompts):
            raise InvalidValue(f"{param} must name one adapter, or one for each of {prompts} prompts", param=param)
        return tuple(AdapterChoice(item) for item in (value if len(value) == prompts else value * prompts))
    active = [choice for item in value if (choice := _parse_entry(item, param)).scale]
    if len(active) > 1:
        raise UnsupportedField(f"{param}: only one adapter at a time is supported; merge them into one", param=param)
    return (active[0] if active else AdapterChoice(),) * prompts


def _parse_entry(entry: Any, param: str) -> AdapterChoice:
    """Parse one entry of llama-server's list."""
    number: int | None = None
    name: Any = ""
    scale: Any = 1.0
    if isinstance(entry, dict) and entry.keys() <= {"id", "name", "scale"}:
        number, name, scale = to_integer(entry.get("id")), entry.get("name", ""), entry.get("scale", 1.0)
    is_named = isinstance(name, str) and bool(name) is not (number is not None)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool) and abs(scale) <= _MAX_SCALE
    if not is_named or not is_number or (number or 0) < 0:
        raise InvalidValue(f"{param} must be an array of names, or of {{id, scale}} with numbers", param=param)
    return AdapterChoice(name, number, float(scale))
