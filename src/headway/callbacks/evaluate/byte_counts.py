"""How many bytes of text the tokens of a token file stand for.

Owns: the count, which bits per byte are computed with. Does not own: token files (data/tokens).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.data.tokenizer import Tokenizer
    from headway.data.tokens import TokenFile

# Bytes of other tokenizers than the byte tokenizer are counted on this much decoded text.
_MOST_DECODED_TOKENS = 1_000_000


def is_of_another(file: TokenFile, tokenizer: Tokenizer) -> bool:
    """Whether the file says that another tokenizer made it."""
    described = file.header.get("tokenizer") or {}
    return bool(described) and described.get("digest") != tokenizer.digest


def count_bytes(file: TokenFile, tokenizer: Tokenizer) -> tuple[int, int]:
    """Bytes of text in a token file and the number of tokens they were counted on."""
    from headway.data.tokenizer import ByteTokenizer

    if isinstance(tokenizer, ByteTokenizer):
        return int((file.tokens < 256).sum()), file.num_tokens
    num_bytes = num_tokens = 0
    for number in range(file.num_documents):
        ids = file.document(number)
        num_bytes += len(tokenizer.decode(ids.tolist()).encode("utf-8"))
        num_tokens += len(ids)
        if num_tokens >= _MOST_DECODED_TOKENS:
            break
    return num_bytes, num_tokens
