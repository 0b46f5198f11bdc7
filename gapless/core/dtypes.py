"""Sizes of the number types that weights, states and pages are kept in."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
