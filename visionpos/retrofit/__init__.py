"""The surgeon: put encodings on timm models, move the models to new sizes, and take everything off again."""

from visionpos.retrofit.attach import attach, attachments, detach
from visionpos.retrofit.attachment import Attachment
from visionpos.retrofit.callbacks import LightningRamp, Ramp, TrainerRamp
from visionpos.retrofit.describe import Part, describe, lineage
from visionpos.retrofit.dynamic import make_dynamic
from visionpos.retrofit.fade import fade_table, lift_table
from visionpos.retrofit.freeze import freeze
from visionpos.retrofit.lineage_record import lineage_record, read_record
from visionpos.retrofit.models import create, restore
from visionpos.retrofit.optim import parameter_groups
from visionpos.retrofit.patches import adapt_channels
from visionpos.retrofit.plan import attachable
from visionpos.retrofit.ports import dims_of
from visionpos.retrofit.recipes import recipe_for
from visionpos.retrofit.resize import resize
from visionpos.retrofit.rope import GridRope, spec_of_rope
from visionpos.retrofit.schedule import Schedule
from visionpos.retrofit.seams import grid_of
from visionpos.retrofit.store import load, save

__all__ = [
    "Attachment",
    "GridRope",
    "LightningRamp",
    "Part",
    "Ramp",
    "Schedule",
    "TrainerRamp",
    "adapt_channels",
    "attach",
    "attachable",
    "attachments",
    "create",
    "describe",
    "detach",
    "dims_of",
    "fade_table",
    "freeze",
    "grid_of",
    "lift_table",
    "lineage",
    "lineage_record",
    "load",
    "make_dynamic",
    "parameter_groups",
    "read_record",
    "recipe_for",
    "resize",
    "restore",
    "save",
    "spec_of_rope",
]
