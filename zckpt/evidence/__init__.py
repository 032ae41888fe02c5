"""Which parameter of a model is number n of its optimizer: what speaks for it, and the only answer that this leaves.

Formats bring what their files show: candidates with shapes, groups in their order, names that someone gave or that a
program wrote down, rules of their own. It is known here when that is certain, and what to ask for where it is not.

solver      which tensors may be trained, names in an order of which some may be left out, or that fill a flat tensor,
            and what is said of the rest
modules     names whose order follows from the modules that they are in
order       the model's order, where someone says it
"""

from __future__ import annotations

from zckpt.evidence.solver import (
    MOST_PERMUTED,
    NAMES_ADVICE,
    NAMES_BY_STAGE_ADVICE,
    NAMES_OF_RANK_ADVICE,
    Evidence,
    Orders,
    agree,
    can_be_of,
    factored_shape,
    greatest,
    in_order,
    in_order_or_sorted,
    is_trainable,
    keep_number,
    may_be_trained,
    note_not_used,
    note_numbers,
    orders_of_models,
    refuse_ungrouped,
    refuse_unnamed,
    shown_shape,
    ways,
)
