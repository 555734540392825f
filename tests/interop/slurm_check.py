"""Run examples/slurm/pretrain.sbatch under a real Slurm on this machine. Needs no GPU.

    python tests/interop/run.py slurm

Two nodes are two slurmd on the loopback interface. A job starts on both, one of its ranks is
killed, the requeued job reaches its time limit, and the run continues on one node at another
layout. The losses are those of a run without interruptions.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).parents[2]
NODES = ("127.0.0.1", "127.0.0.2")  # names that resolve: torchrun connects to the first node
TIMEOUT = 300.0  # seconds for each step of the check

CONFIG = """
ClusterName=check
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort=26817
AuthType=auth/none
CredType=cred/none
StateSaveLocation={work}/state
SlurmctldPidFile={work}/slurmctld.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdPidFile={work}/slurmd-%n.pid
SlurmdLogFile={work}/slurmd-%n.log
SlurmdSpoolDir={work}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=10
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""

SMALL = (
    "--device cpu --distributed-backend gloo --no-bf16 --num-layers 4 --hidden-size 32 "
    "--ffn-hidden-size 48 --num-attention-heads 4 --num-query-groups 2 --seq-length 32 "
    "--max-position-embeddings 64 --global-batch-size 4 --train-iters 100000 --lr-warmup-iters 10 "
    "--log-interval 1 --eval-iters 0 --save-interval 20 --num-workers 0 --num-threads 1 "
    "--make-vocab-size-divisible-by 8 --tensor-model-parallel-size 1 "
)
TWO_NODES = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
ONE_NODE = "--pipeline-model-parallel-size 1 --num-layers-per-virtual-pipeline-stage 4"


class Cluster:
    """Slurm with two nodes on this machine."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(work / "slurm.conf")}
        for name in [name for name in self.environment if name.startswith("SLURM_JOB")]:
            del self.environment[name]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the daemons inside the block."""
        lines = []
        for index, name in enumerate(NODES):
            lines.append(
                f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 "
                f"Port={26820 + index} CPUs=2 RealMemory=4000 Gres=gpu:1 State=UNKNOWN"
            )
        config = CONFIG.format(host=socket.gethostname(), work=self.work, nodes="\n".join(lines))
        (self.work / "slurm.conf").write_text(config)
        (self.work / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (self.work / "state").mkdir()

        commands = [["slurmctld", "-D", "-c"]]
        for name in NODES:
            (self.work / f"spool-{name}").mkdir()
            commands.append(["slurmd", "-D", "-N", name])
        try:
            for command in commands:
                program = shutil.which(command[0]) or f"/usr/sbin/{command[0]}"
                with open(self.work / f"{command[-1]}.out", "w") as log:
                    self.daemons.append(
                        subprocess.Popen(
                            [program, *command[1:]],
                            env=self.environment,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            wait_for("idle nodes", self._are_nodes_idle)
            yield
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in self.daemons:
                daemon.wait(timeout=30)

    def _are_nodes_idle(self) -> bool:
        for daemon in self.daemons:
            if daemon.poll() is not None:
                raise RuntimeError(f"a daemon ended: see the logs in {self.work}")
        states = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return states.split() == ["idle"] * len(NODES)

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Return the output of a command of Slurm."""
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}: {done.stdout}")
        return done.stdout

    def get_job(self, job: str) -> dict[str, str]:
        """Return the fields of a job."""
        words = self.run("scontrol", "show", "job", job, "--oneliner", check=False).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def has_restarted(self, job: str, times: int) -> bool:
        """Return whether a job runs after being requeued; shortens Slurm's delay of two minutes."""
        fields = self.get_job(job)
        if fields["JobState"] == "PENDING":
            time.sleep(3)  # credentials that are issued right after a requeue count as revoked
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)
        if fields["JobState"] in ("FAILED", "CANCELLED", "TIMEOUT"):
            raise RuntimeError(f"job {job} ended: {fields['JobState']}")
        return fields["JobState"] == "RUNNING" and int(fields["Restarts"]) == times


def wait_for(subject: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{subject}: not after {TIMEOUT:.0f} s")
        time.sleep(0.5)


class Run:
    """A run of the example in Slurm, or of its command without Slurm."""

    def __init__(self, work: Path, name: str, data: Path) -> None:
        self.directory = work / name
        self.directory.mkdir()
        self.log = work / f"{name}.log"
        self.variables = {
            "DATA": str(data),
            "TOKENIZER": str(REPOSITORY / "tests/golden/hf/llama"),
            "RUN_DIR": str(self.directory),
            "TRAIN_ITERS": "100000",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def submit(self, cluster: Cluster, nodes: int, layout: str, *options: str) -> str:
        """Submit the example, and return the number of the job."""
        sizes = (f"--nodes={nodes}", "--gpus-per-node=1", f"--output={self.log}", *options)
        script = "examples/slurm/pretrain.sbatch"
        flags = shlex.split(f"{SMALL} {layout}")
        return cluster.run(
            "sbatch", "--parsable", "--export=ALL", *sizes, script, *flags, **self.variables
        ).strip()

    def get_iteration(self) -> int:
        """Return the iteration of the newest checkpoint."""
        tracker = self.directory / "checkpoints/latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def wait_until(self, iteration: int) -> None:
        wait_for(f"iteration {iteration}", lambda: self.get_iteration() >= iteration)

    def read_losses(self) -> dict[int, float]:
        """Return the loss of every iteration; of repeated ones the last."""
        losses = {}
        for path in sorted((self.directory / "checkpoints/runs").glob("*.jsonl")):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if entry["kind"] == "interval":
                    losses[entry["iteration"]] = entry["lm_loss"]
        return losses


def find_ranks(job: str) -> list[int]:
    """Return the processes of the ranks of a job."""
    processes = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            variables = (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        is_rank = any(word.startswith(b"LOCAL_RANK=") for word in variables)
        if is_rank and f"SLURM_JOB_ID={job}".encode() in variables:
            processes.append(int(directory.name))
    return sorted(processes)


def write_corpus(prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder

    random = np.random.RandomState(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in random.randint(10, 80, size=300):
            builder.add(random.randint(0, 60, size=length))


def main(work: Path) -> None:
    write_corpus(work / "text")
    run = Run(work, "run", work / "text")
    cluster = Cluster(work)
    with cluster.running():
        print(cluster.run("sinfo", "--version").strip(), flush=True)
        try:
            # Killed rank: the job fails, and is requeued because it has made progress.
            job = run.submit(cluster, 2, TWO_NODES, "--signal=USR1@30", "--time=2")
            run.wait_until(40)
            os.kill(find_ranks(job)[0], signal.SIGKILL)
            wait_for("a restart", lambda: cluster.has_restarted(job, 1))
            killed_at = run.get_iteration()
            run.wait_until(killed_at + 40)
            print(
                f"rank killed after iteration {killed_at}, requeued and continued: ok", flush=True
            )

            # Time limit: the run saves at an iteration that --save-interval does not request.
            wait_for("a second restart", lambda: cluster.has_restarted(job, 2))
            text = run.log.read_text()
            assert "SIGUSR1 was received" in text, text[-3000:]
            assert "DUE TO TIME LIMIT" not in text, text[-3000:]
            stopped_at = run.get_iteration()
            run.wait_until(stopped_at + 40)
            cluster.run("scancel", job)
            wait_for("the end", lambda: cluster.get_job(job)["JobState"] == "CANCELLED")
            print(
                f"time limit: saved iteration {stopped_at}, requeued and continued: ok", flush=True
            )

            # Another number of nodes and another layout.
            before = run.get_iteration()
            job = run.submit(cluster, 1, ONE_NODE)
            run.wait_until(before + 40)
            cluster.run("scancel", job)
            wait_for("the end", lambda: cluster.get_job(job)["JobState"] == "CANCELLED")
            print(f"one node of two, continued from iteration {before}: ok", flush=True)
        except BaseException:
            print(run.log.read_text()[-6000:] if run.log.exists() else "no output", flush=True)
            raise

    # The same command without Slurm and interruptions.
    last = run.get_iteration() // 20 * 20
    at_once = Run(work, "at-once", work / "text")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    flags = f"{SMALL} {ONE_NODE} --exit-interval {last}"
    subprocess.run(
        ["bash", "examples/slurm/pretrain.sbatch", *shlex.split(flags)],
        cwd=REPOSITORY,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
            **at_once.variables,
            "LAUNCH": shlex.join([*launcher, "--nproc-per-node", "1"]),
        },
        stdout=subprocess.DEVNULL,
        check=True,
    )
    losses = run.read_losses()
    expected = at_once.read_losses()
    assert len(expected) == last, f"{len(expected)} of {last} iterations"
    error = max(abs(losses[iteration] - loss) for iteration, loss in expected.items())
    # Rounding differs between layouts, and grows over hundreds of iterations. A repeated or skipped
    # batch changes a loss by more than 1e-2.
    assert error <= 1e-3, f"losses differ by {error}"
    print(f"losses of {last} iterations differ by at most {error:.1e}: ok", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
