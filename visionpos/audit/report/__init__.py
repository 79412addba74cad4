"""Reports that a person looks at: pages of an audit, of a token stream and of the atlas, and PNG figures.

The only package that imports jinja2 and, when a figure is drawn, matplotlib.
"""

from visionpos.audit.report.entries import atlas_page
from visionpos.audit.report.measurements import audit_page
from visionpos.audit.report.tokens import stream_page

__all__ = ["atlas_page", "audit_page", "stream_page"]
