"""What became of every row that was read: kept, dropped for a reason, or failed."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from whiflash_infer.errors import UserError

_EXAMPLES = 3  # places told for every reason
_DETAIL = 160  # characters; a row may hold a key of megabytes
# Left out by choice or already there: no fault of the row, so `strict` does not stop at it.
_NO_FAULT = {
    "answer_truncated",
    "blank_line",
    "duplicate",
    "in_evaluation",
    "over_limit",
    "over_long",
    "prompt_too_long",
}


class BadRow(Exception):
    """A row that cannot be used. `reason` is what is counted, `detail` is for the reader."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail if len(detail) <= _DETAIL else f"{detail[:_DETAIL]}..."
        super().__init__(f"{reason}: {self.detail}" if detail else reason)


@dataclass
class Tally:
    """`read = kept + dropped + failed`. Notes count what was done to rows that were kept.

    lost: (place, reason, detail) of every row that was dropped or failed.
    """

    strict: bool = False
    read: int = 0
    failed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    lost: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return self.read - self.failed - sum(self.dropped.values())

    def drop(self, place: str, bad: BadRow) -> None:
        """Count a row out.

        Raises: UserError naming the place, when strict and the row itself is at fault.
        """
        if self.strict and bad.reason not in _NO_FAULT:
            raise UserError(f"{place}: {bad} (strict=true stops at the first bad row)")
        self.dropped[bad.reason] += 1
        self.lost.append((place, bad.reason, bad.detail))
        self._example(bad.reason, place, bad.detail)

    def fail(self, place: str, detail: str) -> None:
        """Count a row that is good but got no answer."""
        self.failed += 1
        self.lost.append((place, "failed", detail))
        self._example("failed", place, detail)

    def note(self, what: str, place: str) -> None:
        self.notes[what] += 1
        self._example(what, place, "")

    def require_kept(self, num_rows: int) -> None:
        """The rows that were written must be the rows that are left, or a row was lost."""
        if num_rows != self.kept:
            raise AssertionError(f"{num_rows} rows were written, but {self}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "failed": self.failed,
            "notes": dict(sorted(self.notes.items())),
        }

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(self.dropped.items()))
        dropped = f"{sum(self.dropped.values())}" + (f" ({reasons})" if reasons else "")
        return f"read {self.read} = kept {self.kept} + dropped {dropped} + failed {self.failed}"

    def details(self) -> list[str]:
        """A line for every reason and note: how many, and the first places."""
        counts = {**self.dropped, **self.notes, **({"failed": self.failed} if self.failed else {})}
        return [
            f"{what}: {n} row{'s' if n > 1 else ''}, "
            + "; ".join(self.examples[what])
            + (" ..." if n > len(self.examples[what]) else "")
            for what, n in sorted(counts.items())
        ]

    def _example(self, what: str, place: str, detail: str) -> None:
        if len(self.examples[what]) < _EXAMPLES:
            self.examples[what].append(f"{place} ({detail})" if detail else place)
