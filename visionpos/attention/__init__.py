"""The one place that applies an encoding to q and k, and chooses how.

Compiled and exported graphs get the plain form, which inductor fuses and exporters know. Eager CPU tensors take the
form with the fewest passes over memory, CUDA tensors the Triton kernels: q and k in one launch, whatever their strides.
"""

from visionpos.attention.apply import rotate, turn
from visionpos.attention.fused import norm_rotate, rotate_at
from visionpos.attention.places import rotate_, rotate_packed_

__all__ = ["norm_rotate", "rotate", "rotate_", "rotate_at", "rotate_packed_", "turn"]
