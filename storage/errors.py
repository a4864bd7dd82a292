"""The one family of errors that GraphKiln raises on purpose.

Each carries a machine-readable `reason` and says whether trying again may help (`retryable`). A message says
what happened, to what, and what to do. Anything else that escapes is a bug of ours and keeps its traceback.
"""

from typing import ClassVar


class GraphKilnError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        reason: short kebab-case word for scripts, such as ``"unknown-backend"``.
        retryable: whether the same call may succeed later with nothing changed by hand.
        exit_code: what the command line exits with.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, reason: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.retryable = retryable


class BadInputError(GraphKilnError):
    """Something that a user wrote or set up is wrong: a spec, an option, a missing extra, a read-only store."""

    exit_code = 2


class CompileFailedError(GraphKilnError):
    """At least one kernel graph did not compile, so that nothing was committed."""

    exit_code = 3


class DamagedStoreError(GraphKilnError):
    """A stored object is missing, truncated or altered, and cannot be used."""

    exit_code = 4

    def __init__(self, message: str, *, reason: str = "damaged", path: str = "") -> None:
        super().__init__(message, reason=reason)
        self.path = path


class NotCommittedError(GraphKilnError):
    """No committed variant, or more than one, suits what was asked for."""

    exit_code = 5


class StoreUnavailableError(GraphKilnError):
    """The store's medium failed: the disk is full, the network is down, an I/O error."""

    exit_code = 6


class UntrustedError(GraphKilnError):
    """A stored object is whole, but nobody who is trusted has signed it as it is, or it has been put back.

    Attributes:
        path: the object.
        stored: its bytes, for who replaces exactly them.
    """

    exit_code = 7

    def __init__(self, message: str, *, reason: str, path: str = "", stored: bytes = b"") -> None:
        super().__init__(message, reason=reason)
        self.path = path
        self.stored = stored
