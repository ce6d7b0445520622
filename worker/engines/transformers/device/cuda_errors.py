"""What an error says of memory and devices. By the names of its kinds: torch may never have been imported."""

from types import TracebackType

from worker.errors import RankLost, StartError

OF_CODE = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""What code raises for values that it makes nothing of, the same each time; torch and devices fail otherwise."""
_DEVICE_IS_FULL = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
"""What CUDA's runtime says where torch's allocator has no part in it (pinned memory, an event, a graph), and what its
libraries say, each handle of which takes some. A context survives both."""


def is_exhausted(error: BaseException) -> bool:
    """Whether `error` says that memory, of the device or of the host, could not be had."""
    if isinstance(error, MemoryError) or is_device_full(error):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_device_full(error: BaseException) -> bool:
    """Whether it says so of the device."""
    if "torch.OutOfMemoryError" in _kinds(error):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_IS_FULL)


def is_sticky(error: BaseException) -> bool:
    """Whether after `error` nothing can be computed by this process any more: its CUDA context is unusable, or a rank
    of its model is lost."""
    if isinstance(error, RankLost | StartError):
        return True
    if is_exhausted(error):
        return False
    return "torch.AcceleratorError" in _kinds(error) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


def one_line(error: BaseException, most: int = 240) -> str:
    """What `error` says, for a message of one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def comes_from(error: BaseException, package: str) -> bool:
    """Whether code of `package` has raised `error`, itself or by what it asked of torch."""
    at: TracebackType | None = error.__traceback__
    raised = ""
    while at is not None:
        of = str(at.tb_frame.f_globals.get("__name__")).partition(".")[0]
        raised = raised if of == "torch" else of
        at = at.tb_next
    return raised == package


def _kinds(error: BaseException) -> set[str]:
    return {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
