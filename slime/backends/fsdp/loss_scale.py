"""The factor of the loss in fp16, without which small gradients would be rounded to zero."""

import math

_START, _FACTOR, _LEAST = 2.0**16, 2.0, 1.0  # powers of two: scaling back is exact
_GOOD_STEPS = 2000  # after which a larger factor is tried


class LossScale:
    """Halves after a step whose gradient overflowed, and doubles after many that did not.

    All ranks update theirs by the same gradient norm.
    """

    def __init__(self, state: tuple[float, int] = (_START, 0)) -> None:
        self.size, self._good_steps = float(state[0]), int(state[1])

    @property
    def state(self) -> tuple[float, int]:
        return self.size, self._good_steps

    def update(self, grad_norm: float) -> bool:
        """Adapt to the gradient norm of a step; return whether it overflowed and the step must be skipped.

        At the least size a gradient that is not finite is an error of the step, and no overflow.
        """
        if math.isfinite(grad_norm):
            self._good_steps += 1
            if self._good_steps == _GOOD_STEPS:
                self.size, self._good_steps = self.size * _FACTOR, 0
            return False
        if self.size <= _LEAST:
            return False
        self.size, self._good_steps = self.size / _FACTOR, 0
        return True
