#!/usr/bin/env python3
"""Ends of whole jobs: a signal to every process, as from a service manager (systemd's KillMode=control-group), a batch system or
`docker stop`. Each job must save the step that it reached, and end with the weights of an undisturbed run after a resume.

    python3 tests/peers/all_processes.py target/release/phalanx [--only CASE …]

Prints a table: case, last step before the signal, saved step, steps lost, exit codes. The case `control group` needs root and a
mounted cgroup hierarchy, the case `container` needs root; both are left out, and named, without. Python's standard library, Linux.
"""

import argparse
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time

from whole_jobs import Folder, until

PATIENCE = 120


def tree(pid):
    """A process and its descendants."""
    pids = [pid]
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in open(f"/proc/{pid}/task/{task}/children").read().split():
                pids += tree(int(child))
    except OSError:
        pass
    return pids


def send(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


class Run(Folder):
    def __init__(self, binary, root):
        self.binary, self.dir, self.processes = binary, pathlib.Path(tempfile.mkdtemp(dir=root)), []
        self.write(steps=600)

    def start(self, *words, before=(), **variables):
        log = open(self.dir / f"log{len(self.processes)}", "w")
        words = [*before, self.binary, *words]
        environment = {**os.environ, **variables}
        process = subprocess.Popen(words, cwd=self.dir, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        self.processes.append(process)
        return process

    def log(self):
        return "".join(path.read_text(errors="replace") for path in sorted(self.dir.glob("log*")))

    def pids(self):
        return [pid for process in self.processes for pid in tree(process.pid)]

    def end(self):
        for process in self.processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                send(tree(process.pid), signal.SIGKILL)
                process.wait()
        return [process.returncode for process in self.processes]


def port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def alone(run):
    run.start("train", "job.yaml")


def machines(run):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port(), "WORLD_SIZE": "2"}
    for rank in "01":
        run.start("train", "--torchrun", "job.yaml", RANK=rank, **where)


def services(run):
    """A coordinator and two nodes."""
    run.start("coordinator", "job.yaml")
    join = until("a join string", lambda: re.search(r"--join (\S+)", run.log()), PATIENCE)[1]
    for node in "12":
        run.start("node", "--join", join, "--dir", f"node{node}")


def container(run):
    """The launcher is the first process of a PID namespace."""
    run.start("train", "job.yaml", before=["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"])


def all_at_once(*numbers, pause=0.7):
    def happens(run):
        pids = run.pids()
        for number in numbers:
            # Ranks first: they must not die of it before the launcher hears of it.
            send(reversed(pids), number)
            time.sleep(pause)

    return happens


def control_group(run):
    """As systemd stops a unit: SIGTERM to every member of the group, then SIGHUP."""
    roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup"]
    group = None
    for root in roots:
        try:
            group = pathlib.Path(root) / f"phalanx-{os.getpid()}"
            group.mkdir()
            break
        except OSError:
            group = None
    if group is None:
        raise PermissionError("no control group can be made")
    for pid in run.pids():
        (group / "cgroup.procs").write_text(str(pid))
    for number in (signal.SIGTERM, signal.SIGHUP):
        send(map(int, (group / "cgroup.procs").read_text().split()), number)
    run.end()
    until("the group is empty", lambda: not (group / "cgroup.procs").read_text(), PATIENCE)
    group.rmdir()


def docker_stop(run):
    """SIGTERM to the first process, and SIGKILL to all after ten seconds."""
    first = tree(run.processes[0].pid)[1]
    send([first], signal.SIGTERM)
    try:
        run.processes[0].wait(10)
    except subprocess.TimeoutExpired:
        send([first], signal.SIGKILL)


CASES = {
    "one machine, SIGTERM to all": (alone, all_at_once(signal.SIGTERM)),
    "one machine, SIGTERM twice": (alone, all_at_once(signal.SIGTERM, signal.SIGTERM)),
    "one machine, SIGHUP, SIGUSR1, SIGTERM": (alone, all_at_once(signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM)),
    "two machines, SIGTERM to all": (machines, all_at_once(signal.SIGTERM, signal.SIGTERM, pause=3)),
    "coordinator and nodes, SIGTERM to all": (services, all_at_once(signal.SIGTERM, signal.SIGTERM, pause=3)),
    "control group, one machine": (alone, control_group),
    "control group, coordinator and nodes": (services, control_group),
    "container, docker stop": (container, docker_stop),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", metavar="CASE", help="only cases whose name has one of these texts")
    args = parser.parse_args()
    binary, good = str(args.binary.resolve()), True
    with tempfile.TemporaryDirectory(prefix="phalanx-signals-") as root:
        straight = Run(binary, root)
        alone(straight)
        if straight.end() != [0]:
            raise SystemExit(straight.log())
        print(f"{'case':40} {'step':>5} {'saved':>5} {'lost':>4}  weights  exit codes", flush=True)
        for name, (start, happens) in CASES.items():
            if args.only and not any(word in name for word in args.only):
                continue
            run = Run(binary, root)
            start(run)
            until(f"step 60: {run.log()[-2000:]}", lambda: run.step() >= 60, PATIENCE)
            before = run.step()
            try:
                happens(run)
            except PermissionError as error:
                send(run.pids(), signal.SIGKILL)
                print(f"{name:40} left out: {error}", flush=True)
                continue
            codes = run.end()
            names = [path.name for path in (run.dir / "out/checkpoints").glob("step-*") if (path / "COMMIT").exists()]
            saved = max((int(re.match(r"step-(\d+)", name)[1]) for name in names), default=0)
            again = Run.__new__(Run)
            again.binary, again.dir, again.processes = run.binary, run.dir, []
            again.start("train", "job.yaml")
            is_equal = again.end() == [0] and run.weights() == straight.weights()
            lost = max(0, before - saved)
            good &= is_equal and lost == 0 and not any(codes)
            equal = "equal" if is_equal else "DIFFER"
            print(f"{name:40} {before:5} {saved:5} {lost:4}  {equal:7}  {codes}", flush=True)
            if not is_equal or lost or any(codes):
                print(run.log()[-3000:], flush=True)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
