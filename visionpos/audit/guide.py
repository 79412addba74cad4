"""The guide: what the atlas knows beside what is shipped. Groups, published models, and the schemes of the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from visionpos import config

_STRICT: dict[str, str] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How encodings of one kind are listed: chapter, scheme, and words to find them by."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    family: str
    scheme: str
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One scheme of the field, and what the package has of it: see the fields of `Entry`."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    chapter: str
    name: str
    about: str
    models: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    outside: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What `configs/audit/atlas.yaml` holds.

    Args:
        kinds: kind of encoding -> how it is listed.
        unattached: shipped encodings that no retrofit command takes as they are.
        uncompared: pairs of one dialect row that cannot be compared on a grid.
        models: shipped encoding -> published models that use it.
        guide: the schemes of the field, chapter by chapter.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    kinds: dict[str, Kind]
    unattached: tuple[str, ...]
    uncompared: tuple[tuple[str, str], ...]
    models: dict[str, tuple[str, ...]]
    guide: tuple[Scheme, ...]


def guide() -> Guide:
    """Return what the file says.

    Raises:
        ConfigError: if the file has an unknown or a missing key.
    """
    text = config.shipped("audit")["atlas"].read_text(encoding="utf-8")
    return config.parse(Guide, config.read_yaml(text, source="atlas.yaml"), source="atlas.yaml")
