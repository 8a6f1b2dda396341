"""The factor that keeps fp16 gradients out of underflow, by DeepSpeed's rules.

Start at a power of two; halve at an overflow, once as many were seen as the hysteresis says; double after
a window of steps without one. The step of an overflow is skipped in any case.
"""

from zero_core.config.zero import LossScaleConfig


class LossScaler:
    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self.scale = config.static or 2.0**config.initial_scale_power
        self._good_steps = 0
        self._overflows_left = config.hysteresis

    @property
    def exhausted(self) -> bool:
        """It can't fall any more: an overflow is then the model's, not the scale's."""
        return bool(self._config.static) or self.scale <= self._config.minimum

    def update(self, overflow: bool) -> bool:
        """After a step; True if the scale changed."""
        if self._config.static:
            return False
        before = self.scale
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, self._config.minimum)
                self._overflows_left = 1
        else:
            self._good_steps += 1
            if self._good_steps % self._config.window == 0:
                self.scale *= 2
                self._overflows_left = self._config.hysteresis
        return self.scale != before

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows_left": self._overflows_left}

    def restore(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self._good_steps = int(state["good_steps"])
        self._overflows_left = int(state["overflows_left"])
