"""What an error says of memory and devices. By the names of its kinds: torch may never have been imported."""

from worker.errors import RankLost, StartError


def is_exhausted(error: BaseException) -> bool:
    """Whether `error` says that memory, of the device or of the host, could not be had."""
    if isinstance(error, MemoryError) or "torch.OutOfMemoryError" in _kinds(error):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


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


def _kinds(error: BaseException) -> set[str]:
    return {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
