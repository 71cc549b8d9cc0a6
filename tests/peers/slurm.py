#!/usr/bin/env python3
"""Jobs of examples/slurm/finetune.sbatch under a real Slurm, which cancels, requeues and preempts them and loses their machines.

Each job must end with the weights of an undisturbed one, and repeat no step. A job that waits for it with `afterok` must not start before
the last step is done. Prints a table: event, last step before it, step at which the job went on, steps lost, what the waiting job saw,
restarts, and the states that Slurm records.

Needs Linux, root, and the programs of the Debian packages slurmctld, slurmd, slurm-client and munge (written for 22.05). One controller
and three machines run in network and UTS namespaces of a private PID namespace; nothing outside it is touched.

usage: python3 tests/peers/slurm.py target/release/phalanx [--only EVENT …] [--seconds 45]
"""
import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import whole_jobs

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parent.parent / "examples/slurm/finetune.sbatch"
INSIDE = "PHALANX_SLURM_INSIDE"
N_NODES = 3
PATIENCE = 600
# Either of these lines of a log has the step at which a job went on: after a stop, or, with a coordinator that is new, after kills.
RESUMED = re.compile(r"resuming at step (\d+)|^coordinating \(term (?!1\)).*\n(?:(?!generation ).*\n)*generation \d+: .* from step (\d+)", re.M)

CONF = """ClusterName=phalanx
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=86400
SlurmdParameters=config_overrides
MailProg=/bin/true
NodeName=n[1-3] CPUs=64 RealMemory=1000
PartitionName=grace Nodes=n[1-3] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20 State=UP
PartitionName=nograce Nodes=n[1-3] PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP
PartitionName=urgent Nodes=n[1-3] PriorityTier=10 PreemptMode=OFF State=UP
"""


def until(what, condition, patience=PATIENCE):
    return whole_jobs.until(what, condition, patience)


def run(*words, check=True, **more):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **more)
    if check and done.returncode:
        raise SystemExit(f"{words}: {done.stderr or done.stdout}")
    return done.stdout.strip()


class Cluster:
    """A controller and its machines."""

    def __init__(self, dir):
        self.dir = dir
        os.environ["SLURM_CONF"] = str(dir / "slurm.conf")
        (dir / "slurm.conf").write_text(CONF.format(dir=dir))
        (dir / "state").mkdir()
        names = [(f"10.77.0.{10 + i}", f"n{i}") for i in range(1, N_NODES + 1)]
        hosts = [("127.0.0.1", "localhost"), ("10.77.0.1", "head"), *names]
        (dir / "hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts))
        run("mount", "--bind", dir / "hosts", "/etc/hosts")
        run("hostname", "head")
        for words in ("link set lo up", "link add br0 type bridge", "addr add 10.77.0.1/24 dev br0", "link set br0 up"):
            run("ip", *words.split())
        key = dir / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = [f"--{name}-file={dir}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        run("munged", "--force", *files, f"--socket={dir}/munge.sock")
        self.daemon("slurmctld", ["slurmctld", "-D"])
        self.holders = {}
        for i in range(1, N_NODES + 1):
            self.machine(i)
        until("the machines are idle", lambda: run("sinfo", "-h", "-o", "%D %t") == f"{N_NODES} idle", 60)

    def daemon(self, name, words):
        out = open(self.dir / f"{name}.out", "w")
        return subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)

    def machine(self, i):
        (self.dir / f"spool-n{i}").mkdir()
        go = self.dir / f"go{i}"
        inside = f"""hostname n{i}; until [ -e {go} ]; do sleep 0.1; done; ip link set lo up
            ip addr add 10.77.0.{10 + i}/24 dev e{i}; ip link set e{i} up; exec slurmd -D"""
        holder = self.daemon(f"slurmd{i}", ["unshare", "--net", "--uts", "bash", "-c", inside])
        until("a namespace", lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"), 10)
        run("ip", "link", "add", f"v{i}", "type", "veth", "peer", "name", f"e{i}")
        run("ip", "link", "set", f"v{i}", "master", "br0", "up")
        run("ip", "link", "set", f"e{i}", "netns", holder.pid)
        go.touch()
        self.holders[i] = holder.pid

    def stepd(self, job, i):
        """The process id of the slurmstepd of a job's first step on a machine."""
        ns = os.readlink(f"/proc/{self.holders[i]}/ns/uts")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = open(f"/proc/{pid}/cmdline").read()
                if f"slurmstepd: [{job}.0]" in words and os.readlink(f"/proc/{pid}/ns/uts") == ns:
                    return int(pid)
            except OSError:
                pass
        raise SystemExit(f"job {job} has no slurmstepd on n{i}")

    def resume(self, i):
        """Returns a machine to service."""

        def is_back():
            run("scontrol", "update", f"nodename=n{i}", "state=resume", check=False)
            return run("sinfo", "-h", "-n", f"n{i}", "-o", "%t").split("\n")[0] in ("idle", "alloc", "mix")

        until("the machine returns", is_back, 120)


class Job(whole_jobs.Folder):
    """A batch job in a folder of its own."""

    def __init__(self, dir, steps, partition="grace", options=()):
        self.dir, self.options = dir, ["-p", partition, *options]
        dir.mkdir()
        self.write(steps)
        # There are no GPUs here, and few cores.
        lines = SCRIPT.read_text().splitlines(keepends=True)
        (dir / "finetune.sbatch").write_text("".join(line for line in lines if "gpus-per-node" not in line))
        self.submit()

    def submit(self):
        words = ["sbatch", "--parsable", f"--chdir={self.dir}", "--cpus-per-task=1", *self.options]
        self.id = run(*words, self.dir / "finetune.sbatch", "job.yaml")

    def show(self):
        text = run("scontrol", "show", "job", "-o", self.id)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self):
        return self.show()["JobState"]

    def log(self):
        return "".join(path.read_text(errors="replace") for path in sorted(self.dir.glob("finetune-*.log")))

    def until_step(self, step):
        until(f"step {step}: {self.log()[-2000:]}", lambda: self.step() >= step)

    def is_done(self):
        return (self.dir / "out/model/model.safetensors").exists()


def follow(job):
    """Follows an interrupted job until its steps are done and its state is final. Returns the last step before the interruption,
    the step at which it went on, and the states that Slurm recorded on the way."""
    before, states, end = 0, [], time.time() + PATIENCE
    while time.time() < end:
        state, resumed = job.state(), RESUMED.search(job.log())
        if not resumed:
            before = max(before, job.step())
        if state != (states or [None])[-1]:
            states.append(state)
        if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"):
            if job.is_done():
                at = int(resumed[1] or resumed[2]) if resumed else None
                return before, at, states
            states.append("sbatch")
            job.submit()
        time.sleep(0.2)
    raise SystemExit(f"not done in time: {states}\n{job.log()[-3000:]}")


def preempt():
    run("sbatch", "-p", "urgent", f"-N{N_NODES}", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")


def set_down(cluster, i):
    run("scontrol", "update", f"nodename=n{i}", "state=down", "reason=test")
    time.sleep(2)
    cluster.resume(i)


def kill_stepd(cluster, job):
    os.kill(cluster.stepd(job.id, 2), signal.SIGKILL)
    # srun waits for the task whose slurmstepd is gone.
    until("the end of the run", job.is_done)
    time.sleep(2)
    run("scancel", job.id)


class After:
    """A job that waits for the success of another one, and tells whether the model was whole when it started."""

    def __init__(self, job):
        self.log = job.dir / "after.log"
        seen = f"test -e {job.dir}/out/model/model.safetensors && echo whole || echo EARLY"
        options = ["--parsable", f"--dependency=afterok:{job.id}", "-p", "grace", "-o", self.log]
        self.id = run("sbatch", *options, "--wrap", seen)

    def found(self):
        """What it has seen; "never" if its dependency cannot be satisfied any more."""
        end = time.time() + 30
        while time.time() < end:
            if self.log.exists() and self.log.read_text().strip():
                return self.log.read_text().strip()
            if "DependencyNeverSatisfied" in run("scontrol", "show", "job", "-o", self.id):
                run("scancel", self.id)
                return "never"
            time.sleep(0.2)
        return "WAITS"


def pids(job):
    """The processes of `phalanx train` of a job's tasks, by machine."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\0")
            name = os.path.basename(words[0])
            if name == "phalanx" and words[1:2] == ["train"] and os.readlink(f"/proc/{pid}/cwd") == str(job.dir):
                found[os.readlink(f"/proc/{pid}/ns/uts")] = int(pid)
        except (OSError, IndexError):
            pass
    return found


def kill_task(cluster, job, i):
    """Kills the task of a machine, and then signals all tasks once the job has gone on without it."""
    os.kill(pids(job)[os.readlink(f"/proc/{cluster.holders[i]}/ns/uts")], signal.SIGKILL)
    job.until_step(job.step() + 50)
    run("scancel", "--signal=TERM", job.id)


def kill_tasks(job):
    """Kills all tasks once a checkpoint is there. Returns its step, behind which steps are lost."""
    saved = run("phalanx", "save", job.dir / "out")
    for pid in pids(job).values():
        os.kill(pid, signal.SIGKILL)
    return int(re.search(r"step (\d+)", saved)[1])


def events(cluster):
    """Name, partition, options of sbatch, and what happens to the running job."""
    return [
        ("scancel --signal=TERM", "grace", [], lambda job: run("scancel", "--signal=TERM", job.id)),
        ("scancel, then sbatch", "grace", [], lambda job: run("scancel", job.id)),
        ("time limit, --signal=TERM@50", "grace", ["--time=1", "--signal=TERM@50"], lambda job: None),
        ("preemption, 20 s of grace", "grace", [], lambda job: preempt()),
        ("preemption without grace", "nograce", [], lambda job: preempt()),
        ("scontrol requeue", "grace", [], lambda job: run("scontrol", "requeue", job.id)),
        ("node of rank 1 set down", "grace", [], lambda job: set_down(cluster, 2)),
        ("node of the coordinator set down", "grace", [], lambda job: set_down(cluster, 1)),
        ("task of a rank killed, then TERM", "grace", [], lambda job: kill_task(cluster, job, 2)),
        ("task of the coordinator killed", "grace", [], lambda job: kill_task(cluster, job, 1)),
        ("all tasks killed after a save", "grace", [], lambda job: kill_tasks(job)),
        ("slurmstepd killed, scancel at the end", "grace", [], lambda job: kill_stepd(cluster, job)),
    ]


def measure(cluster, dir, binary, args):
    (dir / "bin").mkdir()
    (dir / "bin/phalanx").symlink_to(binary)
    os.environ["PATH"] = f"{dir}/bin:{os.environ['PATH']}"
    trial = Job(dir / "trial", 150)
    trial.until_step(50)
    begin = time.time()
    trial.until_step(150)
    steps = max(300, int(100 / (time.time() - begin) * args.seconds))
    until("the end of the trial", lambda: trial.state() == "COMPLETED")
    straight = Job(dir / "straight", steps)
    until("the undisturbed run", lambda: straight.state() == "COMPLETED")
    print(f"{steps} steps on {run('sinfo', '--version')}", flush=True)
    print(f"{'event':38} {'before':>6} {'on at':>6} {'lost':>4}  weights  afterok  restarts  states", flush=True)
    is_good = True
    for number, (name, partition, options, happens) in enumerate(events(cluster)):
        if args.only and not any(word in name for word in args.only):
            continue
        job = Job(dir / f"job{number}", steps, partition, options)
        after = After(job)
        job.until_step(min(steps // 4, 200))
        saved = happens(job)
        if name.startswith("time limit"):
            until("the signal", lambda: "stopping after the current step" in job.log())
            # The rest needs more than the minute.
            until("the job is queued again", lambda: job.state() in ("PENDING", "RUNNING") and "saved" in job.log())
            run("scontrol", "update", f"jobid={job.id}", "timelimit=60", check=False)
        before, at, states = follow(job)
        before = saved or before
        lost = 0 if at is None else before - at
        is_equal = job.weights() == straight.weights()
        waited = after.found()
        is_good &= is_equal and lost <= 0 and waited in ("whole", "never")
        restarts, at = job.show()["Restarts"], "-" if at is None else at
        equal = "equal" if is_equal else "DIFFER"
        print(f"{name:38} {before:6} {at:>6} {lost:4}  {equal:7}  {waited:7}  {restarts:>8}  {' '.join(states)}", flush=True)
        if not is_equal or lost > 0:
            print(job.log()[-3000:], flush=True)
    return is_good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", metavar="EVENT", help="only events whose name has one of these texts")
    parser.add_argument("--seconds", type=int, default=45, help="about how long an undisturbed run takes")
    args = parser.parse_args()
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "ip") if not shutil.which(name)]
    if missing or os.getuid() != 0:
        raise SystemExit(f"needs root and these programs: {', '.join(missing)}")
    if INSIDE not in os.environ:
        # Everything started here dies with the first process of the namespace.
        ours = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # The shell, as the first process, collects orphans.
        shell = ["bash", "-c", '"$@"; exit $?', "init", sys.executable, *sys.argv]
        os.execvpe("unshare", [*ours, *shell], {**os.environ, INSIDE: "1"})
    dir = pathlib.Path(tempfile.mkdtemp(prefix="phalanx-slurm-"))
    try:
        good = measure(Cluster(dir), dir, args.binary.resolve(), args)
    finally:
        print(f"logs in {dir}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
