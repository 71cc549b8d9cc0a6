"""A run of a job: the process ``phalanx train``, and its events."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import IO, Any

from ._command import command
from ._events import Ended, Event, Note, of_line


_LINES_OF_ERROR_MAX = 100
"""Last lines on standard error that an error shows."""
_EVENTS_MAX = 100_000
"""Events that wait to be read. Measurements are in ``metrics.jsonl``, too."""


class JobError(Exception):
    """A run that failed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """Of the command: 2 if the configuration or the data are at fault; negative for a signal."""


def train(config: str | os.PathLike[str] | Mapping[str, Any], /, **keys: Any) -> Run:
    """Starts a job, as ``phalanx train`` does, and returns while it runs.

    Args:
        config: The job's YAML file, or its keys.
        keys: Keys of the file to override. Those of sections have dots: ``**{"datasets.0.path": "chats.jsonl"}``.

    >>> run = train({"base_model": "models/Qwen3-0.6B", ...}, learning_rate=1e-4)  # doctest: +SKIP
    """
    return Run(config, keys)


class Run:
    """A running job. Iterate over it for its events, or :meth:`wait` for its end.

    Leaving ``with``, an interrupt while its events are read, and the end of the interpreter stop it: it saves a checkpoint, from
    which the same call resumes.
    """

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any], keys: Mapping[str, Any]) -> None:
        self._file: IO[str] | None = None
        if isinstance(config, Mapping):
            self._file = tempfile.NamedTemporaryFile("w", prefix="phalanx-", suffix=".yaml", encoding="utf-8")
            json.dump(config, self._file, default=os.fspath)  # JSON is YAML.
            self._file.flush()
            config = self._file.name
        overrides = [word for key, value in keys.items() for word in (f"--{key}", _text(value))]
        words = [str(command()), "train", "--events", os.fspath(config), *overrides]
        # A session of its own: an interrupt of the terminal is for this program, which then stops the run once.
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._end: Ended | None = None
        self._said: deque[str] = deque(maxlen=_LINES_OF_ERROR_MAX)
        self._events: deque[Event] = deque(maxlen=_EVENTS_MAX)
        self._changed = threading.Condition()
        self._n_pipes = 0
        # Threads of their own, because the job drops lines for a reader that is slow, and at its end does not wait for it.
        self._follow(self._process.stdout, self._parsed)
        self._follow(self._process.stderr, self._noted)
        atexit.register(self._finish)

    @property
    def pid(self) -> int:
        """Of the process ``phalanx train``."""
        return self._process.pid

    def __iter__(self) -> Iterator[Event]:
        """The events until the run has ended; of those that wait to be read, the last 100,000.

        Raises:
            JobError: The run failed.
        """
        try:
            while (event := self._next()) is not None:
                yield event
        except KeyboardInterrupt:
            self.stop()
            raise
        self._conclude()

    def wait(self) -> Ended:
        """Waits for the end of the run.

        Raises:
            JobError: The run failed.
        """
        for _ in self:
            pass
        return self._conclude()

    def stop(self) -> None:
        """Asks the run to stop after its current step and to save a checkpoint; does not wait for it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish()

    def _finish(self) -> None:
        """Stops the run if it is still running, and waits for its end."""
        self.stop()
        self._await()

    def _await(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._n_pipes == 0)
        self._process.wait()
        if self._file is not None:
            self._file.close()
        atexit.unregister(self._finish)

    def _conclude(self) -> Ended:
        self._await()
        if self._end is None:
            code = self._process.returncode
            raise JobError("\n".join(self._said) or f"phalanx train ended with exit code {code}", code)
        return self._end

    def _next(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._n_pipes == 0)
            return self._events.popleft() if self._events else None

    def _follow(self, pipe: IO[bytes] | None, parse: Callable[[str], Event | None]) -> None:
        assert pipe is not None, "the process was started with pipes"
        self._n_pipes += 1
        threading.Thread(target=self._read, args=(pipe, parse), daemon=True).start()

    def _read(self, pipe: IO[bytes], parse: Callable[[str], Event | None]) -> None:
        with pipe:
            for line in pipe:
                event = parse(line.decode("utf-8", "replace").rstrip("\n"))
                with self._changed:
                    if event is not None:
                        self._events.append(event)
                    self._changed.notify_all()
        with self._changed:
            self._n_pipes -= 1
            self._changed.notify_all()

    def _parsed(self, line: str) -> Event | None:
        event = of_line(json.loads(line))
        if isinstance(event, Ended):
            self._end = event
        return event

    def _noted(self, line: str) -> Event:
        self._said.append(line)
        return Note(line)


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, default=os.fspath)
