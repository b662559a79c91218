"""Who a process is, by whatever says so; variables as the launchers themselves were seen to set them."""

import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cluster.hosts import this_process
from manyhands.cluster.hosts.formats import slurm
from manyhands.cluster.hosts.inventory import Cluster, Machine, Rendezvous
from manyhands.config.job import ClusterOptions
from manyhands.config.load import load_job
from manyhands.core.errors import UserError
from manyhands.parallel.group.ports import local_addresses, reachable_addresses
from manyhands.run.train import launch_decision

HERE = socket.gethostname()


def step(rank=3, tasks=(2, 2), **more):
    """Task `rank` of a step that srun started."""
    node = next(n for n in range(len(tasks)) if rank < sum(tasks[: n + 1]))
    return {
        "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(rank - sum(tasks[:node])), "SLURM_STEP_NUM_TASKS": str(sum(tasks)),
        "SLURM_NTASKS": str(sum(tasks)), "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
        "SLURM_STEP_NODELIST": f"n[1-{len(tasks)}]" if len(tasks) > 1 else "n1", **more,
    }  # fmt: skip


BATCH = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "1",
         "SLURM_TASKS_PER_NODE": "4", "SLURM_JOB_NODELIST": "n1"}  # fmt: skip
ONE_TASK = {**BATCH, "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
INTERACTIVE = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
WORKER = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1009844225"}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
MVAPICH = {f"MV2_COMM_WORLD_{key}": value for key, value in
           {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items()}  # fmt: skip


def member(environment, **options):
    """The membership that comes of variables and options."""
    found = this_process.decide_launch(ClusterOptions(**options), environment)
    assert found.process_info
    return found.process_info, found.origins


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5).filter(lambda tasks: sum(tasks) > 1))
def test_slurms_tasks_are_every_rank_once(tasks):
    places = [slurm.place(step(rank, tuple(tasks))) for rank in range(sum(tasks))]
    assert [place.rank for place in places] == list(range(sum(tasks)))
    assert [place.local_rank for place in places] == [n for count in tasks for n in range(count)]
    assert len({(place.size, place.master_address, place.master_port) for place in places}) == 1
    assert places[0].master_address == ("n1" if len(tasks) > 1 else "127.0.0.1")
    assert places[0].master_port == 15000 + 4567


def test_slurms_arbitrary_distribution_has_rank_0_on_the_first_line_of_its_file(tmp_path):
    (tmp_path / "hosts").write_text("# rank by rank\n\nn[3-4]\nn1*2\n")
    arbitrary = {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": str(tmp_path / "hosts")}
    place = slurm.place(step(**arbitrary))
    assert (place.master_address, place.origins["master_address"]) == ("n3", "first of SLURM_HOSTFILE")
    by_hand = slurm.place(step(**arbitrary, MASTER_ADDR="10.0.0.9", MASTER_PORT="4000"))
    assert (by_hand.master_address, by_hand.master_port) == ("10.0.0.9", 4000)
    assert by_hand.origins["master_address"] == "MASTER_ADDR"
    (tmp_path / "hosts").unlink()
    with pytest.raises(UserError, match="SLURM_HOSTFILE") as caught:
        slurm.place(step(**arbitrary))
    assert "set MASTER_ADDR" in caught.value.hints[0]
    assert slurm.place(step(**{**arbitrary, "SLURM_DISTRIBUTION": "block"})).master_address == "n1"


@pytest.mark.parametrize(
    ("more", "device"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
    ],
)
def test_a_task_with_its_own_devices_takes_its_first(more, device):
    assert slurm.place(step(**more)).device_index == device


@pytest.mark.parametrize(
    ("environment", "name", "place"),
    [(OPENMPI, "OpenMPI", (1, 2, 1, 2)), (MPICH, "MPICH", (0, 4, 0, 4)),
     ({**MVAPICH, "MASTER_ADDR": "10.0.0.1"}, "MVAPICH", (2, 4, 0, 2)),
     (step(PMI_RANK="3", PMI_SIZE="4"), "Slurm", (3, 4, 1, 2))],
)  # fmt: skip
def test_every_mpi_has_its_variables(environment, name, place):
    found, _ = member(environment)
    assert found.started_by == name
    assert (found.rank, found.size, found.local_rank, found.local_size) == place
    address = {"MVAPICH": "10.0.0.1", "Slurm": "n1"}.get(name, "127.0.0.1")
    assert found.init.startswith(f"tcp://{address}:")
    if name == "OpenMPI":  # two jobs on one machine meet at different ports
        assert member({**environment, "PMIX_NAMESPACE": "1009909761"})[0].init != found.init


@pytest.mark.parametrize(
    ("environment", "processes"),
    [({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, 0), (ONE_TASK, 0), (step(0, (1,)), 2), (BATCH, 3), (INTERACTIVE, 3)],
)
def test_what_is_no_launcher_leaves_this_machine_alone(environment, processes):
    found = this_process.decide_launch(ClusterOptions(processes=processes), environment)
    assert (found.process_info, found.processes) == (None, processes)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        *((step(**wrong), "S(LURM|lurm)") for wrong in (
            {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, {"SLURM_LOCALID": "2"}, {"SLURM_LOCALID": ""}, {"SLURM_NODEID": "7"},
            {"SLURM_PROCID": "x"}, {"SLURM_STEP_NODELIST": "n[1", "SLURM_JOB_NODELIST": ""})),
        *((batch, "4 tasks, but only one runs without srun") for batch in (BATCH, INTERACTIVE)),
        (MVAPICH, "without the address of rank 0"),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"}, "without the address of rank 0"),
        *(({name: value for name, value in WORKER.items() if name not in missing}, ", ".join(missing))
          for missing in (["RANK"], ["WORLD_SIZE"], ["MASTER_ADDR"], ["MASTER_ADDR", "MASTER_PORT"])),
        ({**WORKER, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, r"several machines, but 127\.0\.0\.1"),
        (step(MASTER_ADDR="localhost"), "several machines, but localhost"),
    ],
)  # fmt: skip
def test_variables_that_say_no_place_are_refused(environment, said):
    with pytest.raises(UserError, match=said):
        this_process.decide_launch(ClusterOptions(), environment)


FLAGS = {"init": "tcp://10.0.0.1:5", "rank": 0, "world_size": 2}


@pytest.mark.parametrize(
    ("environment", "options", "place", "init", "overridden"),
    [
        ({**step(0, (1, 1)), **OPENMPI}, {}, (1, 2), "tcp://127.0.0.1:", ["SLURM_PROCID 0"]),
        ({**step(), **WORKER}, {"processes": 2}, (1, 3), "env://", ["SLURM_PROCID 3", "-n 2"]),
        ({**step(), **WORKER}, FLAGS, (0, 2), "tcp://10.0.0.1:5", ["SLURM_PROCID 3", "RANK 1"]),
    ],
    ids=["mpirun in a batch job", "a worker's variables", "flags"],
)
def test_the_innermost_launcher_counts_and_the_others_are_named(environment, options, place, init, overridden):
    found, origins = member(environment, **options)
    assert (found.rank, found.size) == place
    assert found.init.startswith(init)
    assert all(words in origins["overridden"] for words in overridden)


def test_a_name_that_means_loopback_here_becomes_an_address_or_is_refused():
    """As far as this machine's own name does; every name that doesn't stays as it is."""
    outer = [address for address in reachable_addresses() if ":" not in address] or reachable_addresses()
    if not {entry[4][0] for entry in socket.getaddrinfo(HERE, 1)} <= {"127.0.0.1", "127.0.1.1", "::1"}:
        assert this_process.reachable_address(HERE) == HERE
    elif len(outer) == 1:
        assert this_process.reachable_address(HERE) == outer[0]
    else:
        with pytest.raises(UserError, match="/etc/hosts"):
            this_process.reachable_address(HERE)
    assert this_process.reachable_address("192.0.2.77") == "192.0.2.77"


def test_this_machine_finds_itself():
    assert this_process.is_local_name(HERE, local_addresses())
    assert this_process.is_local_name("127.0.0.1", local_addresses())
    others = (Machine("192.0.2.77", 2), Machine(f"user@{HERE}", 4))
    assert this_process.find_machine(Cluster(others)) == 1
    assert this_process.find_machine(Cluster(others, machine=0)) == 0
    with pytest.raises(UserError, match="not in the list of machines"):
        this_process.find_machine(Cluster(others[:1]))
    with pytest.raises(UserError, match="2 times"):
        this_process.find_machine(Cluster((Machine(HERE), Machine("127.0.0.1"))))


def test_a_described_machine_meets_the_others():
    cluster = Cluster((Machine("192.0.2.77", 2), Machine(HERE, 3, (4, 5, 6))), master_port=2222)
    found = this_process.decide_from_cluster(cluster, "--cluster x", ClusterOptions(processes=9), {})
    rendezvous, origins = found.rendezvous, found.origins
    assert rendezvous == Rendezvous((2, 3), 1, "192.0.2.77", 2222, (4, 5, 6))
    assert origins["overridden"] == "-n 9"
    unsized = Cluster((Machine("192.0.2.77"), Machine(HERE)))
    rendezvous = this_process.decide_from_cluster(
        unsized, "x", ClusterOptions(processes=2), {"MASTER_PORT": "77"}
    ).rendezvous
    assert (rendezvous.sizes, rendezvous.port) == ((2, 2), 77)
    assert this_process.decide_from_cluster(unsized, "x", ClusterOptions(), {}).rendezvous.port == 29500


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
TORCHRUN = {**WORKER, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}


def place_by_flags(monkeypatch, environment, flags, file=None):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return launch_decision(load_job(flags, file=file, environment={}).job)


@pytest.mark.parametrize(
    ("environment", "flags", "said"),
    [
        (ALONE, {"cluster.processes": 2}, "-n 2 contradicts RANK, WORLD_SIZE, LOCAL_RANK"),
        (TORCHRUN, {"cluster.processes": 2}, "rank 1 of 3, and this machine has 3 process(es)"),
        (step(1, (1, 1)), {"cluster.processes": 2}, "-n 2 contradicts SLURM_PROCID"),
        ({**ALONE, "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.7"}, {"cluster.processes": 4}, "rank 0 of 2"),
        ({**WORKER, "MASTER_ADDR": "192.0.2.7"}, {"cluster.processes": 3}, "rank 1 of 3"),
        (ALONE, {"cluster.file": "hosts.txt"}, "--cluster contradicts RANK"),
        (ALONE, {"cluster.hosts": ["n1", "n2"]}, "--hosts contradicts RANK"),
        (ALONE, {"cluster.rank_table": "table.json"}, "--rank-table contradicts RANK"),
    ],
)  # fmt: skip
def test_a_flag_that_a_launchers_variables_contradict_is_refused(environment, flags, said, monkeypatch):
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        place_by_flags(monkeypatch, environment, flags)
    assert f"unset {next(name for name in environment if name.endswith(('RANK', 'PROCID')))}" in caught.value.hints[1]


@pytest.mark.parametrize(
    ("environment", "processes"),
    [(ALONE, 1), (TORCHRUN, 3), (step(), 2), (OPENMPI, 2), ({**ALONE, "WORLD_SIZE": "2"}, 2), (TORCHRUN, None)],
)
def test_a_number_that_agrees_with_the_launchers_is_followed(environment, processes, monkeypatch):
    environment = {**environment, "MASTER_ADDR": "192.0.2.7"}
    assert place_by_flags(monkeypatch, environment, {"cluster.processes": processes}).process_info


def test_a_files_number_gives_way_to_the_launchers_and_no_flag_does(monkeypatch, tmp_path):
    """A job.toml is started by several launchers in turn."""
    (tmp_path / "hosts").write_text(f"192.0.2.77 slots=3\n{HERE} slots=3\n")
    flags = {"cluster.file": str(tmp_path / "hosts"), "cluster.processes": 2}
    with pytest.raises(UserError, match=r"-n 2 contradicts --cluster .*hosts: 3 on this machine"):
        place_by_flags(monkeypatch, {}, flags)
    (tmp_path / "job.toml").write_text("[cluster]\nprocesses = 2\n")
    assert place_by_flags(monkeypatch, TORCHRUN, {}, tmp_path / "job.toml").process_info.size == 3
