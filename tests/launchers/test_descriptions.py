"""Runs that start from a description of machines (Kubeflow's variables, accelerate's file, a hostfile), and `--on`."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.command import free_port
from tests.launchers.test_trains import JOB, MANYHANDS, assert_one_run_of_two, run_to_end

ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_machines: 1\nnum_processes: 2\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "content"), [("accelerate.yaml", ACCELERATE), ("hosts", "localhost slots=2\n")])
def test_a_file_of_this_machine_starts_its_processes(here, name, content):
    (here / name).write_text(content)
    assert_one_run_of_two(run_to_end([*MANYHANDS, *JOB, "--cluster", name]), here)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_pods_of_kubeflow_are_one_run(here):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing; it chooses an interface
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            pytest.skip(f"this machine has no address but its loopback ({error})")
        address, _ = probe.getsockname()
    place = {"PET_NNODES": "2", "PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(free_port())}
    place["GLOO_SOCKET_IFNAME"] = ""
    with ThreadPoolExecutor() as pool:
        pods = [pool.submit(run_to_end, [*MANYHANDS, *JOB], **place, PET_NODE_RANK=str(rank)) for rank in range(2)]
    worker = pods[1].result()
    assert worker.returncode == 0, worker.stderr
    assert_one_run_of_two(pods[0].result(), here)


@pytest.mark.parametrize(("system", "sign"), [("slurm", "#SBATCH --nodes"), ("kubernetes", "kind: TrainJob")])
def test_a_dry_run_prints_what_would_be_submitted(here, system, sign):
    (here / "job.toml").write_text(
        '[data]\nname = "digits"\n[model]\nname = "mlp"\n[submit]\nimage = "registry/image:1"\n'
    )
    ended = run_to_end([*MANYHANDS, "launch", "job.toml", "--on", system, "--out", "/data/runs/first", "--dry-run"])
    assert ended.returncode == 0, ended.stderr
    assert sign in ended.stdout
