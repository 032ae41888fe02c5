"""Reports as HTML pages: one file each, that loads nothing, for the screen, the keyboard, screen readers and paper.

inspection.py, difference.py    what a page says, from a plain document
markup.py                       its one file, with scripts and data; text and tables as HTML
assets/                         the style sheet and the scripts
"""

from zckpt.report.page.difference import diff_page, series_page
from zckpt.report.page.inspection import inspect_page, verify_page

__all__ = ["diff_page", "inspect_page", "series_page", "verify_page"]
