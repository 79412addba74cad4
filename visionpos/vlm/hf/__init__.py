"""Hand-over to Hugging Face transformers: families read from configs, batches for trainers, ids inside models.

Nothing here imports transformers: configs and models enter as they are, and are asked by name.
"""

from visionpos.vlm.hf.attaching import Attachment, attach
from visionpos.vlm.hf.collating import Collator
from visionpos.vlm.hf.comparing import Difference, Parting, diff
from visionpos.vlm.hf.reading import family_of, served_types

__all__ = [
    "Attachment",
    "Collator",
    "Difference",
    "Parting",
    "attach",
    "diff",
    "family_of",
    "served_types",
]
