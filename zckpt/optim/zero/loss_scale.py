"""What the loss is multiplied with, so that the gradients of 16-bit floats do not vanish.

Source: the rule of DeepSpeed's loss scalers (0.4 to 0.19), whose names the attributes have: they go into checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar


@dataclass
class LossScaler:
    """A loss scale that stays as it is."""

    cur_scale: float = 1.0
    dynamic: ClassVar[bool] = False

    def update(self, overflow: bool) -> None:
        """Take note of a step."""


@dataclass
class DynamicLossScaler:
    """A loss scale that falls when gradients overflow and rises when they have not for a while.

    Parameters
    ----------
    cur_scale : float
        The first scale.
    scale_factor : float
        What it is multiplied or divided by.
    scale_window : int
        Steps without overflow after which it rises.
    min_scale : float
        Below which it never falls.
    delayed_shift : int
        Hysteresis: how many overflows it takes for the scale to fall, one less than these only use up patience.
    consecutive_hysteresis : bool
        Whether each step without overflow restores patience, not only a rise.
    raise_error_at_min_scale : bool
        Whether an overflow at the least scale is an error, and not only a step skipped.
    """

    cur_scale: float = 2.0**16
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = field(default=0)
    dynamic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scale_factor <= 1.0 or self.scale_window < 1 or self.delayed_shift < 1 or self.min_scale <= 0:
            raise ValueError(
                "a dynamic loss scale needs a factor above 1, a window and hysteresis of at least 1 "
                "and a minimum above 0"
            )
        self.cur_hysteresis = self.cur_hysteresis or self.delayed_shift

    def update(self, overflow: bool) -> None:
        """Take note of a step.

        Raises
        ------
        FloatingPointError
            An overflow at the least scale, where that is an error.
        """
        if overflow:
            self._fall()
            self.last_overflow_iter = self.cur_iter
        else:
            self._rise()
        self.cur_iter += 1

    def _fall(self) -> None:
        if self.delayed_shift > 1 and self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
        elif self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise FloatingPointError(
                f"gradients overflow at the least loss scale of {self.min_scale}: the training has diverged"
            )
        else:
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)

    def _rise(self) -> None:
        if self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        steps_since = self.cur_iter - self.last_overflow_iter - 1
        if steps_since > 0 and steps_since % self.scale_window == 0:
            if not self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor


Scaler = LossScaler | DynamicLossScaler


def read_scaler(given: float | Scaler) -> Scaler:
    """Return a loss scaler; a number is a scale that stays. Raises ValueError unless it is above 0."""
    scaler = given if isinstance(given, (LossScaler, DynamicLossScaler)) else LossScaler(float(given))
    if not scaler.cur_scale > 0:
        raise ValueError(f"a loss scale must be above 0, not {scaler.cur_scale}")
    return scaler


def scaler_like(scaler: Scaler, found: object) -> Scaler:
    """Return the scaler that a checkpoint's object of any class describes by its attributes, or else the one given.

    Raises
    ------
    ValueError
        It describes none that works: a scale that is not above 0, or an attribute of another type.
    """
    values = found if isinstance(found, dict) else getattr(found, "__dict__", None)
    if not isinstance(values, dict) or not _is_number(values.get("cur_scale")):
        return scaler
    if not values.get("dynamic", isinstance(found, DynamicLossScaler)):
        return read_scaler(float(values["cur_scale"]))
    known = {one.name: values[one.name] for one in fields(DynamicLossScaler) if one.name in values}
    wrong = next((key for key, value in known.items() if not isinstance(value, bool) and not _is_number(value)), None)
    if wrong is not None:
        raise ValueError(f"{wrong} of a loss scaler is no number: {known[wrong]!r}"[:120])
    return read_scaler(DynamicLossScaler(**known))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
