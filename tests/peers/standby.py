#!/usr/bin/env python3
"""Kills the coordinator of a job, and a node beside it, while a standby on another machine shares nothing with it but a bucket.

    pip install 'moto[server]'
    python3 tests/peers/standby.py target/release/phalanx --outage all --seconds 120

The bucket is in moto's server, an implementation of S3 by another maker, behind a proxy of this script. Each process has a folder of
its own as its disk. With `--outage`, the store fails for so many seconds before the kill, while ranks train on and checkpoints are due:

    503, 500, 403   every request is answered by this status
    hangs           every request is accepted and never answered
    loses           every request is carried out, and its answer is lost
    stops           the server does not run (it accepts connections and answers none)
    mixed           each request meets one of these, or is answered
    all             one job for each kind

Prints the steps that were trained during the outage, the time until the coordinator leads again after it, the time from the kill until
the standby leads, and the first checkpoint after it. Exits with 1 if a step is missing or was computed twice with different
results, if training stopped, if no checkpoint committed, or if the standby led later than a second after the detection time.
"""

import argparse
import http.client
import http.server
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
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
save_steps: 400
output_dir: s3://bucket/run
"""


DETECTION_S = 1.0
KINDS = ["503", "500", "403", "hangs", "loses", "stops", "mixed"]


class Proxy(http.server.ThreadingHTTPServer):
    """Hands requests on to the store, unless it fails as `kind` says."""

    daemon_threads = True

    def __init__(self, store_port):
        super().__init__(("127.0.0.1", 0), Handler)
        self.store_port, self.kind, self.n_failed = store_port, None, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        """Clients that leave are no errors."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_one(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.server.kind
        if kind == "mixed":
            kind = random.choice(["503", "500", "403", "hangs", "loses", None])
        self.server.n_failed += kind not in (None, "stops")
        if kind in ("503", "500", "403"):
            return self.answer(int(kind), [], b"<Error><Code>Failing</Code></Error>")
        if kind == "hangs":
            while self.server.kind in ("hangs", "mixed"):
                time.sleep(0.05)
            self.close_connection = True
            return None
        store = http.client.HTTPConnection("127.0.0.1", self.server.store_port, timeout=600)
        store.request(self.command, self.path, body=body, headers=dict(self.headers.items()))
        reply = store.getresponse()
        content = reply.read()
        store.close()
        if kind == "loses":
            self.close_connection = True
            return None
        return self.answer(reply.status, reply.getheaders(), content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

    def answer(self, status, headers, content):
        self.send_response(status)
        own = ("content-length", "connection", "transfer-encoding", "date", "server")
        kept = [(name, value) for name, value in headers if name.lower() not in own]
        length = dict((name.lower(), value) for name, value in headers).get("content-length", "0")
        for name, value in [*kept, ("Content-Length", length if self.command == "HEAD" else str(len(content)))]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


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
    parser.add_argument("--outage", choices=["none", *KINDS, "all"], default="none")
    parser.add_argument("--seconds", type=float, default=90)
    args = parser.parse_args()
    kinds = {"none": [None], "all": KINDS}.get(args.outage, [args.outage])
    rows = [(kind, run(os.path.abspath(args.phalanx), kind, args.seconds)) for kind in kinds]
    print("| outage | requests that failed | steps during it | longest pause | leads again after | standby leads after | steps in all, "
          "reported twice, missing | next checkpoint |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, (_, row) in rows:
        print(f"| {kind or 'none'} | " + " | ".join(row) + " |")
    sys.exit(any(led > DETECTION_S + 1 for _, (led, _) in rows))


def run(program, kind, seconds):
    """One job; returns its row of the table."""
    processes = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        (root / "text.txt").write_text("".join(f"The {i}th hoplite holds the line. " for i in range(400)))
        (root / "job.yaml").write_text(YAML.replace("TEXT", str(root / "text.txt")))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        proxy = Proxy(port)
        endpoint = f"http://127.0.0.1:{proxy.server_port}"
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
        environment = {**os.environ, **keys, "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true"}
        read = {}

        def start(machine, *words):
            (root / machine).mkdir(exist_ok=True)
            log = open(root / machine / "log", "w")
            folder = root / machine
            processes[machine] = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=environment)

        def log(machine):
            return (root / machine / "log").read_text(errors="replace")

        def metrics():
            """All steps with their losses. Reads only what is new."""
            for path in root.glob(f"*/{LOCAL}/metrics.jsonl"):
                position, lines = read.setdefault(path, (0, []))
                with open(path, "rb") as file:
                    file.seek(position)
                    whole = file.read().rpartition(b"\n")
                new = [json.loads(line) for line in whole[0].splitlines()]
                lines += [(line["step"], line["loss"]) for line in new if "loss" in line]
                read[path] = (position + len(whole[0]) + len(whole[1]), lines)
            return [line for _, lines in read.values() for line in lines]

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

            row = ["0", "", "", ""]
            if kind:
                row = outage(kind, seconds, proxy, processes["s3"], last, lambda: log("head"))
                print(f"{kind}: {row}", flush=True)
            processes["head"].kill()
            processes["one"].kill()
            since, before = time.time(), last()
            until("the standby", lambda: "coordinating (term" in log("standby"))
            led = time.time() - since
            until("steps", lambda: last() > before + 20)
            print(f"{kind}: the standby leads after {led:.2f} s; 20 steps later {time.time() - since:.2f} s after the kill")
            saved = until("a checkpoint", lambda: ask("save", URL).stdout.strip().splitlines()[-1:])[0]
            print(f"{kind}: {saved}", flush=True)
            lines = metrics()
            of = {}
            for step, loss in lines:
                assert of.setdefault(step, loss) == loss, f"step {step} has two results"
            missing = set(range(1, max(of) + 1)) - set(of)
            assert not missing, f"missing steps: {sorted(missing)[:5]}"
            return led, [*row, f"{led:.2f} s", f"{len(of)}, {len(lines) - len(of)}, 0", saved]
        except BaseException:
            for machine in ["head", "standby"]:
                print(f"--- {machine}\n" + "\n".join(log(machine).splitlines()[-30:]), file=sys.stderr)
            raise
        finally:
            proxy.kind = None
            proxy.shutdown()
            for process in processes.values():
                process.kill()
                process.wait()


def outage(kind, seconds, proxy, server, last, head):
    """Lets the store fail; returns what was seen of the job until its coordinator leads again."""
    proxy.kind, before, failed = kind, last(), proxy.n_failed
    if kind == "stops":
        server.send_signal(signal.SIGSTOP)
    seen, longest, since = before, 0.0, time.time()
    begin = since
    while time.time() < begin + seconds:
        time.sleep(0.02)
        now = last()
        if now > seen:
            longest, seen, since = max(longest, time.time() - since), now, time.time()
    longest = max(longest, time.time() - since)
    proxy.kind, failed = None, proxy.n_failed - failed
    if kind == "stops":
        server.send_signal(signal.SIGCONT)
    since = time.time()
    # In a mixed outage the coordinator may lead all the time.
    until("a leader", lambda: kind == "mixed" or "answers again" in head())
    again = time.time() - since
    assert last() > before, "training stopped"
    return [str(failed), str(last() - before), f"{longest:.2f} s", f"{again:.2f} s"]


if __name__ == "__main__":
    main()
