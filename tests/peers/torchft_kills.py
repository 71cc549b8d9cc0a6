"""Kills one of two replicas of a PyTorch job under TorchFT and measures how long the other one makes no step, as kills.py does
for ranks of Phalanx.

    PYTHON_WITH_TORCHFT tests/peers/torchft_kills.py [--kills 5]

Two replica groups of one rank each on Gloo (torch_worker.py, package torchft), with the lighthouse of the package; a killed
replica is restarted at once and fetches its state from the other. Prints for each kill the survivor's longest gap between two
steps until both take part again, and the time until they do.
"""
import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

from torchrun_kills import WORKER, steps, until

SETTLED = 20


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(folder, replica, lighthouse):
    variables = {"REPLICA": str(replica), "TORCHFT_LIGHTHOUSE": lighthouse, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"RANK": "0", "WORLD_SIZE": "1"}
    log = open(f"{folder}/log-{replica}", "a")
    return subprocess.Popen([sys.executable, WORKER, "torchft", folder, "1000000", "0"], env=os.environ | variables, stdout=log, stderr=log)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    dice, found = random.Random(1), []
    port = free_port()
    lighthouse = [os.path.join(os.path.dirname(sys.executable), "torchft_lighthouse"), "--min_replicas", "1"]
    lighthouse += ["--bind", f"127.0.0.1:{port}"]
    with tempfile.TemporaryDirectory() as folder:
        processes = [subprocess.Popen(lighthouse, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
        try:
            replicas = [start(folder, replica, f"http://127.0.0.1:{port}") for replica in range(2)]
            processes += replicas
            both = lambda replica: [n for _, _, n in steps(folder, f"steps-{replica}")[-SETTLED:]] == [2] * SETTLED
            until("steps together", processes[0], lambda: both(0) and both(1))
            for i in range(args.kills):
                time.sleep(dice.uniform(1, 3))
                victim = dice.randrange(2)
                other = f"steps-{1 - victim}"
                n_before, begin = len(steps(folder, other)), time.monotonic()
                replicas[victim].send_signal(signal.SIGKILL)
                replicas[victim].wait()
                replicas[victim] = start(folder, victim, f"http://127.0.0.1:{port}")
                processes.append(replicas[victim])
                after = lambda: steps(folder, other)[n_before:]
                alone = lambda: any(n == 1 for _, _, n in after())
                together = lambda: [when for (_, _, a), (_, when, b) in zip(after(), after()[1:]) if (a, b) == (1, 2)]
                until("steps together again", replicas[1 - victim], lambda: alone() and together() and both(1 - victim))
                times = [begin] + [when for _, when, _ in after()]
                longest = max(b - a for a, b in zip(times, times[1:]))
                found.append((longest, together()[0] - begin))
                print(f"kill {i + 1}: no step for {found[-1][0]:.2f} s, both again after {found[-1][1]:.2f} s", flush=True)
        except AssertionError:
            for replica in range(2):
                print(open(f"{folder}/log-{replica}").read()[-2000:])
            raise
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for name, values in zip(("no step", "both again"), zip(*found)):
        values = sorted(values)
        print(f"{name}: p50 {values[len(values) // 2]:.2f} s, min {values[0]:.2f} s, max {values[-1]:.2f} s")


if __name__ == "__main__":
    main()
