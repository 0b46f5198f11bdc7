"""Chunked prefill of linear layers over packed segments."""

from gapless.ops.linear_chunk.indices import ChunkPlan, plan_chunks
from gapless.ops.linear_chunk.reference import ChunkIndices, chunk_prefill

__all__ = ["ChunkIndices", "ChunkPlan", "chunk_prefill", "plan_chunks"]
