"""Figures: PNGs of the right kind from known numbers, and the numbers behind them from elsewhere."""

from __future__ import annotations

import io
import math
import sys
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import visionpos as vp
from visionpos.audit.report import figures
from visionpos.errors import PositionError
from visionpos.vlm import family

GRID = vp.Grid(3, 5)


def pixels(png: bytes) -> np.ndarray:
    """The picture that a PNG holds; an error if it is none."""
    assert png.startswith(b"\x89PNG")
    return np.asarray(Pillow.open(io.BytesIO(png)).convert("RGB"))


@pytest.fixture(scope="module", autouse=True)
def matplotlib():
    return pytest.importorskip("matplotlib")


def drawn() -> dict[str, bytes]:
    codes = vp.build(vp.SinCosSpec(dialect="mae"), vp.Dims(embed_dim=16, num_heads=1, depth=1))(
        GRID
    )
    even = torch.full((2, GRID.size, GRID.size), 1 / GRID.size)
    curve = {
        "zoom": [("14x14", 0.8), ("28x28", math.nan)],
        "extend": [("14x14", 0.8), ("28x28", 0.4)],
    }
    return {
        "similarity": figures.similarity_map(
            figures.cosine_similarity(codes), GRID, tokens_yx=[(0, 0), (2, 4), (1, 2), (0, 4), (2, 0)]
        ),
        "frequencies": figures.frequency_map(family("qwen2_vl").frequencies, axes=("t", "y", "x")),
        "distances": figures.distance_histogram(even, GRID, bins=4),
        "curves": figures.resolution_curves(curve, quality="accuracy"),
    }  # fmt: skip


def test_figures_are_pictures_and_repeat():
    """Equal input, equal bytes; and more than one colour of paper in each."""
    first, second = drawn(), drawn()
    for name, png in first.items():
        picture = pixels(png)
        assert min(picture.shape[:2]) > 300
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 10
        assert png == second[name]


def test_cosine_similarity_is_numpys():
    codes = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norms = np.linalg.norm(codes.numpy(), axis=1)
    wanted = codes.numpy() @ codes.numpy().T / np.outer(norms, norms)
    np.testing.assert_allclose(figures.cosine_similarity(codes).numpy(), wanted, rtol=0, atol=1e-14)


def test_phase_similarity_is_the_mean_cosine_of_differences():
    angles = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = np.cos(angles.numpy()[:, None] - angles.numpy()[None]).mean(-1)
    np.testing.assert_allclose(figures.phase_similarity(angles).numpy(), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sides", [(3, 5), (1, 7), (7, 1), (2, 2)])
def test_distance_shares_count_every_pair_once(sides):
    """Against a loop over pairs of cells, in float64."""
    grid, bins = vp.Grid(*sides), 4
    weights = torch.rand(
        2, grid.size, grid.size, generator=torch.Generator().manual_seed(0)
    ).softmax(-1)
    shares, edges = figures.distance_shares(weights, grid, bins=bins)
    cells = list(product(range(sides[0]), range(sides[1])))
    wanted = np.zeros((2, bins))
    farthest = max(math.dist(a, b) for a in cells for b in cells)
    for (n, a), (m, b) in product(enumerate(cells), repeat=2):
        at = min(int(math.dist(a, b) / farthest * bins), bins - 1)
        wanted[:, at] += weights[:, n, m].double().numpy() / grid.size
    assert float(edges[-1]) == pytest.approx(farthest, abs=1e-12)
    np.testing.assert_allclose(shares.numpy(), wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(shares.sum(-1).numpy(), 1.0, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: figures.similarity_map(torch.eye(14), GRID, tokens_yx=[(0, 0)]), r"values are \[14, 14\]"),
        (lambda: figures.similarity_map(torch.eye(15), GRID, tokens_yx=[(3, 0)]), r"tokens_yx has \(3, 0\)"),
        (lambda: figures.similarity_map(torch.eye(15), GRID, tokens_yx=[]), "tokens_yx is empty"),
        (lambda: figures.frequency_map(torch.ones(3)), r"freqs are \[3\]"),
        (lambda: figures.frequency_map(torch.ones(3, 4), axes=("t",)), r"axes \('t',\)"),
        (lambda: figures.distance_histogram(torch.ones(2, 16, 16), GRID), r"weights are \[2, 16, 16\]"),
        (lambda: figures.distance_histogram(torch.ones(2, 15, 15), GRID, bins=0), "bins 0"),
        (lambda: figures.resolution_curves({}), "curves are empty"),
    ],
)  # fmt: skip
def test_figures_refuse(call, said):
    with pytest.raises(PositionError, match=said):
        call()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"Install visionpos\[viz\]"):
        figures.frequency_map(torch.ones(1, 4))


def test_pages_need_no_matplotlib():
    """A page is made where the extra is not installed: nothing imports it before a figure is drawn."""
    import subprocess

    code = "import sys, visionpos.audit.report as r; r.atlas_page(()); sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
