"""Fixtures of this folder."""

from tests.engine_fixtures import make_llm, tiny_checkpoint, tiny_model

__all__ = ["make_llm", "tiny_checkpoint", "tiny_model"]
