#!/usr/bin/env python3
"""Kills ranks of a `phalanx` job while strangers open 10,000 connections to its ports, and without strangers, in turns.

    pip install aioquic
    python3 tests/peers/strangers.py target/release/phalanx --rounds 5

A coordinator and two nodes (one rank each, dp_shard 2) are processes of this machine. Strangers know all ports, also those of
replaced ranks, and have no secret: they connect to the TCP ports of ranks and stay silent, send a byte every 50 ms, or send
garbage; to the UDP port of the coordinator they send garbage, first packets of QUIC connections that they never complete, or
complete the handshake and stay silent. Connections that a rank or the coordinator ends are not opened again. A rank is killed
when half of them are open. Prints for each kind of stranger the median and the longest time to the second step after the
kill, beside those without strangers in the same rounds, and the processor time that the strangers took themselves. Exits with 1 if a median is
more than 0.2 s longer.
"""

import glob
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import ssl
import statistics
import sys
import time

from faults import MORE, Cluster, kill_rank, until
from job import Job, arguments, ranks

try:
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

ALLOWED_S = 0.2
OPEN_PER_S = 4000
DRIP_EVERY_S = 0.05


def add(parser):
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=10_000)


def listening(pid):
    """The TCP ports at which a process listens."""
    try:
        sockets = {os.readlink(fd) for fd in glob.glob(f"/proc/{pid}/fd/*")}
        lines = [line.split() for line in open(f"/proc/{pid}/net/tcp")][1:]
    except OSError:
        return set()
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


class Strangers:
    """Opens connections to the ports of ranks (TCP) or of the coordinator (UDP)."""

    def __init__(self, kind, n, nodes, address, protocol, hellos):
        self.kind, self.n, self.nodes, self.protocol, self.hellos = kind, n, nodes, protocol, hellos
        host, _, port = address.rpartition(":")
        self.coordinator = (host, int(port))
        self.sockets, self.connections = [], []
        self.udp = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(16)]
        for udp in self.udp:
            udp.setblocking(False)

    def run(self, n_opened, ends):
        begin = dripped = looked = time.monotonic()
        ports, opened = [], 0
        while not ends.value:
            now = time.monotonic()
            if self.kind.startswith("TCP") and (now - looked > 0.05 or not ports):
                looked, ports = now, sorted({port for node in self.nodes for rank in ranks(node) for port in listening(rank)})
            due = min(self.n, int((now - begin) * OPEN_PER_S)) - opened
            for _ in range(min(due, 200)):
                self.open(ports, opened)
                opened += 1
            n_opened.value = opened
            if now - dripped > DRIP_EVERY_S:
                dripped = now
                self.drip()
            time.sleep(0.002)

    def open(self, ports, i):
        if self.kind.startswith("TCP"):
            if not ports:
                return
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", ports[i % len(ports)]))
            self.sockets.append(stranger)
            if self.kind == "TCP garbage":
                self.send(stranger, random.randbytes(200))
            return
        udp = self.udp[i % len(self.udp)]
        if self.kind == "QUIC garbage":
            udp.sendto(random.randbytes(random.randrange(1, 1300)), self.coordinator)
        elif self.kind == "QUIC first packets":
            udp.sendto(self.hellos[i], self.coordinator)
        else:
            self.complete()

    def complete(self):
        connection, udp = client(self.protocol), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.setblocking(False)
        connection.connect(self.coordinator, now=time.time())
        self.connections.append((connection, udp))
        self.exchange(connection, udp)

    def exchange(self, connection, udp):
        try:
            while True:
                connection.receive_datagram(udp.recv(2048), self.coordinator, now=time.time())
        except OSError:
            pass
        for datagram, _ in connection.datagrams_to_send(now=time.time()):
            self.send(udp, datagram, self.coordinator)

    def send(self, stranger, data, *address):
        try:
            stranger.sendto(data, *address) if address else stranger.send(data)
        except OSError:
            pass

    def drip(self):
        if self.kind == "TCP dripping":
            for stranger in self.sockets:
                self.send(stranger, b"x")
        for connection, udp in self.connections:
            if connection._state.name == "CONNECTED":
                connection.send_ping(0)
            self.exchange(connection, udp)


def client(protocol):
    return QuicConnection(configuration=QuicConfiguration(alpn_protocols=[protocol], verify_mode=ssl.CERT_NONE))


def protocol_of(phalanx):
    """The protocol by which nodes join, which has a version."""
    with open(phalanx, "rb") as program:
        return re.search(rb"phalanx-join/[0-9]", program.read())[0].decode()


def first_packet(protocol):
    connection = client(protocol)
    connection.connect(("127.0.0.1", 1), now=0.0)
    return connection.datagrams_to_send(now=0.0)[0][0]


def recovery(cluster, n_steps):
    """Seconds from the kill of a rank to the second step reported after it."""
    before, begin = n_steps(), time.monotonic()
    kill_rank(cluster)
    until("a step", lambda: n_steps() >= before + 2)
    return time.monotonic() - begin


def settle(n_steps):
    before = n_steps()
    until("steps", lambda: n_steps() >= before + 30)


def attacked(kind, n, cluster, n_steps, *known):
    """Recovery during the attack, and the strangers' own share of a core."""
    n_opened, ends = multiprocessing.Value("l"), multiprocessing.Value("b")
    strangers = Strangers(kind, n, [node.pid for node in cluster.nodes], cluster.address, *known)
    process = multiprocessing.Process(target=strangers.run, args=(n_opened, ends))
    begin = time.monotonic()
    process.start()
    until("strangers", lambda: n_opened.value >= n // 2)
    took = recovery(cluster, n_steps)
    until("strangers", lambda: n_opened.value == n)
    ticks = sum(int(word) for word in open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[11:13])
    core = ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - begin)
    ends.value = 1
    process.join(10)
    process.kill()
    return took, core


def main():
    args, overrides = arguments(__doc__, add)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard > args.connections, f"{args.connections} connections need more than {hard} open files"
    protocol = protocol_of(args.phalanx)
    hellos = [first_packet(protocol) for _ in range(args.connections)]
    kinds = {name: args.connections for name in
             ["TCP silent", "TCP dripping", "TCP garbage", "QUIC garbage", "QUIC first packets"]}
    # Python completes some hundreds of handshakes per second at most.
    kinds["QUIC silent"] = min(args.connections, 2000)
    times, cores = {kind: [] for kind in ["none", *kinds]}, {}
    with Job(args.phalanx, hidden_size=64, n_layers=4, micro_batch_size=2, more=MORE) as job:
        n_steps = lambda: len(job.steps_ms())
        with Cluster(job, args.phalanx, ["--max_steps", "1000000", "--dp_shard_size", "2", *overrides]) as cluster:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            until("a first step", lambda: n_steps() > 10)
            for _ in range(args.rounds):
                for kind, n in kinds.items():
                    settle(n_steps)
                    times["none"].append(recovery(cluster, n_steps))
                    settle(n_steps)
                    took, core = attacked(kind, n, cluster, n_steps, protocol, hellos)
                    times[kind].append(took)
                    cores.setdefault(kind, []).append(core)
    usual = statistics.median(times["none"])
    print("| strangers | connections | recovery, median | longest | longer than without | strangers' own cores |")
    print("|---|---|---|---|---|---|")
    print(f"| none | 0 | {usual:.3f} s | {max(times['none']):.3f} s | | |")
    for kind, n in kinds.items():
        median = statistics.median(times[kind])
        own = statistics.median(cores[kind])
        print(f"| {kind} | {n} | {median:.3f} s | {max(times[kind]):.3f} s | {median - usual:+.3f} s | {own:.2f} |")
    sys.exit(any(statistics.median(times[kind]) > usual + ALLOWED_S for kind in kinds))


if __name__ == "__main__":
    main()
