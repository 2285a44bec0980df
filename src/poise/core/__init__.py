"""Request state, scheduler, KV blocks, prefix cache and policies: plain Python, no numpy, no kernels."""
