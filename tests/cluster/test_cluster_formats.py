"""Every format reads what it writes; what it can't hold it refuses; and what users write is understood."""

import json
import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.cluster.agents.ssh import copied_by
from manyhands.cluster.descriptions.formats import accelerate, hostfile, launch_json, msrun, rank_table, torchrun
from manyhands.cluster.descriptions.holding import canonical
from manyhands.cluster.descriptions.inventory import Cluster, Machine
from manyhands.cluster.descriptions.recognise import FORMATS, format_named, format_of, names, read_cluster
from manyhands.cluster.descriptions.torchrun_flags import FLAGS
from manyhands.core.errors import UserError
from manyhands.core.plugins import load_choice, module_names

PROPERTY = settings(max_examples=60, deadline=None)
MODULES = [rank_table, hostfile, torchrun, msrun, accelerate, launch_json]

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
    listed = draw(st.lists(machines(), min_size=1, max_size=5, unique_by=lambda machine: machine.name))
    if draw(st.booleans()):
        listed = [listed[0], *(Machine("", machine.slots, machine.devices) for machine in listed[1:])]
    address = draw(st.one_of(st.just(""), HOSTS))
    port = draw(st.one_of(st.just(0), st.integers(1, 65535)))
    machine = draw(st.one_of(st.none(), st.integers(0, len(listed) - 1)))
    return canonical(Cluster(tuple(listed), address, port, machine))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NAMES[0])
@PROPERTY
@given(cluster=clusters())
def test_what_is_written_is_read_or_it_is_refused(module, cluster):
    try:
        text = module.write(cluster)
    except UserError:
        return
    assert module.read(text, "") == cluster
    # Names alone, without slots, are a hostfile by the file's name only.
    assert format_of(f"{module.__name__.rpartition('.')[2]}.txt", text) is module


def _plain(slots, most=5):
    """Machines in the order of their names, as rank tables want them."""
    made = st.builds(Machine, HOSTS, slots)
    return st.lists(made, min_size=1, max_size=most, unique_by=lambda machine: machine.host).map(
        lambda found: tuple(sorted(found, key=lambda machine: machine.host))
    )


@PROPERTY
@given(st.one_of(_plain(st.just(8)), _plain(st.sampled_from([1, 2, 4, 8]), most=1)))
def test_rank_tables_hold_machines_that_hccl_can_group(listed):
    cluster = Cluster(tuple(listed))
    assert rank_table.read(rank_table.write(cluster, {}), "") == cluster


@PROPERTY
@given(st.lists(machines(), min_size=1, max_size=9, unique_by=lambda machine: machine.name))
def test_hostfiles_hold_any_machines_without_numbers_of_devices(listed):
    cluster = Cluster(tuple(replace(machine, devices=()) for machine in listed))
    assert hostfile.read(hostfile.write(cluster), "") == cluster
    assert hostfile.read_list(",".join(map(_in_a_list, cluster.machines)), "--hosts") == cluster


def _in_a_list(machine):
    if machine.port:
        return machine.target + (f" slots={machine.slots}" if machine.slots else "")
    user, at, name = machine.host.rpartition("@")
    shown = f"[{name}]" if ":" in name else name
    return f"{user}{at}{shown}" + (f":{machine.slots}" if machine.slots else "")


@pytest.mark.parametrize("module", [torchrun, msrun], ids=lambda module: module.NAMES[0])
@PROPERTY
@given(data=st.data())
def test_commands_hold_everything_about_all_machines(module, data):
    listed = data.draw(st.lists(machines(), min_size=2, max_size=5, unique_by=lambda machine: machine.name))
    listed = [replace(machine, port=0) for machine in listed]
    if module is msrun:
        listed = [replace(machine, slots=machine.slots or 3) for machine in listed]
    address, port = data.draw(st.one_of(st.just(""), HOSTS)), data.draw(st.integers(0, 65535))
    cluster = canonical(Cluster(tuple(listed), address, port))
    assert module.read(module.write(cluster), "") == cluster


@pytest.mark.parametrize("module", [torchrun, msrun], ids=lambda module: module.NAMES[0])
@PROPERTY
@given(data=st.data(), slots=st.integers(1, 9), size=st.integers(2, 5), port=st.integers(0, 65535))
def test_commands_hold_one_machine_among_others(module, data, slots, size, port):
    rank = data.draw(st.integers(0, size - 1))
    listed = (Machine(data.draw(HOSTS), slots), *(Machine("", slots) for _ in range(size - 1)))
    cluster = Cluster(listed, master_port=port, machine=rank)
    assert module.read(module.write(cluster), "") == cluster


@PROPERTY
@given(st.data(), st.integers(0, 9), st.integers(1, 5), st.integers(0, 65535))
def test_accelerate_holds_machines_alike(data, slots, size, port):
    address = data.draw(HOSTS)
    rank = data.draw(st.one_of(st.none(), st.integers(0, size - 1)))
    devices = tuple(reversed(range(slots))) if size == 1 and slots > 1 else ()
    listed = (Machine(address, slots, devices), *(Machine("", slots) for _ in range(size - 1)))
    cluster = Cluster(listed, master_port=port, machine=rank)
    assert accelerate.read(accelerate.write(cluster), "") == cluster


@PROPERTY
@given(st.integers(1, 9), st.integers(1, 65535))
def test_launch_json_holds_processes_of_this_machine(slots, port):
    cluster = Cluster((Machine("localhost", slots, tuple(reversed(range(slots)))),), master_port=port)
    assert launch_json.read(launch_json.write(canonical(cluster)), "") == canonical(cluster)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NAMES[0])
@PROPERTY
@given(data=st.data())
def test_what_is_fitted_can_be_written(module, data):
    """`convert-cluster` leaves out what a format has no place for, and says so; so sensible machines always pass."""
    listed = tuple(Machine(f"n{index}", 8) for index in range(data.draw(st.integers(1, 4))))
    port = data.draw(st.sampled_from([0, 1234]))
    machine = data.draw(st.sampled_from([None, 0]))
    cluster = Cluster(listed, data.draw(st.sampled_from(["", "10.0.0.7"])), port, machine)
    fitted, notes = module.fit(cluster)
    assert module.read(module.write(fitted), "") == canonical(fitted)
    assert all(isinstance(note, str) for note in notes)
    if {found.host for found in fitted.machines} != {found.host for found in cluster.machines}:
        assert notes


@PROPERTY
@given(st.text(max_size=200))
def test_no_text_is_a_surprise(text):
    """Any text is either read or refused in words, by every format."""
    for name in module_names(FORMATS):
        module = load_choice(FORMATS, name)
        if hasattr(module, "recognise"):
            assert module.recognise("file", text) in (True, False)
        if hasattr(module, "read"):
            try:
                assert module.read(text, "file").machines
            except UserError:
                continue


class TestHostfiles:
    def test_openmpi(self):
        text = "# ours\nn1 slots=4 max_slots=8\n\nuser@n2 slots=2   # the small one\nn1 slots=2\nfd00::7 slots=1\n"
        found = hostfile.read(text, "hosts").machines
        assert found == (Machine("n1", 6), Machine("user@n2", 2), Machine("fd00::7", 1))

    def test_horovod(self):
        assert hostfile.read("n1:4\n[fd00::7]:2\n", "hosts").machines == (Machine("n1", 4), Machine("fd00::7", 2))

    def test_a_host_without_a_number_is_of_unknown_size_until_it_is_named_again(self):
        assert hostfile.read("n1\nn2\nn2\n", "hosts").machines == (Machine("n1", 0), Machine("n2", 2))

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("n2 slot=4", 'did you mean "slots"?'),
            ("n2 4", "write slots=4"),
            ("n2 slots = 4", "without blanks"),
            ("n2 slots=0", "from 1 to 1024"),
            ("n2 slots=4 max_slots=2", "less than slots"),
            ("n2:4 slots=4", "given twice"),
            ("10.*.*.* slots=4", "is not a host"),
            ("-oProxyCommand=x slots=4", "is not a host"),
            ("ann@n1 slots=4", "two users"),
            ("[fd00::zz]:4", "not an IPv6 address"),
            ("[fe80::1%;touch]:4", "not an IPv6 address"),
            ("n2:222", "is 222 behind n2 the port of its ssh, or the number of its processes?"),
            ("n2 port=0", "from 1 to 65535"),
            ("ssh://n2:31234 port=2222", "port is given twice"),
            ("ssh://ann:secret@n2", "passwords"),
        ],
    )
    def test_mistakes_have_their_line(self, line, said):
        with pytest.raises(UserError) as caught:
            hostfile.read(f"n1 slots=4\n# more\n{line}\n", "hosts")
        assert said in str(caught.value)
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
        assert hostfile.recognise("any", f"{text}\n") == any(word in text for word in ("slots=", "port=", "//"))

    @pytest.mark.parametrize("number", ["22", "222", "2222", "31234"])
    def test_a_number_that_may_be_a_port_is_asked_about(self, number):
        with pytest.raises(UserError) as caught:
            hostfile.read_list(f"root@ssh5.example:{number}", "cluster.hosts")
        assert f"is {number} behind root@ssh5.example the port of its ssh" in caught.value.what
        assert f"if it is the port: ssh://root@ssh5.example:{number}" in caught.value.mend
        if int(number) < 1024:
            assert f'if these are processes: "root@ssh5.example slots={number}"' in caught.value.mend

    def test_machines_behind_one_address_are_told_apart_by_their_ports(self):
        found = hostfile.read_list("ssh://root@ssh5:31234,ssh://root@ssh5:31235", "--hosts").machines
        assert [machine.name for machine in found] == ["ssh5:31234", "ssh5:31235"]
        with pytest.raises(UserError, match="ssh5:31234 is there twice"):
            hostfile.read_list("ssh://root@ssh5:31234,ssh://ann@ssh5:31234", "--hosts")

    def test_no_password_is_shown(self):
        with pytest.raises(UserError) as caught:
            hostfile.read_list("ssh://ann:secret@n2:31234", "--hosts")
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("text", ["n1,,n2", "n1,n1:2", "fd00::1:4", "n1:x", "", "-n1"])
    def test_lists_are_strict(self, text):
        with pytest.raises(UserError) as caught:
            hostfile.read_list(text, "--hosts")
        assert caught.value.where == "--hosts"


class TestTorchrun:
    def test_the_flags_are_torchs_own(self):
        run = pytest.importorskip("torch.distributed.run")
        known = FLAGS.valued | FLAGS.switches
        flags = {
            word.lstrip("-").replace("-", "_")
            for action in run.get_args_parser()._actions
            for word in action.option_strings
            if word.startswith("--") and action.dest != "help"
        }
        assert flags <= known

    @pytest.mark.parametrize(
        "command",
        [
            "torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=10.0.0.1 --master_port=1234 a.py",
            'torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr "10.0.0.1" --master-port 1234 -m a b',
            "python3 -m torch.distributed.launch \\\n --nproc_per_node=8 --nnodes=2 --node_rank=0 \\\n"
            " --master_addr=10.0.0.1 \\\n --master_port=1234 resnet_ddp.py",
            "OMP_NUM_THREADS=1 torchrun --nnodes 2:2 --nproc-per-node 8 --node-rank 0 -t 3 "
            "--rdzv-endpoint 10.0.0.1:1234 a.py",
            "PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK=0 PET_MASTER_ADDR=10.0.0.1 torchrun --master-port=1234 a",
        ],
    )
    def test_spellings_of_one_command(self, command):
        wanted = Cluster((Machine("10.0.0.1", 8), Machine("", 8)), master_port=1234, machine=0)
        assert torchrun.read(f"#!/bin/bash\nset -e\n{command}\necho done\n", "run.sh") == wanted

    def test_two_commands_are_two_machines(self):
        text = "".join(
            f"torchrun --nnodes=2 --node-rank={rank} --nproc-per-node={rank + 1} --master-addr=n1 a.py\n"
            for rank in (1, 0)
        )
        assert torchrun.read(text, "").machines == (Machine("n1", 1), Machine("", 2))

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ("--nnodes=1:4", "a number that may change"),
            ("--nnodes=2", "add --master-addr"),
            ("--nproc-per-node cpu", "one process for each core"),
            ("--nproc_per_nod=3", 'did you mean "--nproc-per-node"?'),
            ("--nproc-per-node=$GPUS", "only a shell can fill in"),
            ("--rdzv-backend=etcd-v2 --rdzv-endpoint=n1:1", "only static and c10d"),
            ("--nnodes=2 --master-addr=n1 --node-rank=2", "counted from 0"),
            ("--nproc-per-node 'two", "quotes don't match"),
            ("--nproc-per-node=1 x.py\ntorchrun --nproc-per-node=1", "several commands"),
        ],
    )
    def test_mistakes(self, flags, said):
        with pytest.raises(UserError) as caught:
            torchrun.read(f"# start\ntorchrun {flags} a.py\n", "run.sh")
        assert said in str(caught.value)
        assert caught.value.where.startswith("run.sh, line ")


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
        assert torchrun.from_environment({**KUBEFLOW, **more}) == Cluster(listed, master_port=port, machine=2)

    def test_one_machine_needs_no_address(self):
        assert torchrun.from_environment({"PET_NNODES": "1"}) == Cluster((Machine("localhost", 1),))
        assert torchrun.from_environment({"RANK": "0"}) is None

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"PET_NNODES": "1:4"}, "a number that may change"),
            ({"PET_NNODES": "many"}, 'PET_NNODES is "many"; expected a number from 1'),
            ({"PET_NODE_RANK": "3"}, 'PET_NODE_RANK is "3"; expected a number from 0 to 2'),
            ({"PET_NPROC_PER_NODE": "cpu"}, "one process for each core"),
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
            torchrun.from_environment({**KUBEFLOW, **wrong})
        assert said in str(caught.value)
        assert "PET_" in str(caught.value)


class TestMsrun:
    def test_numbers_count_processes(self):
        text = "msrun --worker_num=8 --local_worker_num=4 --master_addr=10.0.0.1 --master_port=8118 --node_rank=1 t.py"
        wanted = Cluster((Machine("10.0.0.1", 4), Machine("", 4)), master_port=8118, machine=1)
        assert msrun.read(text, "") == wanted
        assert msrun.read("msrun --log_dir x --join True t.py", "").machines == (Machine("localhost", 8),)
        assert msrun.read(text.replace("--node_rank=1", "--node_rank=-1"), "").machine is None

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ("--worker_num 8 --local_worker_num 3", "not a multiple"),
            ("--worker_num 4 --local_worker_num 8", "more than --worker_num"),
            ("--worker_num 16 --local_worker_num 8", "add --master_addr"),
            ("--workers 8", 'did you mean "--worker-num"?'),
        ],
    )
    def test_mistakes(self, flags, said):
        with pytest.raises(UserError) as caught:
            msrun.read(f"msrun {flags} train.py", "run.sh")
        assert said in str(caught.value)
        assert caught.value.where == "run.sh, line 1"


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

    def test_what_is_written_accelerate_reads(self, tmp_path):
        config_args = pytest.importorskip("accelerate.commands.config.config_args")
        path = tmp_path / "config.yaml"
        path.write_text(accelerate.write(Cluster((Machine("n1", 4), Machine("", 4)), machine=1, master_port=1234)))
        found = config_args.ClusterConfig.from_yaml_file(str(path))
        assert (found.num_machines, found.num_processes, found.machine_rank) == (2, 8, 1)
        assert (found.main_process_ip, found.main_process_port, found.gpu_ids) == ("n1", 1234, "all")

    def test_processes_are_counted_over_all_machines(self):
        found = accelerate.read(TWO_MACHINES, "a.yaml")
        wanted = (Machine("10.0.0.1", 4), Machine("", 4, (4, 5, 6, 7)))
        assert found == Cluster(wanted, master_port=29501, machine=1)

    def test_settings_that_map_exactly(self):
        assert accelerate.settings(TWO_MACHINES) == {"train.precision": "bf16"}
        text = "distributed_type: MULTI_CPU\nmixed_precision: no\nnum_processes: 2\n"
        assert accelerate.settings(text) == {"train.precision": "fp32", "cluster.device": "cpu"}
        text = "distributed_type: no\nuse_cpu: true\n"
        assert accelerate.settings(text) == {"cluster.device": "cpu"}
        assert accelerate.read(text, "").machines == (Machine("localhost", 1),)

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
            ("num_machines: 2", "num_machines: 2: 3", 3, "not yaml"),
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

    @pytest.mark.parametrize("text", ["distributed_type: DEEPSPEED\n", "distributed_type: NO\nmixed_precision: fp8\n"])
    def test_what_has_no_counterpart_is_refused(self, text):
        with pytest.raises(UserError):
            accelerate.settings(text)
        assert accelerate.read(text, "").machines


# As tutorials print it: torch.distributed.launch as the module, comments, and words of the user's own behind.
PRINTED = """{
"version": "0.2.0",
"configurations": [
{
"name": "Python: Current File",
"type": "python",
"request": "launch",
"module": "torch.distributed.launch",
"console": "internalConsole",
"justMyCode": true,
"env": {"CUDA_VISIBLE_DEVICES": "4"},
"args": [
"--nproc_per_node", "1", // GPUs
"--master_port", "29500",
"tools/train.py",
"configs/net.py",
"--launcher", "pytorch",
"work_dir=work_dirs/debug"
]
}
]
}
"""


class TestLaunchJson:
    def test_torchruns_flags_in_a_configuration_are_read(self):
        cluster = launch_json.read(PRINTED, "launch.json")
        assert cluster.machines == (Machine("localhost", 1, (4,)),)
        assert cluster.master_port == 29500
        four = PRINTED.replace('"1", // GPUs', '"4",').replace('"CUDA_VISIBLE_DEVICES": "4"', "")
        assert launch_json.read(four, "").machines == (Machine("localhost", 4),)
        as_program = PRINTED.replace('"module": "torch.distributed.launch"',
                                     '"program": "/env/lib/torch/distributed/launch.py"')  # fmt: skip
        assert launch_json.read(as_program, "").machines == cluster.machines

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('"1", // GPUs', '"${env:GPUS}",', "which only a shell can fill in"),
            ('"1", // GPUs', '"many",', 'nproc-per-node is "many"'),
            ('"--master_port"', '"--master_prot"', "there is no flag --master_prot"),
            ('"args": [', '"args": "x", "more": [', "args is a list"),
        ],
    )
    def test_a_mistake_in_torchruns_flags_is_named_with_its_line(self, old, new, said):
        with pytest.raises(UserError, match=re.escape(said)) as caught:
            launch_json.read(PRINTED.replace(old, new), "launch.json")
        assert re.match(r"launch\.json, line 1[0-9]", caught.value.where)

    def test_one_rank_is_debugged_while_the_others_run(self):
        text = launch_json.write(Cluster((Machine("localhost", 3),), master_port=1234))
        assert text.startswith("//")
        content = json.loads(text.partition("\n")[2])
        known = {found["name"]: found for found in content["configurations"]}
        (compound,) = [found for found in content["compounds"] if found["name"] == "debug rank 1"]
        started = [known[name] for name in compound["configurations"]]
        assert [found["env"]["RANK"] for found in started] == ["0", "1", "2"]
        assert [found.get("noDebug", False) for found in started] == [True, False, True]
        assert {found["type"] for found in started} == {"debugpy"}
        assert not any(found["justMyCode"] for found in started)

    def test_a_configurations_own_variable_is_not_seen(self):
        content = {
            "configurations": [
                {"type": "debugpy", "env": {"GPUS": "2", "RANK": "0"}, "args": ["--nproc_per_node", "${env:GPUS}"]}
            ]
        }
        text = json.dumps(content, indent=1).replace('"args"', '// flags\n"args"')
        with pytest.raises(UserError) as caught:
            launch_json.read(text, "launch.json")
        assert "write the value itself: 2" in str(caught.value)
        line = next(number for number, line in enumerate(text.splitlines(), 1) if "${env:GPUS}" in line)
        assert caught.value.where == f"launch.json, line {line}: configurations[0].args[1]"

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('"RANK": "1"', '"RANK": "2"', "configurations for ranks 0, 2"),
            ('"WORLD_SIZE": "2"', '"WORLD_SIZE": "3"', "WORLD_SIZE differs"),
            ('"RANK": "1"', '"RANK": "one"', 'RANK is "one"'),
        ],
    )
    def test_mistakes(self, old, new, said):
        text = launch_json.write(Cluster((Machine("localhost", 2),), master_port=1234))
        broken = text.replace(old, new) if "RANK" in old and "WORLD" not in old else text.replace(old, new, 1)
        with pytest.raises(UserError) as caught:
            launch_json.read(broken, "launch.json")
        assert said in str(caught.value)


class TestDescribe:
    def test_files_are_known_by_their_content(self, tmp_path):
        one = Cluster((Machine("localhost", 2),), master_port=1234)
        for module in MODULES:
            path = tmp_path / "some-file"
            path.write_text(module.write(module.fit(one)[0]))
            assert read_cluster(path).size == 2

    def test_what_fits_nothing_says_what_was_tried(self, tmp_path):
        path = tmp_path / "job.toml"
        path.write_text("[data]\nname = 'digits'\n")
        with pytest.raises(UserError) as caught:
            read_cluster(path)
        for name in names("read"):
            assert name in str(caught.value)

    @pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00"])
    def test_what_is_no_text_is_told(self, tmp_path, content):
        path = tmp_path / "hosts"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_cluster(path)
        assert caught.value.where == str(path)

    def test_names_are_found_and_slips_are_met_with_a_suggestion(self):
        for module in MODULES:
            assert all(format_named(name) is module for name in module.NAMES)
        with pytest.raises(UserError, match="no format is called") as caught:
            format_named("hostfle", "write", "--to")
        assert 'did you mean "hostfile"?' in caught.value.mend

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
    assert copied_by(machine, "/a/run", "runs/x") == command
    assert "'" in copied_by(machine, "/a b/run", "runs/x")
