"""Plans against the size, grid and count functions of transformers, timm and mistral_common: no difference."""

import pytest

from tests.vlm.peers import PEERS, Peer, differences, sizes
from visionpos.vlm import family, family_names

# Vendor code that is not installed (held against oracles written from it, test_vendor_rules.py), and position rules of
# papers on a family that is in the sweep.
NO_COUNT_FUNCTION = {
    "deepseek_vl2", "kimi_vl", "minicpm_v2", "molmo", "navit", "nvlm_d", "phi3_5_vision", "internvl_v2pe", "id_align",
    "circle_rope", "hope", "mhrope", "mm_rope", "mrope_interleave", "omnirope", "videorope",
}  # fmt: skip
AGREE = {"deepseek_ocr2"}  # sizes are the same in either dialect


@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_parity_sizes(peer: Peer) -> None:
    assert differences(peer, seed=1, count=peer.normal) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_parity_a_hundred_thousand_sizes(peer: Peer) -> None:
    assert differences(peer, seed=2, count=peer.many) == []


def test_the_slow_sweep_covers_every_family_that_has_a_count_function() -> None:
    """At least 100 000 sizes each, in the dialect of the peer; the rest have no count function to be held against."""
    swept: dict[str, int] = {}
    for peer in PEERS:
        swept[peer.name] = max(swept.get(peer.name, 0), peer.many)
    assert min(swept.values()) >= 100_000
    assert set(family_names()) - swept.keys() == NO_COUNT_FUNCTION
    for name in swept:
        dialects = {peer.options.get("dialect") for peer in PEERS if peer.name == name}
        assert (
            "transformers" not in family(name).dialects
            or "transformers" in dialects
            or name in AGREE
        )


def test_drawn_sizes_are_of_every_kind() -> None:
    """Ones, thin strips, whole multiples and one pixel beside them are all among the drawn sizes."""
    drawn = list(sizes(1, 2000))
    assert sum(1 in size for size in drawn) > 10
    assert sum(max(size) > 50 * min(size) for size in drawn) > 50
    assert sum(h % 448 == 0 and w % 448 == 0 for h, w in drawn) > 10
    assert sum((h + 1) % 448 == 0 or (h - 1) % 448 == 0 for h, w in drawn) > 5
    assert len(set(drawn)) > 1500
