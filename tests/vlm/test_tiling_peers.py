"""Plans against the size, grid and count functions of transformers, timm and mistral_common: no difference."""

import pytest

from tests.vlm.peers import PEERS, Peer, differences, sizes


@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_parity_sizes(peer: Peer) -> None:
    assert differences(peer, seed=1, count=peer.normal) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_parity_a_hundred_thousand_sizes(peer: Peer) -> None:
    assert differences(peer, seed=2, count=peer.many) == []


def test_drawn_sizes_are_of_every_kind() -> None:
    """Ones, thin strips, whole multiples and one pixel beside them are all among the drawn sizes."""
    drawn = list(sizes(1, 2000))
    assert sum(1 in size for size in drawn) > 10
    assert sum(max(size) > 50 * min(size) for size in drawn) > 50
    assert sum(h % 448 == 0 and w % 448 == 0 for h, w in drawn) > 10
    assert sum((h + 1) % 448 == 0 or (h - 1) % 448 == 0 for h, w in drawn) > 5
    assert len(set(drawn)) > 1500
