"""Fixtures of this folder."""

from tests.engine_fixtures import make_llm, tiny_checkpoint, tiny_model
from tests.ranks import checkpoint_of

__all__ = ["checkpoint_of", "make_llm", "tiny_checkpoint", "tiny_model"]
