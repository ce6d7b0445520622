"""Classification of errors of memory and devices, by class name: torch may not be imported in this process."""

from types import TracebackType

from worker.errors import RankLost, StartError

MAX_MESSAGE = 240
# Errors that code raises for invalid values, the same each time; torch and devices raise other types.
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
# Parts of torch's messages for sizes that do not fit. They are RuntimeErrors, as passing failures of libraries are.
_OF_SIZES = (
    "must match", "doesn't match", "to sum exactly to", "out of range", "not in range", "out of bounds",
    "cannot be multiplied", "invalid for input of size",
)  # fmt: skip
# Messages of the CUDA runtime where torch's allocator is not involved (pinned memory, events, graphs), and of its
# libraries, whose handles take memory, too. The context survives both.
_DEVICE_IS_FULL = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


def is_exhausted(error: BaseException) -> bool:
    """True if `error` is a lack of memory, of a device or of the host."""
    if isinstance(error, MemoryError) or is_device_full(error):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_device_full(error: BaseException) -> bool:
    """True if `error` is a lack of device memory."""
    if "torch.OutOfMemoryError" in _kinds(error):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_IS_FULL)


def is_sticky(error: BaseException) -> bool:
    """True if this process cannot compute any more after `error`: its CUDA context is unusable, or a tensor-parallel
    rank is lost."""
    if isinstance(error, RankLost | StartError):
        return True
    if is_exhausted(error):
        return False
    return "torch.AcceleratorError" in _kinds(error) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


def one_line(error: BaseException) -> str:
    """The message of `error` in one line of at most MAX_MESSAGE characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "\N{HORIZONTAL ELLIPSIS}"


def is_of_code(error: BaseException) -> bool:
    """True if `error` is one for invalid values, which the same code raises each time."""
    return isinstance(error, _OF_CODE) or (
        type(error) is RuntimeError and any(words in str(error) for words in _OF_SIZES)
    )


def comes_from(error: BaseException, package: str) -> bool:
    """True if `error` was raised by code of `package`, or by torch called from it."""
    at: TracebackType | None = error.__traceback__
    raised = ""
    while at is not None:
        of = str(at.tb_frame.f_globals.get("__name__")).partition(".")[0]
        raised = raised if of == "torch" else of
        at = at.tb_next
    return raised == package


def _kinds(error: BaseException) -> set[str]:
    return {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
