"""One table, eight recipes: how far apart do they land when a 14x14 table serves 20x28?"""

import torch

import visionpos as vp

torch.manual_seed(0)
source, target = vp.Grid(14, 14), vp.Grid(20, 28)
table = torch.randn(source.size, 384)
timm = vp.resample(table, source=source, target=target, recipe="timm")
for recipe in (
    "dinov2_reg",
    "hf_dinov2",
    "dinov2",
    "torchvision",
    "big_vision",
    "siglip2_naflex",
    "nearest",
):
    other = vp.resample(table, source=source, target=target, recipe=recipe)
    print(f"{recipe:15} {(other - timm).norm() / timm.norm():.3f} away from timm")
there = vp.resample(table, source=source, target=source, recipe="timm")
print("equal grids return the table itself:", there is table)
