"""Small tokenizers of both kinds, built from GGUF-style metadata."""

from __future__ import annotations

from functools import cache

from poise.models.config import TokenizerData
from poise.tokenizer.decoding import byte_alphabet
from poise.tokenizer.tokenizer import Tokenizer

CONTROL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = ("h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ hello", "i m", "s t", "a r", "Ã ©", "é Ĥ")


def byte_level_metadata(pre: str = "smollm") -> dict[str, object]:
    merges = [merge for merge in _MERGES if "é" not in merge]
    tokens = [*CONTROL_TOKENS, "<think>", *byte_alphabet()]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [3] * len(CONTROL_TOKENS) + [4] + [1] * (len(tokens) - len(CONTROL_TOKENS) - 1)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentencepiece_metadata(space_prefix: bool = True) -> dict[str, object]:
    control = ("<unk>", *CONTROL_TOKENS)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    user_defined = ["▁▁", "▁▁▁", "<think>"]
    pieces = [
        *"▁helowrd<|>/imsta_n日本é.",
        *(
            "he",
            "ll",
            "hell",
            "hello",
            "▁hello",
            "or",
            "wor",
            "ld",
            "world",
            "▁world",
            "<s",
            "im",
            "日本",
        ),
    ]
    tokens = [*control, *byte_tokens, *user_defined, *pieces]
    types = [2, *[3] * (len(control) - 1), *[6] * 256, *[4] * 3, *[1] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0 if kind != 1 else -float(i) for i, kind in enumerate(types)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def build(metadata: dict[str, object], *, add_bos: bool = False) -> Tokenizer:
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    assert isinstance(bos, int)
    assert isinstance(eos, int)
    return Tokenizer(
        TokenizerData(
            gguf=metadata,
            bos_token_id=bos,
            eos_token_ids=(eos,),
            add_bos_token=add_bos,
            chat_template=CHAT_TEMPLATE,
            special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        )
    )


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """One of "byte level", "sentencepiece", "sentencepiece without prefix"."""
    if kind == "byte level":
        return build(byte_level_metadata())
    return build(sentencepiece_metadata(space_prefix=kind == "sentencepiece"))


KINDS = ("byte level", "sentencepiece", "sentencepiece without prefix")
