"""Streams of real families to pack, cut and decode: text, still images that are no squares, clips longer than wide."""

from functools import cache

from hypothesis import strategies as st

from visionpos.vlm import Family, Image, Text, TokenStream, Video, family

# Three axes as a block, with seconds, and by frame; adjacent pairs; four axes; one axis; fractions along one axis.
NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "hunyuan_vl", "internvl", "internvl_v2pe"]
ROTARY = {
    "head_dim": 64,
    "theta": 1000000,
    "sections": [32],
    "order": "contiguous",
    "pairing": "half",
}

SIZES_HW = [(84, 140), (300, 520), (28, 700)]
PARTS: list[tuple[str, int]] = [("text", 1), ("text", 7)]
PARTS += [("image", at) for at in range(len(SIZES_HW))] + [("clip", 4), ("clip", 8)]


@cache
def fam_of(name: str) -> Family:
    """The family; one axis of ids gets a layout by overlay, because those families have none of their own."""
    plain = name.startswith("internvl")
    return family(name, overlay={"language": ROTARY} if plain else None)


@cache
def stream_of(name: str, parts: tuple[tuple[str, int], ...]) -> TokenStream:
    """The stream of a prompt; a family without clips gets a stretch of text for one."""
    fam, segments = fam_of(name), []
    for kind, number in parts:
        if kind == "image":
            segments.append(Image(SIZES_HW[number]))
        elif kind == "clip" and fam.spec.video is not None:
            segments.append(Video((96, 160), seconds=[float(at) for at in range(number)]))
        else:
            segments.append(Text(tokens=number))
    return fam.stream(segments)


def prompts(*, least: int = 1, most: int = 4) -> st.SearchStrategy[tuple[tuple[str, int], ...]]:
    """Draw the parts of a prompt."""
    return st.lists(st.sampled_from(PARTS), min_size=least, max_size=most).map(tuple)
