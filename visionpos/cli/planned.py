"""How the command line shows families and plans: one row a family, one row a view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from visionpos.vlm import Family


_SEEN = {"one view": "one view", "tiles, per_view": "tiles", "tiles, joined": "joined tiles"}


def family_rows() -> list[dict[str, Any]]:
    """Return what each shipped family is: dialects, variants, how it sees images, axes of its ids."""
    from visionpos.vlm import family, family_names

    rows = []
    for name in family_names():
        fam = family(name)
        spec, language = fam.spec, fam.spec.language
        rows.append(
            {
                "name": name,
                "default dialect": fam.dialect,
                "dialects": list(fam.dialects),
                "variants": list(fam.variants),
                "images": "one view" if spec.views.pick is None else f"tiles, {spec.views.arrange}",
                "video": spec.video is not None,
                "axes": list(spec.rule.axes) if spec.rule is not None else [],
                "sections": ""
                if language is None
                else f"{language.order} {list(language.sections)}",
            }
        )
    return rows


def family_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows as few columns, which fit a terminal of 80 characters; the default dialect is named first."""
    return [
        {
            "name": row["name"],
            "images": _SEEN[row["images"]] + (", clips" if row["video"] else ""),
            "ids": ", ".join(filter(None, [" ".join(row["axes"]), row["sections"]])),
            "dialects": ", ".join(row["dialects"]),
            "variants": ", ".join(row["variants"]),
        }
        for row in rows
    ]


def plan_rows(fam: Family, segments: Sequence[Any]) -> list[dict[str, Any]]:
    """Return one row for every view that the encoder sees: its size, source rectangle, padding and grids."""
    from visionpos.vlm import Image, Video

    images = max(sum(isinstance(segment, Image) for segment in segments), 1)
    return [
        {
            "segment": number,
            "view": view.node,
            "tile": view.tile_rc,
            "size_hw": view.size_hw,
            "source_yxyx": [round(float(edge), 3) for edge in view.source_yxyx],
            "padding_px": [int(edge) for edge in view.padding_px],
            "patches": view.patches.shape,
            "tokens": view.tokens.shape,
        }
        for number, segment in enumerate(segments)
        if isinstance(segment, Image | Video)
        for view in fam.plan(segment, images).views
    ]
