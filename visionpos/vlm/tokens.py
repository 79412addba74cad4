"""Tokens: how text and symbolic names become vocabulary ids.

Three kinds of tokenizer are accepted everywhere: an object with `encode` (transformers, tokenizers), a callable from
text to ids, and a mapping from word to id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from visionpos.errors import PositionError


@runtime_checkable
class Encoder(Protocol):
    """A tokenizer object of transformers or tokenizers."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Return token ids, or an object that holds them as `ids`."""


Tokenizer = Encoder | Callable[[str], Sequence[int]] | Mapping[str, int]


def encode(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of a text.

    Args:
        text: the characters; nothing is added before or after them.
        tokenizer: an `Encoder`, a callable, or a mapping that holds every whitespace-separated word.

    Raises:
        PositionError: if a mapping lacks a word.

    Example:
        >>> encode("a cat", {"a": 1, "cat": 2}), encode("ab", lambda text: [ord(c) for c in text])
        ((1, 2), (97, 98))
    """
    if isinstance(tokenizer, Mapping):
        missing = sorted({word for word in text.split() if word not in tokenizer})
        if missing:
            raise PositionError(
                f"tokenizer is a mapping without {', '.join(map(repr, missing))}; it must hold every token. "
                "Add them, or pass the model's tokenizer."
            )
        return tuple(tokenizer[word] for word in text.split())
    if isinstance(tokenizer, Encoder):
        encoded = tokenizer.encode(text, add_special_tokens=False)
        return tuple(encoded if isinstance(encoded, Sequence) else encoded.ids)
    return tuple(tokenizer(text))


def encode_joined(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of texts that follow each other without a break.

    A tokenizer sees them as one text, because a merge may cross from one into the next. A mapping knows whole words,
    so it is asked one by one.
    """
    if isinstance(tokenizer, Mapping):
        return tuple(one for text in texts for one in encode(text, tokenizer))
    return encode("".join(texts), tokenizer)


def token_id(name: str, tokenizer: Tokenizer) -> int:
    """Return the one id of a marker such as `<|vision_start|>`.

    Raises:
        PositionError: if the tokenizer knows it not, or splits it.

    Example:
        >>> token_id("<|vision_start|>", {"<|vision_start|>": 151652})
        151652
    """
    if isinstance(tokenizer, Mapping):
        ids: tuple[int, ...] = (tokenizer[name],) if name in tokenizer else ()
    else:
        ids = encode(name, tokenizer)
    if len(ids) != 1:
        raise PositionError(
            f"token {name!r} is {len(ids)} tokens for this tokenizer; a marker must be exactly one. "
            "Pass the tokenizer of this family's checkpoint, or a mapping that holds the marker."
        )
    return ids[0]
