"""The memory of running processes, as the kernel counts it.

PSS of `/proc/PID/smaps_rollup`: the private pages of a process and its share of shared pages. Two ranks do not count shared
memory twice, and libraries count on all sides of a comparison. Needs only Python's standard library.
"""

import glob
import subprocess
import threading
import time


def pss_mib(pid):
    """Memory of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as table:
            return next(int(line.split()[1]) for line in table if line.startswith("Pss:")) / 1024
    except (OSError, StopIteration):
        return 0


def children(pid):
    """Process ids of the children of all threads of a process."""
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
    """The process without its children."""
    return [pid]


def peak_mib(command, which=of_itself, interval_s=0.02, **how):
    """Runs a command and returns its peak memory, as the average over the processes that `which` returns for the command's
    process id. Reading PSS takes kernel time, so such runs are not timed."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
    peaks, has_ended = [0], threading.Event()

    def sample():
        while not has_ended.is_set():
            pids = which(process.pid)
            if pids:
                peaks.append(sum(map(pss_mib, pids)) / len(pids))
            time.sleep(interval_s)

    sampler = threading.Thread(target=sample)
    sampler.start()
    code = process.wait()
    has_ended.set()
    sampler.join()
    assert code == 0, f"{command} ended with {code}"
    return max(peaks)
