"""What an audit of ViT-S at 224 px takes: seconds, forward passes, and memory beside one forward pass.

Run: .venv/bin/python -m benchmarks.audit

Bounds: a minute on two cores, three times the memory of the model's own forward pass. Seconds are those of all threads
together, so that other work on the machine does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

from visionpos.audit.of_model import audit

PAGE = 4096


def resident() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def peak(call: Callable[[], Any]) -> int:
    """Return the most bytes in memory while a call runs."""
    most, running = [resident()], [True]

    def look() -> None:
        while running[0]:
            most[0] = max(most[0], resident())
            time.sleep(0.02)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    call()
    running[0] = False
    watcher.join()
    return most[0]


def rows() -> list[dict[str, object]]:
    """Return seconds of an audit, and its memory in those of a forward pass, the model's weights included."""
    before = resident()
    model = timm.create_model("vit_small_patch16_224").eval()
    image = torch.randn(1, 3, 224, 224)

    def forward() -> None:
        with torch.no_grad():
            model(image)

    forward()
    own = peak(forward) - before
    began = time.process_time()
    most = peak(lambda: audit(model)) - before
    seconds = time.process_time() - began
    name = "audit, ViT-S, 224 px"
    return [
        {"op": f"{name}, memory", "peer": "forward pass", "to peer": most / own},
        {
            "op": f"{name}, seconds of all threads",
            "peer": "a minute",
            "to peer": seconds / 60,
        },
    ]


if __name__ == "__main__":
    torch.set_num_threads(2)
    for row in rows():
        print(row)
