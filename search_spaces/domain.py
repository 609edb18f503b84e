"""The values one knob may take, and which of them lie next to each other. Knows nothing of engines or hardware."""

from __future__ import annotations

from dataclasses import dataclass

Value = str | int | float | bool


def same(left: Value, right: Value) -> bool:
    """Equality that keeps ``1``, ``1.0`` and ``True`` apart, as JSON does."""
    return type(left) is type(right) and left == right


@dataclass(frozen=True, slots=True)
class Choice:
    """A finite list of values; ``ordered`` says that list order is meaningful (4 bits < 8 bits < 16 bits)."""

    values: tuple[Value, ...]
    ordered: bool = False

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a Choice needs at least one value")
        for index, value in enumerate(self.values):
            if any(same(value, other) for other in self.values[:index]):
                raise ValueError(f"a Choice lists {value!r} twice")

    @property
    def size(self) -> int:
        return len(self.values)

    def contains(self, value: Value) -> bool:
        return any(same(value, other) for other in self.values)

    def neighbours(self, value: Value) -> tuple[Value, ...]:
        """The values one step away: list neighbours when ordered, every other value when not. Nearest first."""
        index = next(i for i, other in enumerate(self.values) if same(value, other))
        if not self.ordered:
            return tuple(other for i, other in enumerate(self.values) if i != index)
        return self.values[index + 1 : index + 2] + self.values[max(index - 1, 0) : index]

    def keep(self, values: tuple[Value, ...]) -> Choice:
        """This domain with only ``values`` left, in its own order."""
        return Choice(tuple(v for v in self.values if any(same(v, k) for k in values)), self.ordered)


def Int(low: int, high: int, step: int = 1) -> Choice:
    """Whole numbers from ``low`` to ``high`` inclusive."""
    if step < 1 or high < low:
        raise ValueError(f"Int({low}, {high}, {step}): wants low <= high and step >= 1")
    return Choice(tuple(range(low, high + 1, step)), ordered=True)


def Pow2(low: int, high: int) -> Choice:
    """Powers of two from ``low`` to ``high`` inclusive."""
    if low < 1 or high < low or low & (low - 1) or high & (high - 1):
        raise ValueError(f"Pow2({low}, {high}): wants powers of two, low <= high")
    return Choice(tuple(1 << e for e in range(low.bit_length() - 1, high.bit_length())), ordered=True)


def Float(low: float, high: float, step: float) -> Choice:
    """A grid of numbers; engines round such settings themselves, so a grid loses nothing and keeps identities exact."""
    if step <= 0 or high < low:
        raise ValueError(f"Float({low}, {high}, {step}): wants low <= high and step > 0")
    count = round((high - low) / step)
    return Choice(tuple(round(low + i * step, 10) for i in range(count + 1)), ordered=True)
