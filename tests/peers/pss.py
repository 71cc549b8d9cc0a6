"""The memory of processes while they run, as the kernel counts it.

PSS of `/proc/PID/smaps_rollup`: what a process has alone, and its share of what several have mapped. So two ranks that share
memory do not count it twice, and libraries count for both sides. Needs Python's standard library only.
"""

import glob
import subprocess
import threading
import time


def pss_mib(pid):
    """Memory of a process; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as table:
            return next(int(line.split()[1]) for line in table if line.startswith("Pss:")) / 1024
    except (OSError, StopIteration):
        return 0


def children(pid):
    """Process ids of the children of a process, whichever of its threads started them."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(path) as file:
                found += [int(word) for word in file.read().split()]
        except OSError:
            pass
    return found


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def of_itself(pid):
    """The process alone, without helpers that it starts."""
    return [pid]


def peak_mib(command, which=of_itself, interval_s=0.02, **how):
    """Runs a command to its end; the largest memory of a process of it, on the average over those that `which` names by the
    process id of the command. Looking takes time of the kernel, so what is measured like this is not timed."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
    peaks, has_ended = [0], threading.Event()

    def look():
        while not has_ended.is_set():
            pids = which(process.pid)
            if pids:
                peaks.append(sum(map(pss_mib, pids)) / len(pids))
            time.sleep(interval_s)

    looks = threading.Thread(target=look)
    looks.start()
    code = process.wait()
    has_ended.set()
    looks.join()
    assert code == 0, f"{command} ended with {code}"
    return max(peaks)
