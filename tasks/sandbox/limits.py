"""What one job of a child may use."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one job may use. A job that goes past one of them is ended, and fails.

    Attributes:
        seconds: wall time, from handing the job over to its answer.
        memory_bytes: resident memory of the child and all its descendants together. It also bounds how many bytes
            an answer may have.
        log_bytes: size of the log. Checked about ten times a second, so that a log may grow past it before the
            job is ended.
    """

    seconds: float
    memory_bytes: int
    log_bytes: int = 64 * MIB

    def __post_init__(self) -> None:
        for name, value in (
            ("seconds", self.seconds),
            ("memory_bytes", self.memory_bytes),
            ("log_bytes", self.log_bytes),
        ):
            if not value > 0:
                raise ValueError(f"the limit {name} is {value}, but must be more than 0")
