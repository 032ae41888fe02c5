"""Stable codes of what can be wrong with a checkpoint. A code has one meaning for ever, and none is used again.

    ZC-1xx    files and structure: found without reading a tensor, checksums aside
    ZC-2xx    meaning: what the elements and the values of all ranks are to each other
    ZC-3xx    against digests that were recorded before
    ZC-4xx    against the checkpoint before of the same run

docs/verify.md explains each of them.
"""

from __future__ import annotations

from zckpt.immutable import immutable

ERROR = "error"
WARNING = "warning"
NOTE = "note"
SEVERITIES = (ERROR, WARNING, NOTE)

MISSING_FILE = "ZC-101"
TRUNCATED = "ZC-102"
MALFORMED = "ZC-103"
BAD_PICKLE = "ZC-104"
OTHER_KIND = "ZC-105"
UNSUPPORTED = "ZC-106"
CHECKSUM = "ZC-107"
OTHER_WORLD_SIZE = "ZC-111"
OTHER_RUN = "ZC-112"
TWICE = "ZC-113"
LEFTOVER = "ZC-114"
LATEST = "ZC-115"
WRONG_RANK = "ZC-116"
LAYOUT = "ZC-121"
COVERAGE = "ZC-122"
SLOT_MISSING = "ZC-123"
DTYPES_DIFFER = "ZC-124"
REMARK = "ZC-130"
STATE_LEFT_OUT = "ZC-131"
LEFT_OUT = "ZC-132"
WEIGHT_MISMATCH = "ZC-201"
NOT_FINITE = "ZC-202"
NEGATIVE = "ZC-203"
TIED_DIFFER = "ZC-204"
PADDING = "ZC-205"
REPLICAS_DIFFER = "ZC-206"
BUFFERS_DIFFER = "ZC-207"
BUFFER_NAN = "ZC-208"
STAGES_DIFFER = "ZC-209"
STEPS_DIFFER = "ZC-211"
GROUP_STEPS_DIFFER = "ZC-212"
HYPERPARAMETERS_DIFFER = "ZC-213"
VALUES_DIFFER = "ZC-214"
CHANGED = "ZC-301"
GONE = "ZC-302"
ADDED = "ZC-303"
NOT_ADVANCED = "ZC-401"
UNMOVED = "ZC-402"
FROZEN_MOVED = "ZC-403"
JUMPED = "ZC-404"
LOST = "ZC-405"


@immutable
class Code:
    """What a code means."""

    severity: str  # {"error", "warning", "note"}; an error makes a checkpoint unsound
    title: str  # a few words
    advice: str  # what to do, where the finding itself does not say


_COPY = "copy it again from its origin"
_REPLACE = "replace it with the file of this step and run"
_TRUST = "do not resume from it; use an earlier checkpoint, or find where the bytes were changed"

CODES: dict[str, Code] = {
    MISSING_FILE: Code(
        ERROR, "a file is missing", "copy it from the node that wrote it, or name its directory with --root"
    ),
    TRUNCATED: Code(ERROR, "a file ends too early", _COPY),
    MALFORMED: Code(ERROR, "a file cannot be read", _COPY),
    BAD_PICKLE: Code(ERROR, "a pickle is malformed or hostile", "do not load it with any program that runs pickles"),
    OTHER_KIND: Code(ERROR, "a file is not what its name says", _COPY),
    UNSUPPORTED: Code(ERROR, "a form that zckpt does not know", "verify it with the program that wrote it"),
    CHECKSUM: Code(ERROR, "bytes are not those that were written", _COPY),
    OTHER_WORLD_SIZE: Code(ERROR, "a file of a run of another world size", _REPLACE),
    OTHER_RUN: Code(ERROR, "a file of another run or step", _REPLACE),
    TWICE: Code(ERROR, "a rank's file is there twice", "remove the one that does not belong to this run"),
    LEFTOVER: Code(WARNING, "a file that is not part of the checkpoint", "remove it if nothing else needs it"),
    LATEST: Code(
        ERROR, "`latest` names no checkpoint", "write the name of a checkpoint next to it into it, or give --tag"
    ),
    WRONG_RANK: Code(ERROR, "a file is of another rank than its name says", "give each file its own name back"),
    LAYOUT: Code(ERROR, "accounts of where elements lie disagree", _REPLACE),
    COVERAGE: Code(ERROR, "elements are missing or there twice", "a rank's file is missing, or from another run"),
    SLOT_MISSING: Code(ERROR, "a rank lacks a slot that others have", _REPLACE),
    DTYPES_DIFFER: Code(ERROR, "ranks have different element types", _REPLACE),
    REMARK: Code(NOTE, "something is not read whole, and is not verified", "see what is said of it"),
    STATE_LEFT_OUT: Code(
        ERROR,
        "state of a model or an optimizer that nothing reads",
        "no verb writes from it unless --drop names it; look at it with the program that wrote it",
    ),
    LEFT_OUT: Code(
        WARNING, "something that nothing reads", "no verb writes from it unless --drop names it; --files shows all"
    ),
    WEIGHT_MISMATCH: Code(
        ERROR, "a weight is not its master, rounded", "one of the two is damaged, or of another step"
    ),
    NOT_FINITE: Code(ERROR, "NaN or Inf", "use a checkpoint from before the training diverged, or copy it again"),
    NEGATIVE: Code(ERROR, "a second moment is negative", _TRUST),
    TIED_DIFFER: Code(ERROR, "two names of one parameter have different values", _TRUST),
    PADDING: Code(WARNING, "padding is not zero", "the bytes next to it are suspect; the padding itself means nothing"),
    REPLICAS_DIFFER: Code(ERROR, "copies that ranks keep of one parameter differ", _TRUST),
    BUFFERS_DIFFER: Code(
        WARNING,
        "copies that ranks keep of one buffer differ",
        "rank 0's is used; right for statistics of each rank's own data",
    ),
    BUFFER_NAN: Code(WARNING, "a buffer holds NaN", "see whether the model means it so"),
    STAGES_DIFFER: Code(
        WARNING,
        "copies that a pipeline's stages keep of a tied layer differ slightly",
        "each stage goes on with its own, as they come to differ by rounding; one model gets the first stage's",
    ),
    STEPS_DIFFER: Code(ERROR, "ranks have taken different steps", _REPLACE),
    GROUP_STEPS_DIFFER: Code(
        WARNING, "param groups or parameters have taken different steps", "right where some were frozen for a time"
    ),
    HYPERPARAMETERS_DIFFER: Code(ERROR, "ranks have different hyperparameters", _REPLACE),
    VALUES_DIFFER: Code(ERROR, "ranks have different values of what all have in common", _REPLACE),
    CHANGED: Code(ERROR, "a value is not the one that was recorded", _TRUST),
    GONE: Code(
        ERROR, "a recorded value is not there", "some of the checkpoint is missing, or the digests are another's"
    ),
    ADDED: Code(
        ERROR, "a value is there that was not recorded", "the digests are another checkpoint's, or older than a change"
    ),
    NOT_ADVANCED: Code(
        ERROR, "the step is not beyond that of the checkpoint before", "find out what the run has resumed from"
    ),
    UNMOVED: Code(ERROR, "no trained parameter has moved", "see the learning rate, the gradients and the loss scale"),
    FROZEN_MOVED: Code(ERROR, "a frozen parameter has moved", "see what the optimizer was given, and weight decay"),
    JUMPED: Code(ERROR, "a norm has changed by a large factor", "see the losses since then; go back to the one before"),
    LOST: Code(
        ERROR, "what the checkpoint before had is gone", "find out what the run resumed without, and what it saves"
    ),
}
"""All codes, in order."""
