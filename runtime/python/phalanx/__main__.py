"""``python -m phalanx`` is the command ``phalanx`` of this environment."""

import os
import sys

from ._command import command

if __name__ == "__main__":
    path = str(command())
    os.execv(path, [path, *sys.argv[1:]])
