#!/usr/bin/env python3
"""Kills the coordinator of a job, and a node beside it, while a standby on another machine shares nothing with it but a bucket.

    pip install 'moto[server]'
    python3 tests/peers/standby.py target/release/phalanx --outage 90

The bucket is in moto's server, an implementation of S3 by another maker. Each process has a folder of its own as its disk. With
`--outage`, the server is stopped for so many seconds (it accepts connections and answers none) before the kill; ranks must train
on. Prints the time from the kill until the standby leads, the steps that were trained during the outage, and the step of the
first checkpoint after it. Exits with 1 if a step is missing or was computed twice with different results.
"""

import argparse
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

URL = "s3://bucket/run"
LOCAL = "outputs/bucket/run"
YAML = """
model: {model_type: llama, vocab_size: 512, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
        num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 64}
tokenizer: bytes
datasets: [{path: TEXT, type: completion}]
sequence_len: 32
micro_batch_size: 2
microbatches_per_step: 4
dp_shard_size: 2
reproducible: true
max_steps: 100000000
learning_rate: 1e-3
logging_steps: 1
save_steps: none
output_dir: s3://bucket/run
"""


def until(what, poll, patience=300):
    deadline = time.time() + patience
    while time.time() < deadline:
        found = poll()
        if found:
            return found
        time.sleep(0.005)
    sys.exit(f"timeout while waiting for {what}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx")
    parser.add_argument("--outage", type=float, default=0)
    args = parser.parse_args()
    program, processes = os.path.abspath(args.phalanx), {}
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        (root / "text.txt").write_text("".join(f"The {i}th hoplite holds the line. " for i in range(400)))
        (root / "job.yaml").write_text(YAML.replace("TEXT", str(root / "text.txt")))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        endpoint = f"http://127.0.0.1:{port}"
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
        environment = {**os.environ, **keys, "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true"}

        def start(machine, *words):
            (root / machine).mkdir(exist_ok=True)
            log = open(root / machine / "log", "w")
            folder = root / machine
            processes[machine] = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=environment)

        def log(machine):
            return (root / machine / "log").read_text(errors="replace")

        def metrics():
            lines = []
            for path in root.glob(f"*/{LOCAL}/metrics.jsonl"):
                lines += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            return [(line["step"], line["loss"]) for line in lines if "loss" in line]

        def last():
            return max((step for step, _ in metrics()), default=0)

        def ask(*words):
            return subprocess.run([program, *words], cwd=root, env=environment, capture_output=True, text=True)

        try:
            start("s3", sys.executable, "-m", "moto.server", "-p", str(port))

            def bucket():
                try:
                    request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
                    return urllib.request.urlopen(request, timeout=5).status == 200
                except OSError:
                    return False

            until("moto", bucket)
            for machine in ["head", "standby"]:
                start(machine, program, "coordinator", "--listen", "127.0.0.1:0", str(root / "job.yaml"))
                until(machine, lambda: "--join " in log(machine) or "standing by" in log(machine))
            join = log("head").split("--join ")[1].split()[0]
            for machine in ["one", "two", "three"]:
                start(machine, program, "node", "--join", join, "--dir", "key")
            until("steps", lambda: last() > 20)

            if args.outage:
                before = last()
                processes["s3"].send_signal(signal.SIGSTOP)
                time.sleep(args.outage)
                during = last() - before
                processes["s3"].send_signal(signal.SIGCONT)
                print(f"{during} steps during an outage of {args.outage:.0f} s")
                assert during > 0
                since = time.time()
                until("a leader", lambda: "answers again" in log("head"))
                print(f"the coordinator leads again {time.time() - since:.2f} s after the outage")

            processes["head"].kill()
            processes["one"].kill()
            since, before = time.time(), last()
            until("the standby", lambda: "coordinating (term" in log("standby"))
            print(f"the standby leads {time.time() - since:.2f} s after the kill")
            until("steps", lambda: last() > before + 20)
            print(f"20 steps later {time.time() - since:.2f} s after the kill")
            saved = until("a checkpoint", lambda: ask("save", URL).stdout.strip().splitlines()[-1:])[0]
            print(saved)
            lines = metrics()
            of = {}
            for step, loss in lines:
                assert of.setdefault(step, loss) == loss, f"step {step} has two results"
            missing = set(range(1, max(of) + 1)) - set(of)
            print(f"{len(of)} steps, {len(lines) - len(of)} reported twice, missing: {sorted(missing)[:5]}")
            sys.exit(1 if missing else 0)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
