"""How the ids of one vocabulary turn into bytes and text: read from the tokenizer's decoder, checked to be one we know.

Two kinds exist: byte-level (each token is bytes) and byte fallback (tokens are text, some are single bytes). Invariant:
what is described here joins to exactly what the library's decoder gives.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import tokenizers

from poise.errors import ModelFileError

# The library reads the two digits as Rust parses a number, which may carry a plus sign.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF = byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenDecoding:
    """`byte_level`, else byte fallback; `strip_space`: one space at the start of a text is dropped."""

    byte_level: bool
    strip_space: bool = False

    def token_bytes(self, token: str) -> bytes:
        """Bytes of a token as the vocabulary spells it."""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:
                return token.encode()  # an added token, written as it is
        byte = fallback_byte(token)
        return token.replace("▁", " ").encode() if byte is None else bytes([byte])


def fallback_byte(token: str) -> int | None:
    """The byte that a token such as `<0x0A>` stands for, None for any other token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return int(match.group(1), 16) if match else None


def read_decoding(tokenizer: tokenizers.Tokenizer) -> TokenDecoding:
    """The kind of `tokenizer`'s decoder; ModelFileError for one that is not supported."""
    if tokenizer.decoder is None:
        raise ModelFileError("the tokenizer has no decoder, expected ByteLevel or ByteFallback")
    # The decoder's state is its JSON: small, and the only public view of what it does.
    state = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenDecoding(byte_level=True)
    if (
        kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
        and (steps[0]["pattern"], steps[0]["content"]) == ({"String": "▁"}, " ")
        and (
            len(steps) == 3
            or (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) == (" ", 1, 0)
        )
    ):
        return TokenDecoding(byte_level=False, strip_space=len(steps) == 4)
    raise ModelFileError(
        f"the tokenizer's decoder is {' + '.join(kinds)}, which is not supported: "
        "expected ByteLevel, or Replace + ByteFallback + Fuse (+ Strip)"
    )
