"""What is written is read again, apart from what the notes name; what users write is understood."""

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.hosts.formats import accelerate, hostfile, kubernetes, rank_table, slurm
from manyhands.cluster.hosts.formats.slurm import expand_counts, expand_hosts
from manyhands.cluster.hosts.inventory import Cluster, Machine
from manyhands.cluster.hosts.this_process import format_of, read_cluster
from manyhands.core.errors import UserError

PROPERTY = settings(max_examples=60, deadline=None)
WRITTEN = [rank_table, hostfile]

HOSTS = st.one_of(
    st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z0-9]{1,3})?(\.[a-z]{2,4})?", fullmatch=True).filter(
        # What documents print in place of a name is refused.
        lambda n: not re.search(r"(^|[.-])x{2,}([.-]|$)|^[\dx.]*x[\dx.]*$", n)
    ),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
USERS = st.sampled_from(["", "", "", "ann@", "j.doe-2@"])


@st.composite
def machines(draw, hosts=None):
    host = draw(hosts or st.builds("{}{}".format, USERS, HOSTS))
    slots = draw(st.integers(0, 9))
    port = draw(st.sampled_from([0, 0, 0, 22, 31234]))
    cards = st.lists(st.integers(0, 15), min_size=slots, max_size=slots, unique=True).map(tuple)
    return Machine(host, slots, draw(st.one_of(st.just(()), cards)) if slots else (), port)


@st.composite
def clusters(draw):
    """Any cluster, whether a format can hold it or not."""
    listed = draw(st.lists(machines(), min_size=1, max_size=5, unique_by=lambda machine: machine.address))
    port = draw(st.one_of(st.just(0), st.integers(1, 65535)))
    machine = draw(st.one_of(st.none(), st.integers(0, len(listed) - 1)))
    return Cluster(tuple(listed), port, machine)


@pytest.mark.parametrize("module", WRITTEN, ids=lambda module: module.__name__.rpartition(".")[2])
@PROPERTY
@given(cluster=clusters())
def test_what_is_written_is_read_apart_from_what_the_notes_name(module, cluster):
    try:
        text, notes = module.write(cluster)
    except UserError:
        assert module is rank_table
        return
    found, said = module.read(text, ""), "; ".join(notes)
    assert [each.slots for each in found.machines] == [each.slots for each in cluster.machines]
    for here, there in zip(found.machines, cluster.machines, strict=True):
        assert here.address == there.address
        assert here.host == there.host or "user names" in said
        assert here.port == there.port or "ssh ports" in said
        usual = there.devices == tuple(range(there.slots))
        assert here.devices == (() if usual else there.devices) or "device numbers" in said
    assert not cluster.master_port or "master" in said
    # Names alone, without slots, are a hostfile by the file's name only.
    assert format_of(f"{module.__name__.rpartition('.')[2]}.txt", text) is module


@PROPERTY
@given(st.lists(machines(), min_size=1, max_size=9, unique_by=lambda machine: machine.name))
def test_hostfiles_and_lists_hold_any_machines_without_numbers_of_devices(listed):
    cluster = Cluster(tuple(replace(machine, devices=()) for machine in listed))
    assert hostfile.read(hostfile.write(cluster)[0], "") == cluster
    assert hostfile.read_list(",".join(map(_in_a_list, cluster.machines)), "--hosts") == cluster


def _in_a_list(machine):
    if machine.port:
        return machine.target + (f" slots={machine.slots}" if machine.slots else "")
    user, at, name = machine.host.rpartition("@")
    shown = f"[{name}]" if ":" in name else name
    return f"{user}{at}{shown}" + (f":{machine.slots}" if machine.slots else "")


KUBEFLOW = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0"}
TWO_MACHINES = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 2
num_processes: 8
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
gpu_ids: 4,5,6,7
mixed_precision: bf16
main_training_function: main
tpu_env: []
downcast_bf16: 'no'
"""


def kubeflow(more):
    return kubernetes.from_environment({**KUBEFLOW, **more})


def pods(slots, port=0):
    return Cluster((Machine("job-0", slots), Machine("", slots), Machine("", slots)), master_port=port, machine=2)


@pytest.mark.parametrize(
    ("read", "given", "found"),
    [
        (hostfile.read, "# x\nn1 slots=4 max_slots=8\n\nu@n2 slots=2  # y\nn1 slots=2\n", [("n1", 6), ("u@n2", 2)]),
        (hostfile.read, "n1:4\n[fd00::7]:2\n", [("n1", 4), ("fd00::7", 2)]),
        (hostfile.read, "n1\nn2\nn2\n", [("n1", 0), ("n2", 2)]),
        (kubeflow, {"PET_MASTER_PORT": "23456"}, pods(0, 23456)),
        (kubeflow, {"PET_NPROC_PER_NODE": ""}, pods(1)),
        (kubeflow, {"PET_NPROC_PER_NODE": "gpu", "PET_NNODES": "3:3"}, pods(0)),
        (kubeflow, {"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": "job-0", "PET_RDZV_BACKEND": "c10d"}, pods(0, 29400)),
        (kubeflow, {"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": "job-0:77", "PET_MASTER_PORT": "5"}, pods(0, 77)),
        (kubeflow, {"PET_NPROC_PER_NODE": "4", "PET_RDZV_ENDPOINT": "elsewhere:1"}, pods(4)),
        (kubernetes.from_environment, {"PET_NNODES": "1"}, [("localhost", 1)]),
        (kubernetes.from_environment, {"RANK": "0"}, None),
        (accelerate.read, TWO_MACHINES,  # whose processes are counted over all machines
         Cluster((Machine("10.0.0.1", 4), Machine("", 4, (4, 5, 6, 7))), master_port=29501, machine=1)),
        (accelerate.read, "distributed_type: no\nuse_cpu: true\n", [("localhost", 1)]),
        (slurm.nodes, {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}, [("n1", 4), ("n2", 4)]),
        (slurm.nodes, {"SLURM_JOB_NODELIST": "n1,m[07-08]", "SLURM_TASKS_PER_NODE": "1,2(x2)"},
         [("n1", 1), ("m07", 2), ("m08", 2)]),
        (slurm.nodes, {"SLURM_JOB_NODELIST": "n[1-9]", "SLURM_TASKS_PER_NODE": "4(x9)",
                       "SLURM_STEP_NODELIST": "n3", "SLURM_STEP_TASKS_PER_NODE": "2"}, [("n3", 2)]),
        (slurm.nodes, {"SLURM_NODELIST": "n1"}, [("n1", 0)]),
        (slurm.nodes, {}, None),
    ],
)  # fmt: skip
def test_what_users_and_launchers_write_is_understood(read, given, found):
    wanted = Cluster(tuple(Machine(*one) for one in found)) if isinstance(found, list) else found
    assert (read(given, "") if isinstance(given, str) else read(given)) == wanted


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ssh://root@ssh5.example:31234", Machine("root@ssh5.example", port=31234)),
        ("ssh://n1:22/", Machine("n1", port=22)),
        ("ssh://box", Machine("box")),
        ("ssh://[fd00::7]:2222 slots=3", Machine("fd00::7", 3, port=2222)),
        ("n1 slots=222", Machine("n1", 222)),
        ("root@n1 port=31234", Machine("root@n1", port=31234)),
    ],
)
def test_ssh_on_a_port_of_its_own(text, found):
    assert hostfile.read(f"{text}\n", "hosts").machines == (found,)
    assert hostfile.read_list(f"n9,{text}", "--hosts").machines == (Machine("n9"), found)
    assert hostfile.recognize("any", f"{text}\n") == any(word in text for word in ("slots=", "port=", "//"))


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (TWO_MACHINES, [("mixed_precision: bf16", "train.precision", "bf16")]),
        (
            "distributed_type: MULTI_CPU\nmixed_precision: no\nnum_processes: 2\n",
            [("mixed_precision: no", "train.precision", "fp32"), ("use_cpu: true", "cluster.device", "cpu")],
        ),
        ("distributed_type: no\nuse_cpu: true\n", [("use_cpu: true", "cluster.device", "cpu")]),
        ("distributed_type: FSDP\n", [("distributed_type: FSDP", "parallel.mode", "fsdp")]),
        ("distributed_type: DEEPSPEED\n", [("distributed_type: DEEPSPEED", "", "")]),
        ("distributed_type: NO\nmixed_precision: fp8\n", [("mixed_precision: fp8", "", "")]),
    ],
)
def test_what_accelerates_file_asks_of_the_job_is_read(text, requests):
    assert list(accelerate.read(text, "").requests) == requests


def test_the_keys_are_accelerates_own():
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    fields = set(config_args.ClusterConfig.__dataclass_fields__)
    assert accelerate._KEYS - {"fp16", "dynamo_backend"} == fields


def third_line(line):
    return partial(hostfile.read, f"n1 slots=4\n# more\n{line}\n", "hosts"), "hosts, line 3"


def in_hosts(text):
    return partial(hostfile.read_list, text, "--hosts"), "--hosts"


def pet(wrong):
    return partial(kubeflow, wrong), "environment, PET_*"


def in_yaml(changed):
    old, new = changed
    text = TWO_MACHINES.replace(old, new)
    return partial(accelerate.read, text, "a.yaml"), f"a.yaml, line {text[: text.index(new)].count(chr(10)) + 1}"


def nodes(text):
    return partial(expand_hosts, text, "SLURM_NODELIST"), "SLURM_NODELIST"


def counts(text):
    return partial(expand_counts, text, "SLURM_TASKS_PER_NODE"), "SLURM_TASKS_PER_NODE"


REFUSED = {
    third_line: [
        ("n2 slot=4", 'did you mean "slots"?'),
        ("n2 4", "write slots=4"),
        ("n2 slots = 4", "without spaces"),
        ("n2 slots=0", "from 1 to 1024"),
        ("n2 slots=4 max_slots=2", "less than slots"),
        ("n2:4 slots=4", "given twice"),
        ("10.*.*.* slots=4", "is not a host"),
        ("-oProxyCommand=x slots=4", "is not a host"),
        ("ann@n1 slots=4", "two users"),
        ("[fd00::zz]:4", "not an IPv6 address"),
        ("[fe80::1%;touch]:4", "not an IPv6 address"),
        ("n2:222", "n2:222 is ambiguous"),
        ("n2 port=0", "from 1 to 65535"),
        ("ssh://n2:31234 port=2222", "port is given twice"),
        ("ssh://ann:secret@n2", "without a password"),
    ],
    in_hosts: [
        *((text, "") for text in ("n1,,n2", "n1,n1:2", "fd00::1:4", "n1:x", "", "-n1")),
        ("ssh://root@ssh5:31234,ssh://ann@ssh5:31234", "ssh5:31234 is listed twice"),
        ("root@n1:22", 'for a number of processes, write "root@n1 slots=22"'),
        ("root@n1:31234", "for an ssh port, write ssh://root@n1:31234"),
    ],
    pet: [
        ({"PET_NNODES": "1:4"}, "a variable number of machines"),
        ({"PET_NNODES": "many"}, 'PET_NNODES is "many"; expected a number from 1'),
        ({"PET_NODE_RANK": "3"}, 'PET_NODE_RANK is "3"; expected a number from 0 to 2'),
        ({"PET_NPROC_PER_NODE": "cpu"}, "expected a number or"),
        ({"PET_NPROC_PER_NODE": "0"}, "from 1 to 1024"),
        ({"PET_MASTER_ADDR": ""}, "set PET_MASTER_ADDR"),
        ({"PET_MASTER_PORT": "99999"}, "from 0 to 65535"),
        ({"PET_RDZV_BACKEND": "etcd-v2"}, "only static and c10d"),
        ({"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": "a:b:c"}, "expected host:port"),
        ({"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": "a:99999"}, "from 0 to 65535"),
    ],
    in_yaml: [
        (("num_processes: 8", "num_processes: 7"), "not a multiple of num_machines"),
        (("num_processes: 8", "num_proceses: 8"), 'did you mean "num_processes"?'),
        (("machine_rank: 1", "machine_rank: 2"), "from 0 to 1"),
        (("main_process_ip: 10.0.0.1", "main_process_ip: null"), "main_process_ip"),
        (("gpu_ids: 4,5,6,7", "gpu_ids: 4,5\n"), "2 numbers for 4 processes"),
        (("gpu_ids: 4,5,6,7", "gpu_ids: some"), "expected all, or numbers"),
        (("MULTI_GPU", "MULTI_GPUS"), 'did you mean "MULTI_GPU"?'),
        (("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "only LOCAL_MACHINE"),
        (("main_training_function: main", "num_machines: 3"), "given twice"),
        (("num_machines: 2", "num_machines: 2: 3"), "not valid YAML"),
        *(
            (("main_process_ip: 10.0.0.1", f"main_process_ip: {address}"), "expected the first machine's name or addr")
            for address in ("0", "-oProxyCommand=x", "a b", "29500", "n1;x", "http://n1")
        ),
    ],
    nodes: [
        (text, "") for text in ("", "a[", "a[1", "a]", "a,,b", "a[3-1]", "a[x]", "a[]", "a[1-]", "a b", "a[0-9999999]")
    ],
    counts: [(text, "") for text in ("", "2(x", "2x3", "-1", "2(x3),", "a", "2(x9999999)")],
    lambda given: (partial(slurm.nodes, given), ""): [
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4"}, "lists tasks for 1"),
    ],
}


@pytest.mark.parametrize(
    ("reader", "given", "said"), [(reader, given, said) for reader, rows in REFUSED.items() for given, said in rows]
)
def test_a_mistake_is_refused_with_its_place_and_in_words(reader, given, said):
    read, where = reader(given)
    with pytest.raises(UserError) as caught:
        read()
    assert said in str(caught.value)
    assert where in str(caught.value.where) + caught.value.message
    assert "secret" not in str(caught.value)


class TestDescribe:
    def test_files_are_known_by_their_content(self, tmp_path):
        path = tmp_path / "some-file"
        texts = [module.write(Cluster((Machine("localhost", 2),)))[0] for module in WRITTEN]
        for text in (*texts, yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 2})):
            path.write_text(text)
            assert read_cluster(path).machines == (Machine("localhost", 2),)
        assert format_of("x", yaml.safe_dump({"distributed_type": "NO"})) is accelerate

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "can't be read"),
            (b"", "is empty"),
            (b"\xff\xfe\x00", "not a cluster file"),
            (b"x" * (9 << 20), "exceeds the limit of 8 MiB"),
            (b"[data]\nname = 'digits'\n", "hostfile"),  # what was tried
        ],
    )
    def test_what_is_no_cluster_file_is_refused(self, tmp_path, content, said):
        path = tmp_path / "some-file"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_cluster(path)
        assert said in str(caught.value)
        assert caught.value.where == str(path)


WORD = st.from_regex(r"[a-z][a-z.-]{0,3}", fullmatch=True)


@st.composite
def _ranges(draw):
    """A bracket as it is written, and the numbers that it means."""
    written, meant = [], []
    for _ in range(draw(st.integers(1, 3))):
        low, length = draw(st.integers(0, 120)), draw(st.integers(0, 5))
        width = draw(st.integers(1, 4))
        numbers = [str(number).zfill(width) for number in range(low, low + length + 1)]
        written.append(f"{numbers[0]}-{numbers[-1]}" if length else numbers[0])
        meant += [str(number).zfill(len(numbers[0])) for number in range(low, low + length + 1)]
    return f"[{','.join(written)}]", meant


@st.composite
def _entries(draw):
    """One entry: a word, then brackets and words, at most two brackets; and the hosts that it means."""
    text = draw(WORD)
    hosts = [text]
    for _ in range(draw(st.integers(0, 2))):
        bracket, numbers = draw(_ranges())
        word = draw(st.one_of(st.just(""), WORD))
        text += bracket + word
        hosts = [host + number + word for host in hosts for number in numbers]
    return text, hosts


@given(st.lists(_entries(), min_size=1, max_size=4))
def test_a_list_is_all_that_its_entries_mean_in_order(entries):
    text = ",".join(written for written, _ in entries)
    assert expand_hosts(text, "SLURM_NODELIST") == [host for _, hosts in entries for host in hosts]


@given(st.text("ab[]-,0123 ", max_size=12))
def test_any_text_is_a_list_or_a_users_mistake(text):
    hosts = []
    with contextlib.suppress(UserError):
        hosts = expand_hosts(text, "SLURM_NODELIST")
        assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)


@pytest.mark.skipif(not shutil.which("scontrol"), reason="Slurm's own scontrol is not installed")
@settings(max_examples=20)
@given(entry=_entries().filter(lambda entry: entry[0][-1] == "]" or "[" not in entry[0]))
def test_scontrol_agrees(entry, tmp_path):
    text, hosts = entry
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    variables = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    command = ["scontrol", "show", "hostnames", text]
    reported = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    assert sorted(reported.stdout.split()) == sorted(hosts)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1))
def test_counts_are_repeated(pairs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in pairs)
    assert expand_counts(text, "SLURM_TASKS_PER_NODE") == [count for count, times in pairs for _ in range(times)]
