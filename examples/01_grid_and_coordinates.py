"""Where are the tokens? One grid, four numberings, one product."""

import visionpos as vp

grid = vp.Grid.of_image((48, 80), patch=16)
print("grid (t, y, x):", grid.shape)
for unit in ("index", "centred", "endpoint", "fractional"):
    coords = vp.coordinates(grid, vp.CoordSpec(unit=unit)).round(decimals=3)
    print(
        f"{unit:10} first {list(map(str, coords[0].numpy()))} last {list(map(str, coords[-1].numpy()))}"
    )
turns = vp.angles(vp.coordinates(grid), vp.axial_freqs(64, theta=100.0))
print("angles [n, pairs]:", tuple(turns.shape))
