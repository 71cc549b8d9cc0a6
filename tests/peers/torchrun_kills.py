"""Kills random workers of a PyTorch job under torchrun and measures the time without a new step, as kills.py does for ranks of
Phalanx.

    PYTHON_WITH_TORCH tests/peers/torchrun_kills.py [--kills 5] [--save-steps 50]

Two ranks on Gloo (torch_worker.py). torchrun's agent stops the other worker and restarts both, and they resume from the last
save and repeat the steps since then. Prints for each kill the time to the first step, the time to the first new step, and the
number of repeated steps. Monitor interval, rendezvous and all other settings are torchrun's defaults. On a busy machine Gloo may
fail to connect after every restart (`connection refused`); the script then fails and prints the log of the agent.
"""
import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from pss import children, command_line

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_worker.py")
PATIENCE_S = 120


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--save-steps", type=int, default=50)
    args = parser.parse_args()
    dice, found = random.Random(1), []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1000"]
        command += [WORKER, "torchrun", folder, "1000000", str(args.save_steps)]
        log = open(f"{folder}/log", "w")
        agent = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until("a first save", agent, lambda: len(steps(folder)) > args.save_steps)
            for i in range(args.kills):
                time.sleep(dice.uniform(1, 3))
                workers = [pid for pid in children(agent.pid) if "torch_worker" in command_line(pid)]
                before, begin = steps(folder), time.monotonic()
                os.kill(dice.choice(workers), signal.SIGKILL)
                # The next step in the file may be older than the kill, so a new step has a higher number.
                last = max(number for number, *_ in before) + 1
                new = lambda: next((when for number, when, _ in steps(folder)[len(before):] if number > last), None)
                until("a new step", agent, new)
                again = [(number, when) for number, when, _ in steps(folder)[len(before):] if number <= last - 1]
                first = again[0][1] if again else new()
                found.append((first - begin, new() - begin, last - again[0][0] if again else 0))
                print(f"kill {i + 1}: {found[-1][0]:.2f} s to a step, {found[-1][1]:.2f} s to a new one, {found[-1][2]} repeated", flush=True)
        except AssertionError:
            print(open(f"{folder}/log").read()[:6000])
            raise
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait()
    for name, values in zip(("to a step", "to a new step"), zip(*found)):
        values = sorted(values)
        print(f"{name}: p50 {values[len(values) // 2]:.2f} s, min {values[0]:.2f} s, max {values[-1]:.2f} s")


def steps(folder, name="steps"):
    """Number, time and ranks of each reported step."""
    try:
        with open(f"{folder}/{name}") as file:
            lines = [line.split() for line in file.read().rpartition("\n")[0].splitlines()]
    except FileNotFoundError:
        return []
    return [(int(number), float(when), int(n_ranks)) for number, when, n_ranks in lines]


def until(what, process, is_so):
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert process.poll() is None, f"ended before {what}"
        assert time.monotonic() < deadline, f"timeout while waiting for {what}"
        time.sleep(0.005)


if __name__ == "__main__":
    main()
