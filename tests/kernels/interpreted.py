"""Runs the Triton kernels in Triton's interpreter and prints, as JSON, what is wrong with each case (null: nothing).

A program of its own: TRITON_INTERPRET must be set before triton is imported, and would then hold for every other test
of the process. `TRITON_INTERPRET=1 python -m tests.kernels.interpreted tables coords backward norm`
"""

import json
import sys

import torch

from tests.kernels.cases_dispatch import dispatch
from tests.kernels.cases_more import backward, norm
from tests.kernels.cases_turn import coords, tables
from visionpos.kernels.triton_language import interpreted

GROUPS = {
    "tables": tables,
    "coords": coords,
    "backward": backward,
    "norm": norm,
    "dispatch": dispatch,
}


def main(names: list[str]) -> None:
    verdicts = {}
    for group in names:
        for name, run in GROUPS[group]():
            torch.manual_seed(0)
            try:
                run()
                verdicts[f"{group}:{name}"] = None
            except Exception as error:
                verdicts[f"{group}:{name}"] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(verdicts))


if __name__ == "__main__":
    assert interpreted(), "set TRITON_INTERPRET=1"
    main(sys.argv[1:])
