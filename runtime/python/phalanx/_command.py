"""Where the command is that was installed with this module."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def command() -> Path:
    """The file of the command ``phalanx`` that was installed with this module.

    It is not searched for in ``PATH``, which may have another version.

    Raises:
        FileNotFoundError: It was removed.
    """
    candidates = list(_candidates())
    for path in candidates:
        if path.is_file():
            return path
    places = ", ".join(str(path.parent) for path in candidates)
    raise FileNotFoundError(f"no command phalanx in {places}; reinstall the package phalanx")


def _candidates() -> Iterator[Path]:
    folder = Path(__file__).resolve().parent.parent
    # pip install --target: beside the packages.
    yield folder / "bin" / "phalanx"
    # pip install --prefix, or an environment that another interpreter uses: lib/python3.x/site-packages.
    yield folder.parent.parent.parent / "bin" / "phalanx"
    yield Path(sysconfig.get_path("scripts")) / "phalanx"
    yield Path(sysconfig.get_path("scripts", f"{os.name}_user")) / "phalanx"
