"""Everything ckn_scale raises on purpose. The command line ends with the `exit_code` of what it catches.

CknScaleError               exit code 1
├── InputError              the user can fix it: a path, a setting, a port. Exit code 2.
│   ├── SettingsError       a preset, key or value
│   ├── RunMismatch         the run folder holds other settings, another format or numerics class
│   ├── UnsupportedStore    the store cannot keep the promises a run folder needs
│   ├── MissingDependency   an optional package or a device is needed, and the sentence says which
│   ├── AccessDenied        a server wants a key, or another one
│   └── NotFound            a server has no such image or version
├── ImageRejected           one image cannot be used; becomes a row with `state` and `reason`
├── CorruptData             bytes are not the ones that were recorded (sha256, rows, form)
├── TransientStoreError     the store failed in a way that may pass; retried, then fails the shard
├── RunFailed               a run ended with shards undone or a gate not passed
└── ServerError             a server did not answer as it should; has its `status` and `code`
    ├── ServerBusy          it has too much to do, or parts of it are missing; `retry_after_s`
    └── ServerUnreachable   nobody answered, or not in time

Some modules derive an error of their own from these, to catch it by itself: BrokenContainer,
NotRegularFile and UnusableImage are InputErrors, NotLoaded is a CknScaleError.
"""

from __future__ import annotations


class CknScaleError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1


class InputError(CknScaleError):
    """The user can fix it: a path, a setting, a port. Exit code 2."""

    exit_code = 2


class SettingsError(InputError):
    """A preset, key or value that does not exist."""


class RunMismatch(InputError):
    """The run folder holds other settings, another format or numerics class."""


class UnsupportedStore(InputError):
    """The store cannot keep the promises that a run folder needs."""


class MissingDependency(InputError):
    """An optional package or a device is needed; the sentence says which."""


class AccessDenied(InputError):
    """A server wants a key, or one that is for what was asked."""


class NotFound(InputError):
    """A server has no such image, or does not hold the version."""


class ImageRejected(CknScaleError):
    """One image cannot be used. `state` is one of `schemas.IMAGE_STATES`."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(f"{state}: {reason}")
        self.state = state
        self.reason = reason

    def __reduce__(self) -> tuple[type[ImageRejected], tuple[str, str]]:
        return (type(self), (self.state, self.reason))


class CorruptData(CknScaleError):
    """Bytes are not the ones that were recorded."""


class TransientStoreError(CknScaleError):
    """The store failed in a way that may pass; it was tried again before."""


class RunFailed(CknScaleError):
    """A run ended with shards undone or a gate not passed. Exit code 1."""


class ServerError(CknScaleError):
    """A server did not answer as it should. `request_id` is what its log calls the request."""

    def __init__(self, message: str, *, status: int = 0, code: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.request_id = request_id


class ServerBusy(ServerError):
    """The server has too much to do, or parts of it are missing; `retry_after_s` where it says when."""

    retry_after_s: float | None = None


class ServerUnreachable(ServerError):
    """Nobody answered, or not in time."""
