#!/usr/bin/env python3
"""dequantize.py FROM.gguf TO.gguf: the same model with every weight as a 32-bit float. Needs the packages gguf and numpy."""
import sys

import gguf

if len(sys.argv) != 3:
    sys.exit(__doc__)
source = gguf.GGUFReader(sys.argv[1])
architecture = source.fields["general.architecture"].contents()
target = gguf.GGUFWriter(sys.argv[2], architecture)
for field in source.fields.values():
    # The writer writes these itself.
    if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
        continue
    element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
    target.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
target.add_file_type(gguf.LlamaFileType.ALL_F32)
for tensor in source.tensors:
    weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
    target.add_tensor(tensor.name, weights, raw_dtype=gguf.GGMLQuantizationType.F32)
target.write_header_to_file()
target.write_kv_data_to_file()
target.write_tensors_to_file()
target.close()
