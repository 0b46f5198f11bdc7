"""Which of two backends of latent attention is faster, as measured.

Tokens per second of whole engines by `python -m benchmarks.gpu.host_planned`, whose files lie in
benchmarks/results. Where nothing is measured, the backend that needs no host plan is taken.
"""

from __future__ import annotations

# by what the GPU's name holds: backend to tokens per second, by batch size; FlashInfer's windows
# planned from the host's arrays
TOKENS_PER_SECOND: dict[str, dict[str, dict[int, float]]] = {
    "H200": {
        "flashinfer": {1: 321.5, 8: 1931.0, 32: 6313.7},
        "triton": {1: 319.1, 8: 1859.4, 32: 6374.7},
    },
}


def faster_for_latents(gpu: str) -> str:
    """Return "flashinfer" where it decoded faster at every batch size measured, else "triton"."""
    for name, by_backend in TOKENS_PER_SECOND.items():
        if name in gpu:
            host, device = by_backend["flashinfer"], by_backend["triton"]
            is_faster = all(host[batch] > device[batch] for batch in device)
            return "flashinfer" if is_faster else "triton"
    return "triton"
