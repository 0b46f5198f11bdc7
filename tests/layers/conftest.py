"""Fixtures of this folder."""

from tests.ranks import checkpoint_of

__all__ = ["checkpoint_of"]
