"""What a checkpoint is: named parameters, their slots, where each element lies, and what became of everything else.

Data and arithmetic only. Nothing here opens a file, and nothing here knows a format.
"""

from __future__ import annotations

from zckpt.state.brief import Brief, Document, Result, document, number, values_of
from zckpt.state.checkpoint import (
    FOLLOWS_FROM_STEPS,
    MASTER,
    WEIGHT,
    Checkpoint,
    Duplicate,
    GivenNames,
    Parameter,
    ParamGroup,
    RankValue,
    Scalar,
    SourceFile,
    Topology,
    alias_of,
    as_float,
    most_steps,
    number_of,
)
from zckpt.state.dtypes import is_floating, itemsize
from zckpt.state.mappings import (
    are_distinct,
    are_sizes,
    are_texts,
    by_key,
    dict_of,
    differ,
    first_of,
    inside,
    list_of,
    nbytes_of,
    positions,
    size_of,
    stated,
    without,
)
from zckpt.state.spans import (
    ZEROS,
    CutFiles,
    CutSpans,
    Extent,
    Padding,
    PaddingRule,
    PaddingSpan,
    Shape,
    Slot,
    Span,
    Spans,
)
