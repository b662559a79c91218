"""What explain says is what train would do, with where each value is from."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.cluster.hosts.this_process import decide_launch
from manyhands.config.load import load_job
from manyhands.run.explain import explain_values
from manyhands.run.train import launch_decision
from tests.e2e.command import done, inside, refused

WORKER = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


def reported(environment=None, file=None, **flags):
    flags = {key.replace("__", "."): value for key, value in flags.items()}
    return {row.key: row for row in explain_values(load_job(flags, file=file, environment={}), environment or {})}


@given(st.integers(1, 50).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))))
def test_it_says_the_place_that_train_takes_and_what_is_ignored(shape):
    size, rank = shape
    variables = {**WORKER, "RANK": str(rank), "WORLD_SIZE": str(size)}
    rows = reported(variables, cluster__processes=4)
    process_info = decide_launch(load_job({}, environment={}).job.cluster, variables).process_info
    assert (rows["rank"].value, rows["world_size"].value) == (process_info.rank, process_info.size) == (rank, size)
    assert (rows["rank"].origin, rows["master_port"].value) == ("RANK", 29400)
    assert "-n 4" in rows["not_followed"].value


def test_a_place_has_its_own_device():
    rows = reported({**WORKER, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}, cluster__device="cuda")
    assert rows["device"].value == "cuda:1"
    assert "auto" not in str(rows["backend"].value)


def test_flags_files_and_defaults_are_distinguished(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("[cluster]\nprocesses = 3\n")
    assert reported(file=file)["processes"].origin == str(file)
    assert reported(file=file, cluster__processes=2)["processes"].origin == "-n"
    assert reported()["processes"].origin == "default"
    assert reported(cluster__device="cpu")["device"].origin == "--device"


def test_unequal_shares_are_shown():
    by_hand = reported(cluster__processes=2, cluster__shares=[24, 8])["shares"]
    assert (by_hand.value, by_hand.text, by_hand.origin) == ([24, 8], "24, 8 samples per update", "flag")
    assert "measured" in reported(cluster__shares="auto")["shares"].text
    assert "shares" not in reported(cluster__shares="equal")


def test_the_command_prints_a_table_or_json():
    line = "explain --init file:///tmp/x --world-size 2 --rank 0"
    assert "world size" in done(line, by=inside).out
    assert json.loads(done(line, "--json", by=inside).out)["rank"] == {"value": 0, "from": "--rank"}


HOSTS = "n1 slots=8\nann@n2 slots=8 port=2222\n"


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(HOSTS)
    return tmp_path


def test_machines_are_written_as_a_rank_table_and_as_a_hostfile(hosts):
    notes = [f"note: {left_out}" for left_out in ("user names", "ssh ports", "device_ip")]
    assert not done("explain --cluster hosts --write table.json", by=inside, says=[*notes, "wrote table.json"]).out
    assert done("explain --rank-table table.json --write again", by=inside).err == "manyhands: wrote again\n"
    assert (hosts / "again").read_text() == "n1 slots=8\nn2 slots=8\n"
    done("explain --write named --set", ['cluster.hosts=["n1:8","ssh://ann@n2:2222 slots=8"]'], by=inside)
    assert (hosts / "named").read_text() == HOSTS


def test_machines_of_the_environment_are_written(hosts, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    done("explain --write slurm", by=inside)
    assert (hosts / "slurm").read_text() == "n1 slots=4\nn2 slots=4\n"
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_MASTER_ADDR", "job-0")
    done("explain --write kubeflow", by=inside, code=2, says="does not give the names of machines 1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--cluster hosts --write hosts", "hosts already exists"),
        ("--cluster nowhere --write new", "nowhere can't be read"),
        ("--cluster hosts --write no/such/folder", "can't be written"),
        ("--cluster empty --write new", "the cluster file is empty"),
        ("--cluster unsized --write new.json", "the number of devices of n1 is unknown"),
        ("--cluster odd --write new.json", "where: hostfile odd\n"),
        ("--write new", "no machines are given"),
    ],
)
def test_what_cannot_be_written_is_one_screen(arguments, said, hosts):
    (hosts / "empty").write_text("")
    (hosts / "unsized").write_text("n1\nn2:4\n")
    (hosts / "odd").write_text("n9:2\nn10:2\n")
    assert "Traceback" not in refused("explain", arguments, says=said)
    assert (hosts / "hosts").read_text() == HOSTS


def test_what_the_clusters_file_asks_of_the_job_is_followed_by_option_alone(tmp_path, capsys):
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\n")
    flags = {"cluster.file": str(file), "parallel.mode": "fsdp"}
    assert launch_decision(load_job(flags, environment={}).job).processes == 2
    assert capsys.readouterr().err == (
        f"manyhands: {file}: mixed_precision: bf16 is ignored; to apply this setting, add --train.precision bf16\n"
    )
    launch_decision(load_job({**flags, "train.precision": "bf16"}, environment={}).job)
    assert not capsys.readouterr().err
    file.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\n")
    launch_decision(load_job(flags, environment={}).job)
    assert "distributed_type: DEEPSPEED is not supported and is ignored" in capsys.readouterr().err
