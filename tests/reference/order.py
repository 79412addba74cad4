"""Token orders of vision towers by loops: facts/mrope.md 5."""


def merge_blocks(frames: int, height: int, width: int, merge: int) -> list[int]:
    """Return which row-major token stands at each place of a tower with merge x merge blocks."""
    out = []
    for t in range(frames):
        for top in range(0, height, merge):
            for left in range(0, width, merge):
                for y in range(top, top + merge):
                    for x in range(left, left + merge):
                        out.append((t * height + y) * width + x)
    return out


def windows(frames: int, height: int, width: int, window: int) -> tuple[list[int], list[int]]:
    """Return (cells in window order, cells of each window), windows cut off at the border."""
    order, sizes = [], []
    for t in range(frames):
        for top in range(0, height, window):
            for left in range(0, width, window):
                cells = [
                    (t * height + y) * width + x
                    for y in range(top, min(top + window, height))
                    for x in range(left, min(left + window, width))
                ]
                order += cells
                sizes.append(len(cells))
    return order, sizes
