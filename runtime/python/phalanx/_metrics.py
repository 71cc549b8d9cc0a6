"""The measurements of a run, from its files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ._events import Eval, Step, of_fields


@dataclass(frozen=True)
class Metrics:
    """The measurements of a run, in the order of its steps."""

    steps: list[Step]
    evals: list[Eval]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.steps]

    def column(self, name: str) -> list[float]:
        """A number of each step, by its name in ``metrics.jsonl``; NaN where a step has none.

        >>> Metrics([], []).column("lr")
        []
        """
        return [_number(step, name) for step in self.steps]


def metrics(run: str | os.PathLike[str]) -> Metrics:
    """The measurements of a run, which may still be training.

    Args:
        run: Its ``output_dir``, or its ``metrics.jsonl``.

    Raises:
        FileNotFoundError: The run has completed no step yet.
    """
    path = Path(run)
    with open(path / "metrics.jsonl" if path.is_dir() else path, encoding="utf-8") as file:
        return of_lines(file)


def of_lines(lines: Iterable[str]) -> Metrics:
    """The measurements in the lines of a file. A step that ran again, after a failure, counts as it ran last."""
    steps: dict[int, Step] = {}
    evals: dict[int, Eval] = {}
    for line in lines:
        if not line.endswith("\n"):
            break  # It is being written.
        fields = json.loads(line)
        if "eval_loss" in fields:
            evals[fields["step"]] = of_fields(Eval, fields)
        elif "loss" in fields:
            steps[fields["step"]] = of_fields(Step, fields)
    return Metrics([steps[at] for at in sorted(steps)], [evals[at] for at in sorted(evals)])


def _number(step: Step, name: str) -> float:
    value = getattr(step, name, None) if name != "scalars" else None
    return float(step.scalars.get(name, float("nan")) if value is None else value)
