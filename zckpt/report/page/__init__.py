"""Reports as HTML pages: one file each, that loads nothing, for the screen, the keyboard, screen readers and paper.

inspection.py, comparison.py, course.py, verification.py    what a page says, from a plain document
shell.py                                                    one file of it, its scripts and its data
markup.py                                                   text, tables and facts as HTML, everything escaped
assets/                                                     the style sheet and the scripts
"""

from zckpt.report.page.comparison import diff_page
from zckpt.report.page.course import series_page
from zckpt.report.page.inspection import inspect_page
from zckpt.report.page.verification import verify_page

__all__ = ["diff_page", "inspect_page", "series_page", "verify_page"]
