"""Tokens: how text and symbolic names become vocabulary ids.

Three kinds of tokenizer are accepted everywhere: an object with `encode` (transformers, tokenizers), a callable from
text to ids, and a mapping from word to id.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        tokenizer: an `Encoder`, a callable, or a mapping that holds the text, or every whitespace-separated word of it;
            of a text of nothing but blanks, every blank.

    Raises:
        PositionError: if a mapping lacks a word, or what comes back is no token ids.

    Example:
        >>> encode("a cat", {"a": 1, "cat": 2}), encode("ab", lambda text: [ord(c) for c in text])
        ((1, 2), (97, 98))
    """
    if isinstance(tokenizer, Mapping):
        words = (text,) if text in tokenizer else tuple(text.split()) or tuple(text)
        missing = sorted({word for word in words if word not in tokenizer})
        if missing:
            raise PositionError(
                f"tokenizer is a mapping without {', '.join(map(repr, missing))}; it must hold every token. "
                "Add them, or pass the model's tokenizer."
            )
        return _whole([tokenizer[word] for word in words], text)
    given: Any = tokenizer
    if isinstance(given, str) or not (callable(given) or isinstance(given, Encoder)):
        raise PositionError(
            f"tokenizer is {given!r}; a tokenizer with encode, a callable from text to ids, or a mapping from token to "
            "id is required. Pass the tokenizer of the checkpoint."
        )
    if isinstance(tokenizer, Encoder):
        encoded = tokenizer.encode(text, add_special_tokens=False)
        return _whole(getattr(encoded, "ids", encoded), text)
    return _whole(tokenizer(text), text)


def _whole(ids: Iterable[Any], text: str) -> tuple[int, ...]:
    """Return token ids as whole numbers."""
    try:
        return tuple(operator.index(one) for one in ids)
    except TypeError:
        raise PositionError(
            f"tokenizer gives {ids!r} for {text!r}; whole numbers are required. Pass one that returns token ids."
        ) from None


def encode_joined(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of texts that follow each other without a break.

    A tokenizer sees them as one text, because a merge may cross from one into the next. A mapping knows whole words,
    so it is asked one by one, and for neighbouring line ends at once.
    """
    if isinstance(tokenizer, Mapping):
        joined: list[str] = []
        for text in texts:
            if joined and not text.strip() and not joined[-1].strip():
                joined[-1] += text
            else:
                joined.append(text)
        return tuple(one for text in joined for one in encode(text, tokenizer))
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
        ids: tuple[int, ...] = _whole([tokenizer[name]], name) if name in tokenizer else ()
    else:
        known, unknown = _vocabulary(name, tokenizer)
        ids = encode(name, tokenizer) if known is None else (known,)
        if known is None and ids == (unknown,):
            ids = ()
    if len(ids) != 1:
        raise PositionError(
            f"token {name!r} is {len(ids)} tokens for this tokenizer; a marker must be exactly one. "
            "Pass the tokenizer of this family's checkpoint, or a mapping that holds the marker."
        )
    return ids[0]


def _vocabulary(name: str, tokenizer: Any) -> tuple[int | None, int | None]:
    """Return the id that a tokenizer object keeps for a token, and the one it has for all it does not know."""
    by_name = getattr(tokenizer, "token_to_id", None)
    if callable(by_name):  # tokenizers
        lost = getattr(getattr(tokenizer, "model", None), "unk_token", None)
        return by_name(name), None if lost is None else by_name(lost)
    unknown: int | None = getattr(tokenizer, "unk_token_id", None)
    by_name = getattr(tokenizer, "convert_tokens_to_ids", None)
    known: int | None = by_name(name) if callable(by_name) else None  # transformers
    if known == unknown and name != getattr(tokenizer, "unk_token", None):
        known = None
    return known, unknown
