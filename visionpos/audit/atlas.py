"""The atlas: who uses what. Every scheme of the field, every shipped encoding and every family of streams, as entries.

An entry is data: names to filter by, the YAML that holds it, where its sources part, and the commands that use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from visionpos import config
from visionpos.audit.guide import Guide, Scheme, guide
from visionpos.dialects import Row, dialect_rows
from visionpos.errors import PositionError, did_you_mean
from visionpos.vlm import Family, family, family_names

STREAMS = "Vision-language stream"
BACKBONE = "vit_base_patch16_224"  # any timm name would do; its 12 heads fit every filling that counts heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that can be looked up.

    Args:
        id: unique, and stable from release to release: "encoding-dinov3".
        sort: "scheme" of the field, a shipped "encoding", or a "stream" family.
        name: what it is called; of encodings and streams, the name that commands take.
        title: one line about it.
        families: the chapters or doors that it belongs to.
        schemes: the schemes that it is an instance of.
        models: published models that use it.
        keywords: further words to find it by.
        source: the public code or paper it was read from.
        file: its YAML, as a path in the repository; empty for a scheme without one.
        yaml: the text of that file.
        dialects: where its sources part, one sentence each; of a stream, the dialects that can be asked for.
        commands: what to type.
        outside: why the package has no code of a scheme, or what stands nearest; empty where it has.
        see: ids of entries that belong to it.
    """

    id: str
    sort: Literal["scheme", "encoding", "stream"]
    name: str
    title: str
    families: tuple[str, ...]
    schemes: tuple[str, ...]
    models: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    source: str = ""
    file: str = ""
    yaml: str = ""
    dialects: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    outside: str = ""
    see: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return all that a keyword is looked for in, in lower case."""
        groups = (self.families, self.schemes, self.models, self.keywords, self.dialects)
        texts = (self.name, self.title, self.source, self.yaml, self.outside)
        return "\n".join((*texts, *(word for group in groups for word in group))).lower()


def atlas() -> tuple[Entry, ...]:
    """Return every entry: the schemes of the field by chapter, then encodings, then stream families, by name.

    Example:
        >>> next(entry.models for entry in atlas() if entry.name == "dinov3")
        ('DINOv3',)
    """
    found, rows = guide(), dialect_rows()
    encodings = [_encoding(name, found, rows) for name in config.shipped("encodings")]
    streams = [_stream(name, found, rows) for name in family_names()]
    known = {entry.id: entry for entry in (*encodings, *streams)}
    schemes = [_scheme(one, known) for one in found.guide]
    return (*schemes, *encodings, *streams)


def select(
    entries: Sequence[Entry],
    *,
    family: str | None = None,
    model: str | None = None,
    scheme: str | None = None,
    match: str | None = None,
) -> tuple[Entry, ...]:
    """Return the entries that fit all that is given, whatever the case of letters.

    Args:
        entries: from `atlas()`.
        family: a chapter or door, such as "Rotary".
        model: a published model, such as "DINOv3".
        scheme: a scheme, such as "Axial 2-D RoPE".
        match: words that must all stand somewhere in the entry, its YAML included.

    Raises:
        PositionError: if no entry has such a family, model or scheme, or none fits; the message names near ones.

    Example:
        >>> [entry.name for entry in select(atlas(), model="Perceiver") if entry.sort == "encoding"]
        ['perceiver_fourier']
    """
    kept = list(entries)
    for what, value in (("families", family), ("models", model), ("schemes", scheme)):
        if value is None:
            continue
        known = {word.casefold() for entry in entries for word in getattr(entry, what)}
        if value.casefold() not in known:
            raise PositionError(
                f"{what} hold no {value!r}; one of the atlas is required. `visionpos atlas --json` lists "
                f"them.{did_you_mean(value, sorted(known))}"
            )
        kept = [
            entry for entry in kept if value.casefold() in map(str.casefold, getattr(entry, what))
        ]
    words = (match or "").lower().split()
    kept = [entry for entry in kept if all(word in entry.words for word in words)]
    if not kept:
        raise PositionError(
            "no entry of the atlas fits all filters; leave one out, or give fewer words to match."
        )
    return tuple(kept)


def _scheme(one: Scheme, known: Mapping[str, Entry]) -> Entry:
    see = (
        *(f"encoding-{name}" for name in one.encodings),
        *(f"stream-{name}" for name in one.streams),
    )
    missing = [name for name in see if name not in known]
    if missing:
        raise PositionError(
            f"atlas.yaml: scheme {one.name!r} names {missing[0]}, which is not shipped; correct its name."
        )
    commands = (one.command,) if one.command else ()
    linked = [known[name] for name in see]
    return Entry(
        id="scheme-" + "".join(sign if sign.isalnum() else "-" for sign in one.name.lower()),
        sort="scheme",
        name=one.name,
        title=one.about,
        families=(one.chapter,),
        schemes=(one.name,),
        models=one.models,
        keywords=one.keywords,
        dialects=_once(line for entry in linked for line in entry.dialects),
        commands=(*commands, *_once(entry.commands[0] for entry in linked)),
        outside=one.outside,
        see=see,
    )


def _encoding(name: str, found: Guide, rows: Sequence[Row]) -> Entry:
    text = config.shipped("encodings")[name].read_text(encoding="utf-8")
    data = config.read_yaml(text, source=f"{name}.yaml")
    kind = data["encoding"]["kind"]
    if kind not in found.kinds:
        raise PositionError(f"atlas.yaml: kinds has no {kind!r}, the kind of {name}; add it.")
    group, about = found.kinds[kind], data.get("about", {})
    parted = [row for row in rows if _reads(row, name, kind)]
    listed = [one for one in found.guide if name in one.encodings and not one.outside]
    show = f"visionpos encodings {name}"
    attach = f"visionpos retrofit {BACKBONE} --encoding {name} --output model.safetensors"
    compare = _compared(name, parted, found)
    return Entry(
        id=f"encoding-{name}",
        sort="encoding",
        name=name,
        title=_title(text),
        families=_once((group.family, *(one.chapter for one in listed))),
        schemes=_once((group.scheme, *(one.name for one in listed))),
        models=found.models.get(name, ()),
        keywords=(kind, *group.keywords),
        source="; ".join(str(about[key]) for key in ("source", "paper") if key in about),
        file=f"configs/encodings/{name}.yaml",
        yaml=text,
        dialects=_once(map(_sentence, parted)),
        commands=(show, *(() if name in found.unattached else (attach,)), *compare),
    )


def _stream(name: str, found: Guide, rows: Sequence[Row]) -> Entry:
    text = config.shipped("vlm")[name].read_text(encoding="utf-8")
    fam = family(name)
    title = _title(text)
    command = f"visionpos stream photo.jpg --family {name}"
    parted = [row for row in rows if _reads(row, name, None)]
    listed = [one for one in found.guide if name in one.streams and not one.outside]
    lines = text.splitlines()
    source = next((line[1:].strip() for line in lines if line.startswith("# source:")), "")
    return Entry(
        id=f"stream-{name}",
        sort="stream",
        name=name,
        title=title,
        families=_once((STREAMS, *(one.chapter for one in listed))),
        schemes=_once((*_stream_schemes(fam), *(one.name for one in listed))),
        models=(title.partition(":")[0],),
        keywords=fam.variants,
        source=source.removeprefix("source:").strip(),
        file=f"configs/vlm/{name}.yaml",
        yaml=text,
        dialects=(*(f"dialect {one}" for one in fam.dialects), *_once(map(_sentence, parted))),
        commands=(
            f"{command} --html stream.html",
            *(f"{command} --dialect {one}" for one in fam.dialects if one != fam.dialect),
            *(f"{command} --variant {one}" for one in fam.variants),
        ),
    )


def _stream_schemes(fam: Family) -> tuple[str, ...]:
    """Return what a family does, read off its data."""
    spec, rule, language = fam.spec, fam.spec.rule, fam.spec.language
    found = ["One view" if spec.views.pick is None else f"Tiling, {spec.views.arrange}"]
    if spec.grid.queries is not None:
        found.append("Queries instead of cells")
    if rule is None:
        return (*found, "Encoder alone")
    found.append("1-D ids" if len(rule.axes) == 1 else f"M-RoPE, {len(rule.axes)} axes of ids")
    if rule.cell_step != 1 or rule.cell_span is not None:
        found.append("Steps of cells other than 1")
    if rule.place != "unit" or rule.circle is not None:
        found.append("Cells on one canvas" if rule.circle is None else "Cells on a circle")
    if rule.counts_seconds:
        found.append("Absolute time")
    if language is not None and language.axes > 1:
        found.append(f"Sections, {language.order}")
    return tuple(found)


def _reads(row: Row, name: str, kind: str | None) -> bool:
    """Return whether a row of dialects is about an entry: by its name, or by the kind that it computes."""
    named = any(one.partition(",")[0] == name for reading in row.readings for one in reading.names)
    return named or any(
        kind is not None and (reading.spec or {}).get("kind") == kind for reading in row.readings
    )


def _sentence(row: Row) -> str:
    names = _once(name for reading in row.readings for name in reading.names)
    return f"{row.topic}: {row.what} ({'; '.join(names)})"


def _compared(name: str, rows: Iterable[Row], found: Guide) -> tuple[str, ...]:
    """Return the commands that show where two shipped names part."""
    shipped = config.shipped("encodings")
    apart = {name, *(one for pair in found.uncompared if name in pair for one in pair)}
    others = _once(
        other
        for row in rows
        for reading in row.readings
        for other in reading.names
        if other in shipped
        and other not in apart
        and any(name in one.names for one in row.readings)
    )
    return tuple(f"visionpos encodings --diff {name} {other}" for other in others)


def _title(text: str) -> str:
    """Return the first sentence of a YAML's comment."""
    lines: list[str] = []
    for line in text.splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words or words.startswith("Source:"):
            break
        lines.append(words)
    return " ".join(lines)


def _once(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))
