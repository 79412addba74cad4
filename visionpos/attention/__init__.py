"""The one place that applies an encoding to q and k, and chooses how.

Compiled and exported graphs get the plain form, which inductor fuses and exporters know. Eager CPU tensors take the
form with the fewest passes over memory, CUDA tensors the Triton kernels: q and k in one launch, whatever their strides.
A bias of coordinate differences enters by `attend`, or as the `score_mod` of FlexAttention, from its small table.
"""

from typing import TYPE_CHECKING, Any

from visionpos.attention.apply import rotate, turn
from visionpos.attention.fused import norm_rotate, rotate_at
from visionpos.attention.places import rotate_, rotate_packed_

if TYPE_CHECKING:
    from visionpos.kernels.scores import attend, pair_score_mod, score_mod

__all__ = [
    "attend",
    "norm_rotate",
    "pair_score_mod",
    "rotate",
    "rotate_",
    "rotate_at",
    "rotate_packed_",
    "score_mod",
    "turn",
]

if not TYPE_CHECKING:  # a type checker would take any name as given

    def __getattr__(name: str) -> Any:
        """Return `attend` or a score function, whose files import the room of encodings (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from visionpos.kernels import scores

        globals()[name] = value = getattr(scores, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
