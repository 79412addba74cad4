"""The model's own rotary encoding read as a Spec, and the module that keeps another extent at a new size.

Values come from the loops of tests/reference, never from the code under test; timm's own modules say what a habit is.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
)
from timm.models.eva import Eva
from torch import Tensor

import visionpos as vp
from tests.reference import coords as reference_coords
from tests.reference import rotary as reference_rotary
from tests.retrofit.zoo import Case, apart, image, opened
from tests.strategies import grids
from tests.tolerances import assert_close_to
from visionpos import retrofit
from visionpos.encodings import MixedRope
from visionpos.errors import PositionError
from visionpos.retrofit.checks import own_pairing_at
from visionpos.retrofit.ports import ports_of
from visionpos.retrofit.rope import GridRope, own_rope, with_extent

DIMS = vp.Dims(embed_dim=128, num_heads=2, depth=3)  # heads of 64 channels
CAT = {"dim": 64, "in_pixels": False}

# Every rotary configuration of timm's registered Eva models (facts/timm.md 1.1), and what their options allow beside.
ROPES: dict[str, Any] = {
    "eva02": lambda: RotaryEmbeddingCat(**CAT, temperature=10000.0, ref_feat_shape=(16, 16)),
    "sbb": lambda: RotaryEmbeddingCat(**CAT, temperature=10000.0, ref_feat_shape=(16, 16)),
    "pe 32": lambda: RotaryEmbeddingCat(
        **CAT, temperature=10000.0, grid_indexing="xy", grid_offset=1.0, ref_feat_shape=(32, 32)
    ),
    "pe 24": lambda: RotaryEmbeddingCat(
        **CAT, temperature=10000.0, grid_indexing="xy", grid_offset=1.0, ref_feat_shape=(24, 24)
    ),
    "pe 14": lambda: RotaryEmbeddingCat(
        **CAT, temperature=10000.0, grid_indexing="xy", grid_offset=1.0, ref_feat_shape=(14, 14)
    ),
    "pe giant": lambda: RotaryEmbeddingCat(
        **CAT, temperature=10000.0, grid_indexing="xy", ref_feat_shape=(32, 32)
    ),
    "rectangular reference": lambda: RotaryEmbeddingCat(
        **CAT, temperature=10000.0, grid_indexing="xy", grid_offset=1.0, ref_feat_shape=(9, 17)
    ),
    "rope vit axial": lambda: RotaryEmbeddingCat(**CAT, temperature=100.0, grid_indexing="xy"),
    "cat ij": lambda: RotaryEmbeddingCat(**CAT, temperature=100.0),
    "cat half": lambda: RotaryEmbeddingCat(**CAT, temperature=100.0, rotate_half=True),
    "cat centred": lambda: RotaryEmbeddingCat(**CAT, temperature=100.0, grid_type="centered"),
    "cat centred max": lambda: RotaryEmbeddingCat(
        **CAT, temperature=100.0, grid_type="centered", normalize_coords="max"
    ),
    "mixed": lambda: RotaryEmbeddingMixed(128, 3, 2, temperature=10.0, grid_indexing="xy"),
    "mixed ij": lambda: RotaryEmbeddingMixed(128, 3, 2, temperature=10.0, grid_indexing="ij"),
    "dinov3": lambda: RotaryEmbeddingDinoV3(64, temperature=100.0),
    "sapiens2": lambda: RotaryEmbeddingDinoV3(64, temperature=100.0, rescale_coords=2.0),
    "dinov3 min": lambda: RotaryEmbeddingDinoV3(64, temperature=100.0, normalize_coords="min"),
    "dinov3 max": lambda: RotaryEmbeddingDinoV3(64, temperature=100.0, normalize_coords="max"),
    "dinov3 xy": lambda: RotaryEmbeddingDinoV3(64, temperature=100.0, grid_indexing="xy"),
    "dinov3 offset": lambda: RotaryEmbeddingDinoV3(64, temperature=100.0, grid_offset=0.5),
    "dinov3 adjacent": lambda: RotaryEmbeddingDinoV3(64, temperature=100.0, rotate_half=False),
    "dinov3 periods": lambda: RotaryEmbeddingDinoV3(
        64, temperature=None, min_period=0.5, max_period=8.0
    ),
    "dinov3 periods xy": lambda: RotaryEmbeddingDinoV3(
        64, temperature=None, min_period=0.5, max_period=8.0, grid_indexing="xy"
    ),
}
# What no Spec says must be left to timm, never said wrongly.
UNSAID = {"cat centred", "cat centred max", "mixed ij", "dinov3 periods xy"}


def table_of(spec: Any, rope: Any, grid: tuple[int, int]) -> Tensor:
    """Return timm's table, built by our encoding from a spec: sines, then cosines, one value a channel."""
    encoding = vp.build(spec, DIMS)
    if isinstance(encoding, MixedRope):
        with torch.no_grad():
            encoding.frequencies.copy_(MixedRope.from_timm(rope.freqs))
    layers = range(3) if isinstance(encoding, MixedRope) else [0]
    pairs = [encoding.eval()(vp.Grid(*grid), layer=layer).full_width() for layer in layers]
    table = torch.stack([torch.cat([sin, cos], -1) for cos, sin in pairs])
    return table if isinstance(encoding, MixedRope) else table[0]


@pytest.mark.parametrize("grid", [(14, 14), (16, 16), (7, 3), (1, 9), (9, 1), (24, 37)], ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_parity_spec_of_every_rope(name: str, grid: tuple[int, int]) -> None:
    torch.manual_seed(1)
    rope = ROPES[name]().eval()
    spec = retrofit.spec_of_rope(rope)
    if spec is None:
        assert name in UNSAID, f"{name} is one that a Spec can say"
        return
    assert_close_to(table_of(spec, rope, grid), rope.get_embed(shape=grid), kind="applied")
    assert spec.pairing == ("half" if getattr(rope, "rotate_half", False) else "adjacent")


@given(grids(max_side=40))
def test_parity_spec_of_dinov3_and_eva02_on_any_rectangle(grid: tuple[int, int]) -> None:
    for name in ("dinov3", "eva02", "pe 24"):
        rope = ROPES[name]().eval()
        spec = retrofit.spec_of_rope(rope)
        assert_close_to(table_of(spec, rope, grid), rope.get_embed(shape=grid), kind="applied")


def test_spec_of_what_no_spec_says() -> None:
    assert retrofit.spec_of_rope(None) is None
    assert retrofit.spec_of_rope(RotaryEmbeddingCat(64)) is None  # pixel bands
    assert retrofit.spec_of_rope(RotaryEmbeddingMRope(64)) is None
    assert retrofit.spec_of_rope(RotaryEmbeddingCat(64, in_pixels=False, grid_type="pixel")) is None
    for name in UNSAID:
        assert retrofit.spec_of_rope(ROPES[name]()) is None, name


def test_spec_keeps_training_time_augmentation() -> None:
    rope = RotaryEmbeddingDinoV3(64, shift_coords=0.1, jitter_coords=1.5, rescale_coords=2.0)
    coords = retrofit.spec_of_rope(rope).coords
    assert (coords.shift, coords.jitter, coords.rescale, coords.scope) == (0.1, 1.5, 2.0, "forward")


def test_spec_of_a_rope_of_an_older_timm() -> None:
    """Before timm 1.0.31 some rotary modules had no augmentation, and axial ones no rotate_half."""
    for name in ("eva02", "mixed", "dinov3"):
        rope = ROPES[name]()
        expected = retrofit.spec_of_rope(rope)
        for attribute in (
            "shift_coords",
            "jitter_coords",
            "rescale_coords",
            "aug_active",
            "grid_type",
        ):
            if hasattr(rope, attribute):
                delattr(rope, attribute)
        if name == "eva02":
            delattr(rope, "rotate_half")
        assert retrofit.spec_of_rope(rope) == expected


def eva(rope_type: str, size_hw: tuple[int, int] = (64, 96), **changes: Any) -> Any:
    """Return a small Eva with a rotary encoding of its own."""
    return opened(
        Eva(
            img_size=size_hw,
            depth=2,
            embed_dim=64,
            num_heads=2,
            num_classes=0,
            attn_type="rope",
            use_rot_pos_emb=True,
            use_abs_pos_emb=False,
            rope_type=rope_type,
            **changes,
        )
    ).eval()


# What each model's coordinates are on a grid under an extent, when it was trained on 4 x 6 tokens.
def own_index(height: int, width: int, extent: str) -> np.ndarray:
    if extent == "index":
        return reference_coords.index(height, width)
    return reference_coords.index_to_reference(height, width, (4, 6))


def own_reference(height: int, width: int, extent: str) -> np.ndarray:
    """EVA-02: 16 reference cells across the picture; running on keeps 16/4 and 16/6 a cell."""
    if extent == "trained":
        return reference_coords.index_to_reference(height, width, (16, 16), offset=1.0)
    return reference_coords.index(height, width, 1.0) * np.array([16 / 4, 16 / 6])


def own_centred(height: int, width: int, extent: str) -> np.ndarray:
    """DINOv3: the picture spans -1 to 1; running on keeps 2/4 and 2/6 a cell, 0 in the middle."""
    if extent == "trained":
        return reference_coords.centred(height, width)
    return reference_coords.centred(height, width) * np.array([height / 4, width / 6])


MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "cat": ("cat", {"rope_temperature": 100.0}, own_index),
    "cat reference": (
        "cat",
        {"rope_temperature": 100.0, "ref_feat_shape": (16, 16), "rope_grid_offset": 1.0},
        own_reference,
    ),
    "dinov3": ("dinov3", {"rope_temperature": 100.0, "rope_rotate_half": True}, own_centred),
    "mixed": ("mixed", {"rope_grid_indexing": "xy", "rope_temperature": 10.0}, own_index),
}


def oracle(name: str, model: Any, points: np.ndarray) -> np.ndarray:
    """Return timm's table from coordinates, in float64 by the loops of tests/reference."""
    if name == "mixed":
        freqs = model.rope.freqs.detach().double().numpy()
        angles = np.stack([reference_rotary.mixed_angles(points, freqs[:, i]) for i in range(2)])
    else:
        angles = reference_rotary.axial_angles(points, 32, 100.0, turns=name == "dinov3")
    half = name == "dinov3"
    wide = np.concatenate([angles, angles], -1) if half else np.repeat(angles, 2, -1)
    return np.concatenate([np.sin(wide), np.cos(wide)], -1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("extent", ["trained", "index", None])
@pytest.mark.parametrize("name", MODELS)
def test_reference_extent_after_a_resize(name: str, extent: Any, dynamic: bool) -> None:
    """Values of every extent, static and dynamic, against coordinates written out by hand."""
    rope_type, changes, coordinates = MODELS[name]
    model = eva(rope_type, dynamic_img_size=dynamic, **changes)
    habit = "index" if name in ("cat", "mixed") else "trained"
    for size in ((96, 80), (48, 128), (64, 96)):
        grid = (size[0] // 16, size[1] // 16)
        retrofit.resize(model, size, extent=extent)
        got = model.rope.get_embed(shape=grid) if dynamic else model.rope.get_embed()
        wanted = oracle(name, model, coordinates(*grid, extent or habit))
        assert_close_to(got, torch.from_numpy(wanted), kind="applied")
        with torch.no_grad():
            assert model.forward_features(image(size)).isfinite().all()
        replaced = isinstance(model.rope, GridRope)
        assert replaced is (extent is not None and extent != habit)


@pytest.mark.parametrize("name", MODELS)
def test_extent_changes_what_the_model_says(name: str) -> None:
    rope_type, changes, _ = MODELS[name]
    outputs = []
    for extent in ("trained", "index"):
        model = eva(rope_type, **changes)
        retrofit.resize(model, (96, 80), extent=extent)
        with torch.no_grad():
            outputs.append(model.forward_features(image((96, 80))))
    assert apart(outputs[0], outputs[1]) > 1e-3


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("extent", ["trained", "index"])
@pytest.mark.parametrize("name", MODELS)
def test_invariant_extent_at_the_trained_size_is_the_model_itself(
    name: str, extent: Any, dynamic: bool
) -> None:
    rope_type, changes, _ = MODELS[name]
    model = eva(rope_type, dynamic_img_size=dynamic, **changes)
    x = image((64, 96))
    with torch.no_grad():
        before = model.forward_features(x)
        retrofit.resize(model, (64, 96), extent=extent)
        assert apart(model.forward_features(x), before) < 1e-6
        retrofit.resize(model, (96, 80), extent=extent)
        retrofit.resize(model, (64, 96), extent=extent)
        assert apart(model.forward_features(x), before) < 1e-6


@pytest.mark.parametrize("size", [(64, 64), (64, 96)], ids=str)
@pytest.mark.parametrize("normalize", ["separate", "min", "max"])
@pytest.mark.parametrize("extent", ["trained", "index"])
def test_invariant_every_normalisation_starts_from_what_is(
    normalize: str, extent: Any, size: tuple[int, int]
) -> None:
    """An extent says what a new size means; at the old size it changes nothing, prefix included, or is refused."""
    model = eva("dinov3", size, rope_rotate_half=True, rope_temperature=100.0)
    grid = (size[0] // 16, size[1] // 16)
    model.rope = RotaryEmbeddingDinoV3(
        32, temperature=100.0, feat_shape=grid, normalize_coords=normalize, rotate_half=True
    )
    x = image(size)
    with torch.no_grad():
        before = model.forward_features(x)
        if extent == "index" and normalize != "separate" and size == (64, 96):
            with pytest.raises(
                PositionError, match=rf"normalize='{normalize}' on a grid of 4x6.*extent=None"
            ):
                retrofit.resize(model, (96, 80), extent=extent)
            assert model.patch_embed.img_size == size
        else:
            retrofit.resize(model, size, extent=extent)
        assert apart(model.forward_features(x), before) < 1e-6


UNITS = [
    vp.CoordSpec(),
    vp.CoordSpec(offset=1.0),
    vp.CoordSpec(extent="trained", trained_shape=(16, 16)),
    vp.CoordSpec(unit="centred"),
    vp.CoordSpec(unit="centred", offset=0.25),
    vp.CoordSpec(unit="centred", extent="index", trained_shape=(5, 5)),
    vp.CoordSpec(unit="fractional"),
    vp.CoordSpec(unit="centred", scale=(0.5, 2.0)),
    vp.CoordSpec(scale=(0.5, 2.0)),
]


@pytest.mark.parametrize("extent", ["trained", "index"])
@pytest.mark.parametrize("coords", UNITS, ids=lambda c: f"{c.unit}-{c.extent}-{c.offset}-{c.scale}")
def test_invariant_with_extent_changes_nothing_on_its_source(
    coords: vp.CoordSpec, extent: Any
) -> None:
    source = vp.Grid(4, 6)
    changed = with_extent(coords, extent, source)
    assert_close_to(vp.coordinates(source, changed), vp.coordinates(source, coords), kind="table")
    assert with_extent(changed, extent, vp.Grid(9, 5)) == changed


@pytest.mark.parametrize("coords", UNITS, ids=lambda c: f"{c.unit}-{c.extent}-{c.offset}-{c.scale}")
def test_invariant_with_extent_keeps_step_or_span(coords: vp.CoordSpec) -> None:
    """ "index" keeps the distance of neighbours, "trained" the distance of the picture's edges."""
    source, target = vp.Grid(4, 6), vp.Grid(8, 9)
    old = vp.coordinates(source, coords).view(4, 6, 2)
    step = torch.stack([old[1, 0, 0] - old[0, 0, 0], old[0, 1, 1] - old[0, 0, 1]])
    for extent, wanted in (("index", step), ("trained", step * torch.tensor([4 / 8, 6 / 9]))):
        new = vp.coordinates(target, with_extent(coords, extent, source)).view(8, 9, 2)
        got = torch.stack([new[1, 0, 0] - new[0, 0, 0], new[0, 1, 1] - new[0, 0, 1]])
        assert_close_to(got, wanted, kind="table")


def test_grid_rope_keeps_a_learned_parameter() -> None:
    """RoPE-Mixed: the frequencies keep their object, name, shape and place among undecayed parameters."""
    model = eva("mixed", rope_grid_indexing="xy")
    freqs, keys = model.rope.freqs, list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    retrofit.resize(model, (96, 80), extent="trained")
    assert isinstance(model.rope, GridRope)
    assert model.rope.freqs is freqs
    assert list(model.state_dict()) == keys
    assert model.rope.no_weight_decay() == {"freqs"}
    assert "rope.freqs" in model.no_weight_decay()
    before = freqs.detach().clone()
    model.train()
    model.forward_features(image((96, 80))).square().sum().backward()
    optimizer.step()
    assert not torch.equal(freqs, before)


def test_grid_rope_of_a_fixed_scheme_adds_no_key() -> None:
    model = Case("vit_small_patch16_dinov3").build()
    keys = list(model.state_dict())
    retrofit.resize(model, (96, 80), extent="index")
    assert list(model.state_dict()) == keys
    assert model.rope.no_weight_decay() == set()
    twin = copy.deepcopy(model)
    x = image((96, 80))
    with torch.no_grad():
        assert torch.equal(twin.forward_features(x), model.forward_features(x))


@pytest.mark.parametrize("name", ["dinov3", "mixed"])
def test_grid_rope_has_timms_interface(name: str) -> None:
    rope_type, changes, _ = MODELS[name]
    model = eva(rope_type, **changes)
    retrofit.resize(model, (96, 80), extent="index" if name == "dinov3" else "trained")
    rope = model.rope
    assert isinstance(rope, GridRope)
    assert rope.feat_shape == (6, 5)
    assert torch.equal(rope.get_embed(), rope.get_embed(shape=(6, 5)))
    assert rope.get_embed(dtype=torch.bfloat16).dtype == torch.bfloat16
    rope.update_feat_shape((3, 4))
    assert rope.get_embed().shape[-2] == 12
    moving = eva(rope_type, dynamic_img_size=True, **changes)
    retrofit.resize(moving, (96, 80), extent="index" if name == "dinov3" else "trained")
    assert moving.rope.feat_shape is None
    with pytest.raises(PositionError, match=r"shape is None and the model has no fixed grid"):
        moving.rope.get_embed()
    moving.rope.update_feat_shape((3, 4))
    assert moving.rope.feat_shape is None


DRAWS = ({"rope_shift_coords": 0.3}, {"rope_jitter_coords": 1.5}, {"rope_rescale_coords": 2.0})


@pytest.mark.parametrize("draw", DRAWS, ids=lambda d: next(iter(d)))
@pytest.mark.parametrize("indexing", ["ij", "xy"])
@pytest.mark.parametrize("name", MODELS)
def test_grid_rope_draws_what_timm_draws(name: str, indexing: str, draw: dict[str, float]) -> None:
    """Training-time augmentation survives: the same seed gives timm's own table, where the extent changes nothing."""
    rope_type, changes, _ = MODELS[name]
    if name == "mixed" and indexing == "ij":
        pytest.skip("no Spec says it")
    model = eva(rope_type, **changes | {"rope_grid_indexing": indexing}, **draw).train()
    own = model.rope
    retrofit.resize(model, (64, 96), extent="trained" if name in ("cat", "mixed") else "index")
    assert isinstance(model.rope, GridRope)
    torch.manual_seed(6)
    expected = own.get_embed()
    torch.manual_seed(6)
    assert_close_to(model.rope.get_embed(), expected, kind="applied")
    model.eval()
    assert torch.equal(model.rope.get_embed(), model.rope.get_embed())


def test_bfloat16_rounds_no_fixed_frequency() -> None:
    model = eva("dinov3", rope_temperature=100.0, rope_rotate_half=True)
    retrofit.resize(model, (96, 80), extent="index")
    before = model.rope.get_embed()
    model.bfloat16()
    assert torch.equal(model.rope.get_embed(), before)
    x = image((96, 80)).bfloat16()
    with torch.no_grad():
        assert model.forward_features(x).dtype == torch.bfloat16


def test_patch_dropout_with_a_grid_rope() -> None:
    for name in ("cat", "mixed", "dinov3"):
        rope_type, changes, _ = MODELS[name]
        model = eva(rope_type, patch_drop_rate=0.5, **changes).train()
        retrofit.resize(model, (96, 80), extent="index" if name == "dinov3" else "trained")
        assert isinstance(model.rope, GridRope)
        assert model.forward_features(image((96, 80))).shape[1] == 1 + 15


def test_own_rope_and_pairing() -> None:
    def own_pairing(model: Any) -> Any:
        return own_pairing_at(model, ports_of(model)[0])

    plain = Case("vit_tiny_patch16_224").build()
    assert own_rope(plain) is None
    assert own_pairing(plain) is None
    assert own_pairing(Case("eva_giant_patch14_224", 14).build()) is None
    assert own_pairing(eva("cat")) == "adjacent"
    assert own_pairing(eva("cat", rope_rotate_half=True)) == "half"
    assert own_pairing(eva("dinov3", rope_rotate_half=True)) == "half"
    assert own_pairing(eva("mrope")) == "half"


def test_error_extent_of_what_no_spec_says() -> None:
    """A refusal comes before anything is changed."""
    model = eva("mrope")
    with pytest.raises(
        PositionError,
        match=r"extent 'index' cannot be given to a RotaryEmbeddingMRope.*extent=None",
    ):
        retrofit.resize(model, (96, 80), extent="index")
    assert model.patch_embed.img_size == (64, 96)
    retrofit.resize(model, (96, 80))
    with torch.no_grad():
        assert model.forward_features(image((96, 80))).shape == (2, 31, 64)
