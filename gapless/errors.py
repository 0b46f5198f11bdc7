"""Every error that gapless raises on purpose.

    GaplessError
    ├── ConfigError            an option, or a combination of options, that cannot be honoured
    ├── ModelError             a checkpoint that cannot be served
    │   ├── UnsupportedModel   an architecture or weight format that is not registered
    │   └── WeightMismatch     a tensor that is missing, unexpected or misshapen
    ├── RequestError           a request that cannot be served
    │   ├── InvalidRequest     wrong in itself (HTTP 400)
    │   ├── ContextTooLong     more tokens than the model or the pools hold (HTTP 400)
    │   └── Overloaded         refused for want of room (HTTP 503)
    │       └── QueueFull      as many requests wait as may
    ├── BackendUnavailable     an implementation that was asked for and is not there
    └── InternalError          a broken invariant of the engine itself

Messages give the value found, the value wanted and the remedy.
"""


class GaplessError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(GaplessError):
    """An option, or a combination of options, that cannot be honoured."""


class ModelError(GaplessError):
    """A checkpoint that cannot be served."""


class UnsupportedModel(ModelError):
    """An architecture or a weight format that is not registered."""


class WeightMismatch(ModelError):
    """A tensor that is missing, unexpected or misshapen."""


class RequestError(GaplessError):
    """A request that cannot be served; other requests are not affected."""


class InvalidRequest(RequestError):
    """A request that is wrong in itself."""


class ContextTooLong(RequestError):
    """A request with more tokens than the model or the pools hold."""


class Overloaded(RequestError):
    """A request refused for want of room."""


class QueueFull(Overloaded):
    """A request refused because as many wait as may; it can be sent again later."""


class BackendUnavailable(GaplessError):
    """An implementation that was asked for and is not available here."""


class InternalError(GaplessError):
    """A broken invariant of the engine itself."""
