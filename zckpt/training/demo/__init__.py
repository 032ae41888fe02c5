"""A run that is killed, and resumed on fewer ranks each time, beside one that nothing happened to.

gpt        a small model and its data, the same at any number of ranks
ranks      processes that train, are listened to, and are killed
story      what happens, and whether the losses agree
picture    both curves
"""

from __future__ import annotations

from zckpt.training.demo.story import Outcome, demonstrate

__all__ = ["Outcome", "demonstrate"]
