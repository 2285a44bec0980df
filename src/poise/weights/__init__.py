"""Reading checkpoints (GGUF, safetensors), fetching named models, packing tensors into kernel containers."""
