"""convert.py MODEL.gguf DIRECTORY: a Llama model of a GGUF file as a Hugging Face directory, with weights in bf16.

vLLM reads such directories. Weights are dequantized, the rows of query and key go back to the order that Hugging Face has them in,
and tokenizer and chat template are taken from the file's metadata.
"""

import json
import pathlib
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

# Names of a layer's tensors: the file's, Hugging Face's.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
# Type of special tokens in the file's list.
CONTROL = 3


def interleaved_to_halves(weight, heads):
    """The file has the pairs that are rotated together side by side; Hugging Face has their first ones first."""
    rows = weight.reshape(heads, -1, 2, weight.shape[1])
    return rows.transpose(0, 2, 1, 3).reshape(weight.shape)


def bf16(values):
    """The nearest bf16, halves to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(reader, heads, kv_heads):
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = weight.reshape([int(size) for size in reversed(tensor.shape)])
        if tensor.name in WHOLE:
            yield WHOLE[tensor.name], weight
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            weight = interleaved_to_halves(weight, heads if kind == "attn_q" else kv_heads)
        yield f"model.layers.{layer}.{LAYER[kind]}.weight", weight


def write_safetensors(path, named):
    header, data, end = {"__metadata__": {"format": "pt"}}, [], 0
    for name, weight in named:
        blob = bf16(weight).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [end, end + len(blob)]}
        end += len(blob)
        data.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data)


def tokenizer(field):
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": i, "content": text, **plain} for i, text in enumerate(tokens) if types[i] == CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: i for i, text in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in field("tokenizer.ggml.merges")],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def main(source, directory):
    reader, directory = GGUFReader(source), pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    field = lambda name: reader.fields[name].contents()
    size = lambda name: int(field(f"llama.{name}"))
    heads, kv_heads = size("attention.head_count"), size("attention.head_count_kv")
    write_safetensors(directory / "model.safetensors", tensors(reader, heads, kv_heads))
    eos, bos = int(field("tokenizer.ggml.eos_token_id")), int(field("tokenizer.ggml.bos_token_id"))
    tokens = field("tokenizer.ggml.tokens")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size("embedding_length"),
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size("embedding_length") // heads,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("llama.rope.freq_base")),
        "vocab_size": len(tokens),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    words = {"bos_token": tokens[bos], "eos_token": tokens[eos], "chat_template": field("tokenizer.chat_template")}
    words |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in {
        "config.json": config,
        "tokenizer.json": tokenizer(field),
        "tokenizer_config.json": words,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
    }.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
