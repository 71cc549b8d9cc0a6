"""What a run reports: the lines of ``phalanx train --events``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union


@dataclass(frozen=True)
class Preparing:
    """A file of data is being tokenised."""

    path: Path
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Started:
    """The first step is about to run, or the first one of another world of ranks."""

    mesh: Mapping[str, int]
    """Ranks along each axis."""
    first_step: int
    """First step that will run, counted from 0."""
    total_steps: int
    n_trainable: int
    """Elements of the trained parameters."""
    n_params: int
    """Elements of all parameters."""
    n_rows: tuple[int, int]
    """Rows of training and of validation data."""
    resumed_from: Path | None
    """Checkpoint from which the run resumes."""


@dataclass(frozen=True)
class Step:
    """A step was completed."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean loss; for next tokens, in nats per predicted token. NaN if it overflowed."""
    grad_norm: float
    """L2 norm of the gradient before clipping."""
    lr: float
    tokens_per_s: float
    """Padding included."""
    step_ms: float
    epoch: float
    predicted_tokens: int
    memory_bytes: int
    """Resident memory of all processes of the run."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """All other numbers of the step, by their names in ``metrics.jsonl``."""


@dataclass(frozen=True)
class Eval:
    """The validation rows were evaluated."""

    step: int
    """Step after which the evaluation ran."""
    eval_loss: float
    eval_perplexity: float
    eval_ms: float
    scalars: Mapping[str, float] = field(default_factory=dict)
    """All other numbers of the evaluation, by their names in ``metrics.jsonl``."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint is durable."""

    step: int
    path: Path


@dataclass(frozen=True)
class NotSaved:
    """A checkpoint could not be saved. Training continues, and the next save tries again."""

    step: int
    reason: str


@dataclass(frozen=True)
class Note:
    """A message for the user, for example about a rank that died."""

    text: str


@dataclass(frozen=True)
class Ended:
    """How the run ended. A run that failed has no such event."""

    steps: int
    """Completed steps."""
    finished: bool
    """Whether all steps are completed. A run that was stopped earlier resumes from ``checkpoint``."""
    checkpoint: Path | None
    """The last checkpoint."""
    model_dir: Path | None
    """The exported model, if the run finished."""


Event = Union[Preparing, Started, Step, Eval, Saved, NotSaved, Note, Ended]

_BY_NAME: dict[str, type[Event]] = {
    "preparing": Preparing,
    "started": Started,
    "step": Step,
    "eval": Eval,
    "saved": Saved,
    "not_saved": NotSaved,
    "note": Note,
    "ended": Ended,
}
_PATHS = {"path", "resumed_from", "checkpoint", "model_dir"}
_NUMBERS = {"loss", "grad_norm", "eval_loss", "eval_perplexity"}

E = TypeVar("E", bound=Event)


def of_line(line: Mapping[str, Any]) -> Event | None:
    """The event of a line, or None if a later version of the command has added it."""
    kind = _BY_NAME.get(line.get("event", ""))
    return None if kind is None else of_fields(kind, line)


def of_fields(kind: type[E], line: Mapping[str, Any]) -> E:
    """An event from the fields of a line."""
    names = {one.name for one in dataclasses.fields(kind)}
    values = {name: _value(name, line[name]) for name in names & line.keys()}
    if "scalars" in names:
        others = {name: value for name, value in line.items() if name not in names and name != "event"}
        values["scalars"] = {name: _number(value) for name, value in others.items() if _is_number(value)}
    return kind(**values)


def _value(name: str, value: Any) -> Any:
    if name in _PATHS:
        return None if value is None else Path(value)
    if name in _NUMBERS:
        return _number(value)
    return tuple(value) if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _number(value: float | None) -> float:
    """JSON has no NaN and no infinity: a number that overflowed is null."""
    return math.nan if value is None else float(value)
