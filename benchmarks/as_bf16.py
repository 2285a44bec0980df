"""Writes a llama GGUF file once more with its matrices dequantised to bf16, everything else as it was.

    python benchmarks/as_bf16.py MODEL.gguf MODEL-bf16.gguf

Such a file computes what the source's weights say, at the price of bf16: the upper bound of what a coarser copy can draft for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf


def write_bf16(source: Path, target: Path) -> Path:
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            is_array = entry.types[0] is gguf.GGUFValueType.ARRAY
            items = entry.types[-1] if is_array else None
            writer.add_key_value(name, entry.contents(), entry.types[0], items)
    types = gguf.GGMLQuantizationType
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        chosen = types.BF16 if values.ndim == 2 else types.F32
        data = gguf.quants.quantize(values, chosen)
        writer.add_tensor(tensor.name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


if __name__ == "__main__":
    write_bf16(Path(sys.argv[1]), Path(sys.argv[2]))
