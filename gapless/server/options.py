"""Every option of the server, each declared once; flags and help are generated from here."""

from __future__ import annotations

from dataclasses import dataclass, field

from gapless.errors import ConfigError

# ruff: noqa: TC001 (annotations are read at run time)
from gapless.text.tools import ToolStyle


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the user asks of the server.

    Raises:
        ConfigError: a value is out of its range.
    """

    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine only, 0.0.0.0 from all."""
    port: int = 8000
    """Port to listen on; 0 takes a free one, which the first line of output names."""
    api_key: str | None = field(default=None, repr=False)
    """Key that clients must send as `Authorization: Bearer KEY`; default: that of the variable
    GAPLESS_API_KEY, and none where it is not set."""
    served_model_name: str | None = None
    """Name that clients call the model by; default: what --model says, or gapless-demo."""
    chat_template: str | None = None
    """File with a Jinja template, or the template itself, instead of the checkpoint's."""
    tool_call_parser: ToolStyle | None = None
    """How the model writes tool calls; default: as its chat template teaches."""
    max_body_bytes: int = 8 * 2**20
    """Largest body of a request."""
    request_timeout_seconds: float = 3600.0
    """Time that a request may take, from its first byte to its last token."""
    drain_seconds: float = 30.0
    """Time that running requests get to finish after SIGTERM."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port}: want 0 to 65535")
        if self.api_key == "":
            raise ConfigError("api_key='': want at least one character, or no key at all")
        if self.served_model_name == "":
            raise ConfigError("served_model_name='': want at least one character")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes}: want at least 1024")
        # `not >` is also true of a NaN
        if not self.request_timeout_seconds > 0:
            raise ConfigError(
                f"request_timeout_seconds={self.request_timeout_seconds}: want more than 0"
            )
        if not 0 <= self.drain_seconds < float("inf"):
            raise ConfigError(f"drain_seconds={self.drain_seconds}: want a number of at least 0")
