"""What a turn refuses to turn, whatever its kind: the same words for pairs, blocks and bases."""

import numpy as np
import pytest
import torch

import visionpos as vp
from visionpos import Dims, Grid, PositionError, geometry
from visionpos.encodings import build

DIMS = Dims(embed_dim=48, num_heads=6, depth=2)
SPECS = {
    "pairs": vp.AxialRopeSpec(),
    "pairs_heads": vp.MixedRopeSpec(),
    "blocks": vp.LiereSpec(block=4),
    "blocks_comrope": vp.ComropeSpec(block=4),
    "basis": vp.StringRopeSpec(),
}
PER_HEAD = [name for name in SPECS if name != "pairs"]


def turn_of(name):
    return build(SPECS[name], DIMS).eval()(Grid(3, 5))


@pytest.fixture(params=[vp.rotate, geometry.rotate])
def rotate(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", SPECS)
def test_error_whole_numbers(name, dtype, rotate):
    """Blocks and bases turned int64 and cut the result to whole numbers, without a word."""
    x = torch.ones(2, 6, 15, 8).to(dtype)
    with pytest.raises(PositionError, match=rf"x has dtype {dtype}; a float tensor is required"):
        rotate(x, x, turn_of(name))


@pytest.mark.parametrize("name", PER_HEAD)
def test_error_keys_of_fewer_heads(name, rotate):
    """One head of keys came back as six; two were a bare error."""
    q = torch.ones(2, 6, 15, 8)
    for heads in (1, 2):
        with pytest.raises(
            PositionError, match=r"leading sizes \(.*6,?\) and x \(2, \d\); each must"
        ):
            rotate(q, q[:, :heads], turn_of(name))
    with pytest.raises(PositionError, match=r"leading sizes"):
        rotate(q[0, 0], q[0, 0], turn_of(name))


@pytest.mark.parametrize("name", SPECS)
def test_error_what_is_no_tensor(name, rotate):
    turn, x = turn_of(name), torch.ones(2, 6, 15, 8)
    for bad in (None, 3, x.numpy(), x.tolist()):
        with pytest.raises(
            PositionError, match=r"x is \w+; a float tensor \[b, heads, n, head_dim\]"
        ):
            rotate(bad, x, turn)
    for bad in (torch.tensor(1.0), torch.ones(8)):
        with pytest.raises(PositionError, match=r"x has shape .*unsqueeze"):
            rotate(bad, x, turn)
    with pytest.raises(PositionError, match=r"x is on meta and the rotation on cpu; .*device="):
        rotate(x.to("meta"), x, turn)


@pytest.mark.parametrize("name", SPECS)
def test_error_counts_of_still_tokens(name, rotate):
    x = torch.ones(2, 6, 15, 8)
    for bad in (-1, 1.0, "1", None, True):
        with pytest.raises(PositionError, match=rf"prefix is {bad!r} and suffix 0; token counts"):
            rotate(x, x, turn_of(name), prefix=bad)
    whole = torch.ones(2, 6, 16, 8)
    assert rotate(whole, whole, turn_of(name), prefix=np.int64(1))[0].shape == whole.shape


@pytest.mark.parametrize("bad", [None, 3, torch.ones(15, 4), (torch.ones(15, 4),) * 2])
def test_error_what_is_no_rotation(bad, rotate):
    x = torch.ones(2, 6, 15, 8)
    with pytest.raises(
        PositionError, match=r"rotation is \w+; what an encoding's call gives, or Ro"
    ):
        rotate(x, x, bad)


@pytest.mark.parametrize("name", ["blocks", "basis"])
def test_shape_channels_beyond_the_turn_pass(name, rotate):
    """A longer head keeps its last channels, as a Rotation does; a basis met them with a bare error."""
    x, turn = torch.randn(2, 6, 15, 11), turn_of(name)
    moved, _ = rotate(x, x, turn)
    inner, _ = rotate(x[..., :8], x[..., :8], turn)
    torch.testing.assert_close(moved[..., :8], inner, rtol=0, atol=1e-6)
    assert torch.equal(moved[..., 8:], x[..., 8:])


@pytest.mark.parametrize("name", SPECS)
def test_error_kept_tokens(name):
    for bad in (None, 3, [0, 1]):
        with pytest.raises(PositionError, match=r"indices are"):
            turn_of(name).select(bad)
