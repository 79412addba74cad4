"""Paired ratios against named peers and against a copy of the same bytes. Run by `make bench`; prints a table and JSON.

Every pair is checked for equal results before it is timed. Ratios below 1 mean less time than the peer.
"""

from __future__ import annotations

import json
import os
from functools import partial

# glibc returns large blocks to the system at every free: a copy would pay page faults that no kernel pays.
if os.environ.get("MALLOC_MMAP_MAX_") is None:
    import sys

    os.environ.update(
        MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="100000000000", OMP_NUM_THREADS="1"
    )
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.run", *sys.argv[1:]])  # noqa: S606 (this very script again)

import timm
import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import Eva

import visionpos as vp
from benchmarks import encodings
from benchmarks.paired import copy_of, ratio
from visionpos import retrofit


def rotation(pairing: str, batch: int, tokens: int, dtype: torch.dtype) -> dict[str, object]:
    """Rotate q and k of a ViT-S beside timm's form as its attention uses it (one prefix token)."""
    q, k = torch.randn(2, batch, 6, tokens, 64, dtype=dtype)
    rot = vp.Rotation.of(torch.randn(tokens - 1, 32), pairing)
    cos, sin = rot.full_width()
    table, half = torch.cat([sin, cos], -1), pairing == "half"

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return vp.rotate(q, k, rot, prefix=1)

    def peer() -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.cat([x[:, :, :1], apply_rot_embed_cat(x[:, :, 1:], table, half=half)], 2)
            for x in (q, k)
        )

    # Halves turn with a fused multiply-add here: the last bit is another, and nearer to float64.
    close = (
        partial(torch.allclose, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=2e-6)
        if half
        else torch.equal
    )
    assert all(close(a, b) for a, b in zip(ours(), peer(), strict=True))
    name = f"rotate q, k  {pairing:8} {str(dtype).removeprefix('torch.'):8} {batch}x6x{tokens}x64"
    return {
        "op": name,
        "peer": "timm",
        "to peer": ratio(ours, peer),
        "to copy": ratio(ours, copy_of(q, k)),
    }


def forward(
    size: int, *, train: bool, dtype: torch.dtype = torch.float32, batch: int = 2
) -> dict[str, object]:
    """One pass of a retrofitted ViT-S beside timm's own rope ViT-S with the same weights.

    "to plain" is against the ViT-S that no position turns: what is left of it is all that a faster rotation could save.
    """
    ours = timm.create_model("vit_small_patch16_224", img_size=size, num_classes=0)
    retrofit.attach(ours, vp.AxialRopeSpec(theta=100.0), strength=1.0)
    peer = Eva(
        img_size=size, patch_size=16, embed_dim=384, depth=12, num_heads=6, num_classes=0, attn_type="rope",
        use_rot_pos_emb=True, rope_type="cat", rope_temperature=100.0, global_pool="token",
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
    )  # fmt: skip
    peer.load_state_dict(
        {key: value for key, value in ours.state_dict().items() if not key.startswith("visionpos")}
    )
    plain = timm.create_model("vit_small_patch16_224", img_size=size, num_classes=0)
    photo = torch.randn(batch, 3, size, size, dtype=dtype)
    models = [model.eval().to(dtype) for model in (ours, peer, plain)]
    found, wanted = ours(photo), peer(photo)
    # In half precision timm rounds its tables, and products with them.
    assert torch.equal(found, wanted) or dtype != torch.float32
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    for model in models:
        model.train(train)
    run = partial(_step if train else _pass, photo)
    kind = f"{(size // 16) ** 2} tokens, {str(dtype).removeprefix('torch.')}, batch {batch}"
    name = f"{'training step' if train else 'forward'} ViT-S, {kind}"
    return {
        "op": name,
        "peer": "timm Eva",
        "to peer": ratio(partial(run, ours), partial(run, peer), rounds=7),
        "to plain": ratio(partial(run, ours), partial(run, plain), rounds=7),
    }


@torch.no_grad()
def _pass(photo: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    return model(photo)


def _step(photo: torch.Tensor, model: torch.nn.Module) -> None:
    model(photo).square().mean().backward()


def resampling(source: int, target: int) -> dict[str, object]:
    """Evaluate a table of 768 channels on another grid beside timm."""
    table = torch.randn(1, source * source + 1, 768)
    grids = {"source": vp.Grid(source, source), "target": vp.Grid(target, target)}

    def ours() -> torch.Tensor:
        return vp.resample(table, recipe="timm", prefix=1, **grids)

    def peer() -> torch.Tensor:
        return resample_abs_pos_embed(
            table, [target, target], [source, source], num_prefix_tokens=1
        )

    assert torch.allclose(ours(), peer(), atol=6e-6)
    name = f"table {source}x{source} -> {target}x{target}, 768 channels"
    return {
        "op": name,
        "peer": "timm",
        "to peer": ratio(ours, peer),
        "to copy": ratio(ours, copy_of(ours())),
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    with torch.no_grad():
        for pairing in ("adjacent", "half"):
            for dtype in (torch.float32, torch.bfloat16):
                rows += [rotation(pairing, 8, 197, dtype), rotation(pairing, 16, 1025, dtype)]
        rows += [resampling(14, 64), resampling(37, 64), resampling(37, 16)]
    rows += encodings.rows()
    rows += [forward(size, train=train) for size in (224, 512) for train in (False, True)]
    rows += [forward(224, train=train, dtype=torch.bfloat16) for train in (False, True)]
    print(
        f"{'operation':52} {'peer':12} {'time / peer':>11} {'time / copy':>11} {'/ no rotation':>13}"
    )
    for row in rows:
        copy = f"{row['to copy']:11.2f}" if "to copy" in row else " " * 11
        plain = f"{row['to plain']:13.2f}" if "to plain" in row else ""
        print(f"{row['op']:52} {row['peer']:12} {row['to peer']:11.2f} {copy} {plain}")
    print(
        json.dumps(
            {
                "device": "cpu, 1 thread",
                "torch": torch.__version__,
                "timm": timm.__version__,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
