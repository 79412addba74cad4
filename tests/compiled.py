"""How many graphs torch.compile needs for a list of calls: one for all sizes is the aim."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.testing import CompileCounter

# Six rectangles without a side of 0 or 1 (which PyTorch always specialises), two pairs of equal token
# count. The first has no size in common with the batch of 2, the 3 heads and the 24 channels that tests
# use: PyTorch would tie sizes that are equal in the first call.
SIZES = ((5, 7), (7, 5), (2, 14), (4, 7), (13, 11), (6, 17))


def graphs_of(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    expected: Callable[..., Any] | None = None,
) -> int:
    """Return the graphs of a fullgraph compile with dynamic sizes over all calls, in order.

    Every compiled result must equal the eager one bit for bit: the counting backend runs the captured graph as it is.
    Where eager calls take another form than graphs, `expected` is the form that graphs take.
    """
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for arguments in calls:
        wanted = (expected or function)(*arguments)
        torch.testing.assert_close(compiled(*arguments), wanted, rtol=0, atol=0)
    torch._dynamo.reset()
    return counter.frame_count
