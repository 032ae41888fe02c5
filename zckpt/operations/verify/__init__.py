"""Is a checkpoint whole, and does what it holds make sense? Every defect is a finding with a stable code.

findings.py    a finding, and the result as a document
run.py         `verify`: opens, surveys what cannot be opened, and runs the checks
structure.py   what metadata alone tell: coverage, element types, leftovers, steps
weights.py     which weights are not their masters, rounded; from what was read to findings
inventory.py   what lies where, and the blocks in which it is read; pure
deep.py        reads every byte of the files, once, in parallel: NaN, Inf, sign and equality of elements
"""

from __future__ import annotations

from zckpt.operations.verify.findings import Finding, Verification
from zckpt.operations.verify.run import verify

__all__ = ["Finding", "Verification", "verify"]
