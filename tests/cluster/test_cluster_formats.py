"""What is written is read again, apart from what the notes name; what users write is understood."""

import contextlib
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.agents.ssh import scp_command
from manyhands.cluster.hosts.formats import accelerate, hostfile, kubernetes, rank_table, slurm
from manyhands.cluster.hosts.formats.slurm import expand_counts, expand_hosts
from manyhands.cluster.hosts.inventory import Cluster, Machine
from manyhands.cluster.hosts.this_process import FORMATS, format_of, read_cluster, readable_formats
from manyhands.core.choices import load_choice, module_names
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
    found = module.read(text, "")
    said = "; ".join(notes)
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
@given(st.dictionaries(HOSTS, st.integers(1, 16), min_size=1, max_size=5))
def test_rank_tables_hold_machines_in_the_text_order_of_their_names(slots):
    cluster = Cluster(tuple(Machine(host, slots[host]) for host in sorted(slots)))
    assert rank_table.read(rank_table.write(cluster)[0], "") == cluster


@PROPERTY
@given(st.lists(machines(), min_size=1, max_size=9, unique_by=lambda machine: machine.name))
def test_hostfiles_hold_any_machines_without_numbers_of_devices(listed):
    cluster = Cluster(tuple(replace(machine, devices=()) for machine in listed))
    assert hostfile.read(hostfile.write(cluster)[0], "") == cluster
    assert hostfile.read_list(",".join(map(_in_a_list, cluster.machines)), "--hosts") == cluster


def _in_a_list(machine):
    if machine.port:
        return machine.target + (f" slots={machine.slots}" if machine.slots else "")
    user, at, name = machine.host.rpartition("@")
    shown = f"[{name}]" if ":" in name else name
    return f"{user}{at}{shown}" + (f":{machine.slots}" if machine.slots else "")


@PROPERTY
@given(st.text(max_size=200) | st.text(alphabet='{}[]",: 10abserver_list', max_size=40))
def test_no_text_is_a_surprise(text):
    """Any text is either read or refused in words, by every format."""
    for name in module_names(FORMATS):
        module = load_choice(FORMATS, name)
        if hasattr(module, "recognize"):
            assert module.recognize("file", text) in (True, False)
        if hasattr(module, "read"):
            try:
                assert module.read(text, "file").machines
            except UserError:
                continue


class TestHostfiles:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("# x\nn1 slots=4 max_slots=8\n\nu@n2 slots=2  # y\nn1 slots=2\n", [("n1", 6), ("u@n2", 2)]),
            ("n1:4\n[fd00::7]:2\n", [("n1", 4), ("fd00::7", 2)]),
            ("n1\nn2\nn2\n", [("n1", 0), ("n2", 2)]),
        ],
    )
    def test_machines_of_openmpi_of_horovod_and_of_unknown_size(self, text, found):
        assert hostfile.read(text, "hosts").machines == tuple(Machine(*one) for one in found)

    @pytest.mark.parametrize(
        ("line", "said"),
        [
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
            ("n2:222", "n2:222 is ambiguous: 222 may be an ssh port or a number of processes"),
            ("n2 port=0", "from 1 to 65535"),
            ("ssh://n2:31234 port=2222", "port is given twice"),
            ("ssh://ann:secret@n2", "without a password"),
        ],
    )
    def test_mistakes_have_their_line(self, line, said):
        with pytest.raises(UserError) as caught:
            hostfile.read(f"n1 slots=4\n# more\n{line}\n", "hosts")
        assert said in str(caught.value)
        assert "secret" not in str(caught.value)
        assert caught.value.where == "hosts, line 3"

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
    def test_ssh_on_a_port_of_its_own(self, text, found):
        assert hostfile.read(f"{text}\n", "hosts").machines == (found,)
        assert hostfile.read_list(f"n9,{text}", "--hosts").machines == (Machine("n9"), found)
        assert hostfile.recognize("any", f"{text}\n") == any(word in text for word in ("slots=", "port=", "//"))

    @pytest.mark.parametrize("number", ["22", "222", "2222", "31234"])
    def test_a_number_that_may_be_a_port_is_asked_about(self, number):
        with pytest.raises(UserError) as caught:
            hostfile.read_list(f"root@ssh5.example:{number}", "cluster.hosts")
        assert f"root@ssh5.example:{number} is ambiguous" in caught.value.message
        assert f"for an ssh port, write ssh://root@ssh5.example:{number}" in caught.value.hints
        if int(number) < 1024:
            assert f'for a number of processes, write "root@ssh5.example slots={number}"' in caught.value.hints

    def test_machines_behind_one_address_are_distinguished_by_their_ports(self):
        found = hostfile.read_list("ssh://root@ssh5:31234,ssh://root@ssh5:31235", "--hosts").machines
        assert [machine.name for machine in found] == ["ssh5:31234", "ssh5:31235"]
        with pytest.raises(UserError, match="ssh5:31234 is listed twice"):
            hostfile.read_list("ssh://root@ssh5:31234,ssh://ann@ssh5:31234", "--hosts")

    @pytest.mark.parametrize("text", ["n1,,n2", "n1,n1:2", "fd00::1:4", "n1:x", "", "-n1"])
    def test_lists_are_strict(self, text):
        with pytest.raises(UserError) as caught:
            hostfile.read_list(text, "--hosts")
        assert caught.value.where == "--hosts"


KUBEFLOW = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0"}


class TestKubeflow:
    """PET_*, in place of torchrun's flags."""

    @pytest.mark.parametrize(
        ("more", "slots", "port"),
        [
            ({"PET_MASTER_PORT": "23456"}, 0, 23456),
            ({"PET_NPROC_PER_NODE": ""}, 1, 0),
            ({"PET_NPROC_PER_NODE": "gpu", "PET_NNODES": "3:3"}, 0, 0),
            ({"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": "job-0", "PET_RDZV_BACKEND": "c10d"}, 0, 29400),
            ({"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": "job-0:77", "PET_MASTER_PORT": "5"}, 0, 77),
            ({"PET_NPROC_PER_NODE": "4", "PET_RDZV_ENDPOINT": "elsewhere:1"}, 4, 0),
        ],
    )
    def test_each_machine_knows_its_place(self, more, slots, port):
        listed = (Machine("job-0", slots), Machine("", slots), Machine("", slots))
        assert kubernetes.from_environment({**KUBEFLOW, **more}) == Cluster(listed, master_port=port, machine=2)

    def test_one_machine_needs_no_address(self):
        assert kubernetes.from_environment({"PET_NNODES": "1"}) == Cluster((Machine("localhost", 1),))
        assert kubernetes.from_environment({"RANK": "0"}) is None

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
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
    )
    def test_mistakes_name_their_variable(self, wrong, said):
        with pytest.raises(UserError) as caught:
            kubernetes.from_environment({**KUBEFLOW, **wrong})
        assert said in str(caught.value)
        assert "PET_" in str(caught.value)


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


class TestAccelerate:
    def test_the_keys_are_accelerates_own(self):
        config_args = pytest.importorskip("accelerate.commands.config.config_args")
        fields = set(config_args.ClusterConfig.__dataclass_fields__)
        assert accelerate._KEYS - {"fp16", "dynamo_backend"} == fields

    def test_processes_are_counted_over_all_machines(self):
        found = accelerate.read(TWO_MACHINES, "a.yaml")
        wanted = (Machine("10.0.0.1", 4), Machine("", 4, (4, 5, 6, 7)))
        assert found == Cluster(wanted, master_port=29501, machine=1)

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
    def test_what_the_file_asks_of_the_job_is_read(self, text, requests):
        assert list(accelerate.read(text, "").requests) == requests

    def test_a_file_without_machines_is_this_machine(self):
        found = accelerate.read("distributed_type: no\nuse_cpu: true\n", "")
        assert found.machines == (Machine("localhost", 1),)

    @pytest.mark.parametrize(
        ("old", "new", "line", "said"),
        [
            ("num_processes: 8", "num_processes: 7", 4, "not a multiple of num_machines"),
            ("num_processes: 8", "num_proceses: 8", 4, 'did you mean "num_processes"?'),
            ("machine_rank: 1", "machine_rank: 2", 5, "from 0 to 1"),
            ("main_process_ip: 10.0.0.1", "main_process_ip: null", 6, "main_process_ip"),
            ("main_process_ip: 10.0.0.1", "main_process_ip: 0", 6, "expected the first machine's name or address"),
            ("gpu_ids: 4,5,6,7", "gpu_ids: 4,5", 8, "2 numbers for 4 processes"),
            ("gpu_ids: 4,5,6,7", "gpu_ids: some", 8, "expected all, or numbers"),
            ("MULTI_GPU", "MULTI_GPUS", 2, 'did you mean "MULTI_GPU"?'),
            ("LOCAL_MACHINE", "AMAZON_SAGEMAKER", 1, "only LOCAL_MACHINE"),
            ("main_training_function: main", "num_machines: 3", 10, "given twice"),
            ("num_machines: 2", "num_machines: 2: 3", 3, "not valid YAML"),
        ],
    )
    def test_mistakes_have_their_line(self, old, new, line, said):
        with pytest.raises(UserError) as caught:
            accelerate.read(TWO_MACHINES.replace(old, new), "a.yaml")
        assert said in str(caught.value)
        assert caught.value.where == f"a.yaml, line {line}"

    @pytest.mark.parametrize("address", ["-oProxyCommand=x", "a b", "29500", "n1;x", "http://n1"])
    def test_the_first_machine_has_a_name_or_an_address(self, address):
        text = f"distributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: 2\nmain_process_ip: '{address}'\n"
        with pytest.raises(UserError, match="expected the first machine's name or address"):
            accelerate.read(text, "file")


class TestSlurm:
    @pytest.mark.parametrize(
        ("environment", "machines"),
        [
            ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}, [("n1", 4), ("n2", 4)]),
            ({"SLURM_JOB_NODELIST": "n1,m[07-08]", "SLURM_TASKS_PER_NODE": "1,2(x2)"},
             [("n1", 1), ("m07", 2), ("m08", 2)]),
            ({"SLURM_JOB_NODELIST": "n[1-9]", "SLURM_TASKS_PER_NODE": "4(x9)",
              "SLURM_STEP_NODELIST": "n3", "SLURM_STEP_TASKS_PER_NODE": "2"}, [("n3", 2)]),
            ({"SLURM_NODELIST": "n1"}, [("n1", 0)]),
        ],
    )  # fmt: skip
    def test_the_nodes_of_a_job(self, environment, machines):
        assert slurm.nodes(environment).machines == tuple(Machine(*one) for one in machines)

    def test_lists_that_do_not_match_are_refused(self):
        assert slurm.nodes({}) is None
        with pytest.raises(UserError, match="lists 2 machines, but SLURM_TASKS_PER_NODE lists tasks for 1"):
            slurm.nodes({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4"})


class TestDescribe:
    def test_files_are_known_by_their_content(self, tmp_path):
        path = tmp_path / "some-file"
        texts = [module.write(Cluster((Machine("localhost", 2),)))[0] for module in WRITTEN]
        for text in (*texts, yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 2})):
            path.write_text(text)
            assert read_cluster(path).machines == (Machine("localhost", 2),)

    def test_what_fits_nothing_says_what_was_tried(self, tmp_path):
        path = tmp_path / "job.toml"
        path.write_text("[data]\nname = 'digits'\n")
        with pytest.raises(UserError) as caught:
            read_cluster(path)
        for name in readable_formats():
            assert name in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "can't be read"),
            (b"", "is empty"),
            (b"\xff\xfe\x00", "not a cluster file"),
            (b"x" * (9 << 20), "exceeds the limit of 8 MiB"),
        ],
    )
    def test_what_is_no_text_of_a_few_megabytes_is_refused(self, tmp_path, content, said):
        path = tmp_path / "hosts"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=said) as caught:
            read_cluster(path)
        assert caught.value.where == str(path)

    def test_a_small_yaml_is_not_taken_for_a_hostfile(self):
        assert format_of("x", yaml.safe_dump({"distributed_type": "NO"})) is accelerate


@pytest.mark.parametrize(
    ("machine", "command"),
    [
        (Machine("n1"), "scp -r n1:/a/run runs/x"),
        (Machine("ann@n1", port=31234), "scp -r -P 31234 ann@n1:/a/run runs/x"),
        (Machine("ann@fd00::7"), "scp -r 'ann@[fd00::7]:/a/run' runs/x"),
    ],
)
def test_the_line_that_copies_from_a_machine_can_be_typed(machine, command):
    assert scp_command(machine, "/a/run", "runs/x") == command
    assert "'" in scp_command(machine, "/a b/run", "runs/x")


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


@pytest.mark.parametrize(
    "text", ["", "a[", "a[1", "a]", "a,,b", "a[3-1]", "a[x]", "a[]", "a[1-]", "a b", "a[0-9999999]"]
)
def test_broken_lists_are_refused(text):
    with pytest.raises(UserError, match="SLURM_NODELIST"):
        expand_hosts(text, "SLURM_NODELIST")


@pytest.mark.skipif(not shutil.which("scontrol"), reason="Slurm's own scontrol is not installed")
@settings(max_examples=20)
@given(entry=_entries().filter(lambda entry: entry[0][-1] == "]" or "[" not in entry[0]))
def test_scontrol_agrees(entry, tmp_path):
    text, hosts = entry
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    variables = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    command = ["scontrol", "show", "hostnames", text]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    assert sorted(told.stdout.split()) == sorted(hosts)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1))
def test_counts_are_repeated(pairs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in pairs)
    assert expand_counts(text, "SLURM_TASKS_PER_NODE") == [count for count, times in pairs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "2(x", "2x3", "-1", "2(x3),", "a", "2(x9999999)"])
def test_broken_counts_are_refused(text):
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE"):
        expand_counts(text, "SLURM_TASKS_PER_NODE")
