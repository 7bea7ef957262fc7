"""Times of decode and optimizer steps as lines through measurements."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """A time that grows with its load: fixed + each * load seconds."""

    fixed: float
    each: float
    lowest: float
    highest: float
    """Loads that were observed; a time beyond them is extrapolated."""

    def at(self, load: float) -> float:
        return self.fixed + self.each * load

    def times(self, factor: float) -> "Line":
        """A line with `factor` times the seconds."""
        return Line(self.fixed * factor, self.each * factor, self.lowest, self.highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeeds:
    """`Speeds` of a recorded run."""

    decode: Line
    """Time of a decode step by the running sequences of one actor."""
    train: Line
    """Time of an optimizer step by its tokens, prompts included."""

    def decode_seconds(self, num_running: int) -> float:
        return self.decode.at(num_running) if num_running else 0.0

    def train_seconds(self, num_tokens: int) -> float:
        return self.train.at(num_tokens)
