"""Where are the tokens? One grid, four numberings, one product."""

import visionpos as vp

grid = vp.Grid.of_image((48, 80), patch=16)
print("grid (t, y, x):", grid.shape)
for unit in ("index", "centred", "endpoint", "fractional"):
    coords = vp.coordinates(grid, vp.CoordSpec(unit=unit))
    print(f"{unit:10} first {[round(c, 3) for c in coords[0].tolist()]}, last {[round(c, 3) for c in coords[-1].tolist()]}")
turns = vp.angles(vp.coordinates(grid), vp.axial_freqs(64, theta=100.0))
print("angles [n, pairs]:", tuple(turns.shape))
