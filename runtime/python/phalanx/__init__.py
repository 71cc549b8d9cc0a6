"""Trains language models with the command ``phalanx``, which this package brings.

>>> import phalanx
>>> with phalanx.train("my.yaml", max_steps=100) as run:  # doctest: +SKIP
...     for event in run:
...         if isinstance(event, phalanx.Step):
...             print(event.step, event.loss)
>>> phalanx.metrics("outputs").losses  # doctest: +SKIP
[5.61, 5.12, ...]

The job is a process of its own: this module only starts it and reads what it reports.
"""

from importlib.metadata import version as _version

from ._command import command
from ._events import Ended, Eval, Event, Note, NotSaved, Preparing, Saved, Started, Step
from ._metrics import Metrics, metrics
from ._run import JobError, Run, train

__version__ = _version("phalanx")

__all__ = [
    "Ended",
    "Eval",
    "Event",
    "JobError",
    "Metrics",
    "NotSaved",
    "Note",
    "Preparing",
    "Run",
    "Saved",
    "Started",
    "Step",
    "command",
    "metrics",
    "train",
]
