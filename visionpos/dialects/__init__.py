"""Dialects: where two sources that go by one name differ, as data that can be computed, and a ruler for any two.

`docs/dialects.md` is printed from `configs/dialects/`, and a test computes every reading.
"""

from visionpos.dialects.difference import Difference, compare, named_pair
from visionpos.dialects.page import markdown
from visionpos.dialects.registry import Reading, Row, dialect_rows, reading_value

__all__ = [
    "Difference",
    "Reading",
    "Row",
    "compare",
    "dialect_rows",
    "markdown",
    "named_pair",
    "reading_value",
]
