"""Which adapter a body asks for: `adapters`, or `lora`, in the forms that clients have.

    "french"                          by name; "" is none
    ["french", "german"]              one for each of several prompts (LMI), or one for all
    [{"id": 0, "scale": 1.0}]         by its place in the list of GET /lora-adapters (llama-server); [] is none
    [{"name": "french", "scale": 1}]

Law: PURE, values only.
"""

from typing import Any

from worker.errors import InvalidValue, UnsupportedField
from worker.interface import AdapterChoice
from worker.prompt.body_reader import Fields, to_integer

_LARGEST = 1e6
"""Of a scale; real ones are between 0 and 2."""
Choices = tuple[AdapterChoice | None, ...]


def read(fields: Fields, *names: str, prompts: int = 1) -> Choices:
    """For each of so many prompts; None where the body says nothing. Raises InvalidValue, UnsupportedField."""
    stated = [(name, value) for name in names if (value := fields.take(name)) is not None]
    if len(stated) > 1 and stated[0][1] != stated[1][1]:
        raise InvalidValue(f"{stated[0][0]} and {stated[1][0]} mean the same but differ; state one", param=stated[1][0])
    if not stated:
        return (None,) * prompts
    name, value = stated[0]
    param = fields.path + name
    if isinstance(value, str):
        return (AdapterChoice(value),) * prompts
    if not isinstance(value, list):
        raise InvalidValue(f"{param} must be a name, or an array of names or of {{id, scale}}", param=param)
    if value and all(isinstance(each, str) for each in value):
        if len(value) not in (1, prompts):
            raise InvalidValue(f"{param} must name one adapter, or one for each of {prompts} prompts", param=param)
        return tuple(AdapterChoice(each) for each in (value if len(value) == prompts else value * prompts))
    weighed = [choice for each in value if (choice := _weighed(each, param)).scale]
    if len(weighed) > 1:
        raise UnsupportedField(
            f"{param}: one adapter at a time can be used; merge them into one of their own", param=param
        )
    return (weighed[0] if weighed else AdapterChoice(),) * prompts


def _weighed(entry: Any, param: str) -> AdapterChoice:
    """One entry of llama-server's list."""
    number: int | None = None
    name: Any = ""
    scale: Any = 1.0
    if isinstance(entry, dict) and entry.keys() <= {"id", "name", "scale"}:
        number, name, scale = to_integer(entry.get("id")), entry.get("name", ""), entry.get("scale", 1.0)
    is_named = isinstance(name, str) and bool(name) is not (number is not None)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool) and abs(scale) <= _LARGEST
    if not is_named or not is_number or (number or 0) < 0:
        raise InvalidValue(f"{param} must be an array of names, or of {{id, scale}} with numbers", param=param)
    return AdapterChoice(name, number, float(scale))
