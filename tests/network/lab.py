"""Several hosts on this machine: network namespaces on one bridge, each with its own name, address and real sshd."""

import contextlib
import ipaddress
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.fork_server import fork_variables

SOURCE = Path(__file__).parents[2] / "src"
TOOLS = ("ip", "tc", "nft", "ssh", "sshd", "ssh-keygen", "unshare")
SBIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CARRIED = ("MANYHANDS_DATA", "MANYHANDS_CACHE", "HF_HOME")
# On a lab's bridge: this word, its owner's process id and start, the number of hosts, its folder.
ALIAS = "manyhands-lab"
# Nothing here waits so long unless it hangs.
PATIENCE_S = 60


def why_not():
    """What is missing for a lab, in words; empty where one can be made."""
    missing = [tool for tool in TOOLS if not _tool(tool)]
    if sys.platform != "linux":
        return "hosts as network namespaces need Linux"
    if os.geteuid() != 0:
        return "hosts as network namespaces need root"
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: openssh-server, nftables, iproute2)"
    probe = f"mhtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return ""


class Lab:
    """Hosts n1, n2, …, numbered from 1, which see each other and the root namespace ("the laptop").

    Args:
        hosts: how many.
        rate: of each host's link, both ways, in tc's words ("10mbit"); None: as fast as it goes.
        ipv6_only: no host has an IPv4 address.
        environment: more variables for sessions over ssh.
        forks: agents of manyhands are forks of one process that has imported torch (see tests.fork_server).
    """

    def __init__(self, hosts=3, rate=None, *, ipv6_only=False, environment=None, forks=False):
        self.hosts = range(1, hosts + 1)
        self.python = sys.executable
        self.first_rate = rate
        self.ipv6_only = ipv6_only
        self.environment = {**_session_environment(), **(fork_variables() if forks else {}), **(environment or {})}
        self.folder = Path()
        self.prefix = ""
        self._servers = {}
        self._started = []

    def __enter__(self):
        _remove_dead()
        self.folder = Path(tempfile.mkdtemp(prefix="manyhands-lab-"))
        try:
            self._make_bridge()
            self._make_keys()
            for host in self.hosts:
                self._make_host(host)
            for host in self.hosts:
                self.start(host, wait=False)
            for host in self.hosts:
                self._wait_for_sshd(host)
                if self.first_rate:
                    self.rate(host, self.first_rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    # Names and addresses.

    def name(self, host):
        return f"n{host}"

    def namespace(self, host):
        return f"{self.prefix}n{host}"

    def address(self, host):
        """A host's address; 254 is the laptop's own."""
        return f"{self.network}::{host}" if self.ipv6_only else f"{self.network}.{host}"

    @property
    def names(self):
        return [self.name(host) for host in self.hosts]

    @property
    def ssh_config(self):
        return self.folder / "ssh_config"

    @property
    def ssh(self):
        """What manyhands takes as --cluster.ssh."""
        return f"ssh -F {self.ssh_config}"

    # What a test does to a host.

    def exec(self, host, arguments, **options):
        """Starts a process in a host, with this process's environment; options as for subprocess.Popen."""
        started = subprocess.Popen(self._inside(host, arguments), **options)
        self._started.append((host, started))
        return started

    def run(self, host, arguments, **options):
        """Runs a command in a host to its end and gives what it printed."""
        command = self._inside(host, arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
        if done.returncode:
            raise RuntimeError(f"in n{host}, {shlex.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def start(self, host, *, prepare="true", environment=None, port=22, sshd="", wait=True):
        """Starts a host's sshd anew.

        Args:
            host: its number.
            prepare: a shell command that runs first in the host's own mount namespace, such as a mount.
            environment: more variables for its sessions.
            port: that it listens on.
            sshd: more lines of its configuration.
            wait: until it answers.
        """
        self._stop(host)
        config = self._write_sshd_config(host, {**self.environment, **(environment or {})}, port, sshd)
        # bash reads it in each session, and what it starts may wait for what another killed host has left locked.
        hide = "if [ -e ~/.bashrc ]; then mount --bind /dev/null ~/.bashrc; fi"
        script = f'{hide} && {prepare} && exec {_tool("sshd")} -D -e -f "$0"'
        with (self.folder / f"sshd{host}.log").open("ab") as log:
            self._servers[host] = self.exec(
                host, ["sh", "-c", script, str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self._wait_for_sshd(host, port)

    def rate(self, host, rate, *, ways=("sent", "received")):
        """Limits what a host sends and receives, in tc's words; None takes the limit away."""
        ends = {"sent": ("-n", self.namespace(host), "qdisc"), "received": ("qdisc",)}
        for way in ways:
            before, device = ends[way], "eth0" if way == "sent" else self._veth(host)
            subprocess.run(["tc", *before, "del", "dev", device, "root"], capture_output=True, check=False)
            if rate:
                burst = max(32, _kbit(rate) // 250)
                shape = ("tbf", "rate", rate, "burst", f"{burst}kbit", "latency", "400ms")
                _run("tc", *before, "add", "dev", device, "root", *shape)

    def down(self, host):
        """Pulls a host's cable."""
        _run("ip", "link", "set", self._veth(host), "down")

    def up(self, host):
        """Puts it back in."""
        _run("ip", "link", "set", self._veth(host), "up")

    def end_sshd(self, host):
        """Nobody can connect to a host any more; who is connected stays so."""
        self._servers[host].terminate()

    def kill(self, host):
        """A machine dies: its cable first, so that nobody hears of it, then all that runs on it."""
        self.down(host)
        self._stop(host)

    def add_dummy(self, host, interface, address, *, default=False):
        """Adds an interface that is up and leads nowhere; `default` lets the default route go there."""
        inside, far_end = ("-n", self.namespace(host)), f"{interface[:11]}-end"
        _run("ip", *inside, "link", "add", interface, "type", "veth", "peer", "name", far_end)
        _run("ip", *inside, "addr", "add", address, "dev", interface)
        for end in (interface, far_end):
            _run("ip", *inside, "link", "set", end, "up")
        if default:
            _run("ip", *inside, "route", "add", "default", "dev", interface)

    def set_names(self, host, own=""):
        """Writes a host's /etc/hosts, for processes that run already too; `own`: what its own name stands for there."""
        names = [f"{own if own and other == host else self.address(other)} {self.name(other)}" for other in self.hosts]
        text = "\n".join(["127.0.0.1 localhost", "::1 localhost", *names])
        (self._etc(host) / "hosts").write_text(text + "\n")

    def nft(self, host, rules):
        """Loads rules into a host's firewall."""
        self.run(host, ["nft", "-f", "-"], input=rules)

    def processes(self, host):
        """Ids of all processes in a host."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace(host)], capture_output=True, text=True)
        return [int(word) for word in found.stdout.split()]

    def sent_bytes(self, host):
        """What has left a host, frames included."""
        return self._count(host, "rx_bytes")

    def sent_packets(self, host):
        """How many frames have left a host; what its kernel hands on as one counts as one."""
        return self._count(host, "rx_packets")

    def close(self):
        """Ends every process in every host and takes all away; may be called twice."""
        if self.prefix:
            for host in self.hosts:
                self._stop(host)
                for command in (["ip", "link", "del", self._veth(host)], ["ip", "netns", "del", self.namespace(host)]):
                    subprocess.run(command, capture_output=True, check=False)
                shutil.rmtree(self._etc(host), ignore_errors=True)
            subprocess.run(["ip", "link", "del", f"{self.prefix}br"], capture_output=True, check=False)
            self.prefix = ""
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    # How it is made.

    def _make_bridge(self):
        """The bridge's name holds the subnet, so whoever gets the name has the subnet to himself."""
        for _ in range(50):
            first, second = random.SystemRandom().randrange(64, 250), random.SystemRandom().randrange(256)
            prefix = f"mh{first:02x}{second:02x}"
            if self.ipv6_only:
                self.network = f"fd{first:02x}:{second:x}"
            else:
                self.network = f"10.{first}.{second}"
                if _in_use(self.network):
                    continue
            made = subprocess.run(["ip", "link", "add", f"{prefix}br", "type", "bridge"], capture_output=True)
            if made.returncode == 0:
                self.prefix = prefix
                owner = psutil.Process()
                alias = f"{ALIAS} {owner.pid} {owner.create_time()} {len(self.hosts)} {self.folder}"
                _run("ip", "link", "set", f"{prefix}br", "alias", alias)
                self._give_address(f"{prefix}br", 254)
                _run("ip", "link", "set", f"{prefix}br", "up")
                return
        raise RuntimeError("no bridge could be made for a lab in 50 attempts")

    def _make_host(self, host):
        inside = ("-n", self.namespace(host))
        etc = self._etc(host)
        etc.mkdir(parents=True)
        self.set_names(host)
        # A name that isn't in the file is refused at once instead of being asked for into the void.
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        _run("ip", "netns", "add", self.namespace(host))
        _run("ip", "link", "add", self._veth(host), "type", "veth", "peer", "name", "eth0", "netns",
             self.namespace(host))  # fmt: skip
        _run("ip", "link", "set", self._veth(host), "master", f"{self.prefix}br", "up")
        self._give_address("eth0", host, inside)
        _run("ip", *inside, "link", "set", "eth0", "up")
        _run("ip", *inside, "link", "set", "lo", "up")

    def _give_address(self, interface, number, inside=()):
        # Without nodad, an IPv6 address can't be used for the first second or two.
        words = [f"{self.address(number)}/64", "nodad"] if self.ipv6_only else [f"{self.address(number)}/24"]
        _run("ip", *inside, "addr", "add", words[0], "dev", interface, *words[1:])

    def _make_keys(self):
        """A key for each host and one for the client, and the client's configuration."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        known, config = [], []
        for file in ["client", *(f"host{host}" for host in self.hosts)]:
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / file))
        shutil.copy(self.folder / "client.pub", self.folder / "authorized_keys")
        for host in self.hosts:
            key = " ".join((self.folder / f"host{host}.pub").read_text().split()[:2])
            names = (self.name(host), self.address(host))
            known.append(f"{','.join([*names, *(f'[{name}]:*' for name in names)])} {key}\n")
            config.append(f"Host {self.name(host)}\n  HostName {self.address(host)}\n")
        config.append(
            f"Host *\n  User root\n  IdentityFile {self.folder}/client\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n"
        )
        (self.folder / "known_hosts").write_text("".join(known))
        self.ssh_config.write_text("".join(config))

    def _write_sshd_config(self, host, environment, port, more):
        # What is typed on a host lists its runs with the lab, not with those of the user whose tests these are.
        listed = {"XDG_STATE_HOME": self.folder / "state", **environment}
        variables = " ".join(f'"{name}={value}"' for name, value in listed.items())
        path = self.folder / f"sshd{host}.conf"
        path.write_text(
            f"ListenAddress {self.address(host)}\nPort {port}\nHostKey {self.folder}/host{host}\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nStrictModes no\nPermitRootLogin yes\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nUseDNS no\nPrintMotd no\n"
            f"MaxStartups 200\nMaxSessions 100\nAcceptEnv MANYHANDS_*\nSetEnv {variables}\n{more}\n"
        )
        return path

    def _wait_for_sshd(self, host, port=22):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with socket.create_connection((self.address(host), port), timeout=1) as connection:
                    connection.settimeout(PATIENCE_S)
                    assert connection.recv(4) == b"SSH-"
                    return
            except OSError:
                said = (self.folder / f"sshd{host}.log").read_text()
                if self._servers[host].poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"sshd of n{host} does not answer; it said: {said}") from None
                time.sleep(0.02)

    def _inside(self, host, arguments):
        """Each process gets a UTS namespace of its own with the host's name; there is nothing to share in one."""
        script = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "sh", "-c", script,
                self.name(host), *map(str, arguments)]  # fmt: skip

    def _stop(self, host):
        """Kills all that runs in a host; new processes may appear while old ones are found."""
        # One that was started a moment ago may not have entered its host yet.
        for process in [process for where, process in self._started if where == host and process.poll() is None]:
            process.kill()
        deadline = time.monotonic() + PATIENCE_S
        while (pids := self.processes(host)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if host in self._servers:
            self._servers.pop(host).wait()
        self._started = [(where, process) for where, process in self._started if where != host]

    def _count(self, host, counter):
        return int(Path(f"/sys/class/net/{self._veth(host)}/statistics/{counter}").read_text())

    def _veth(self, host):
        return f"{self.prefix}v{host}"

    def _etc(self, host):
        return Path("/etc/netns") / self.namespace(host)


def _remove_dead():
    """Takes away the labs of processes that were killed before they could do it themselves."""
    for path in Path("/sys/class/net").glob("mh*br/ifalias"):
        with contextlib.suppress(FileNotFoundError, OSError):
            words = path.read_text().split()
            if words[:1] == [ALIAS] and not _lives(int(words[1]), float(words[2])):
                dead = Lab(int(words[3]))
                dead.prefix, dead.folder = path.parent.name.removesuffix("br"), Path(words[4])
                dead.close()


def _lives(pid, created):
    try:
        return psutil.Process(pid).create_time() == created
    except psutil.NoSuchProcess:
        return False


def _session_environment():
    kept = {name: os.environ[name] for name in CARRIED if name in os.environ}
    path = f"{Path(sys.executable).parent}:{SBIN}"
    return {"PATH": path, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **kept}


def _in_use(network):
    """Whether a route of this machine, other than the default one, leads into the subnet."""
    ours = ipaddress.ip_network(f"{network}.0/24")
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(?:\w+ )?(\d+\.\d+\.\d+\.\d+(?:/\d+)?)", routes, re.MULTILINE)
    return any(ours.overlaps(ipaddress.ip_network(route, strict=False)) for route in found)


def _kbit(rate):
    number, unit = re.fullmatch(r"(\d+)(k|m|g)bit", rate).groups()
    return int(number) * {"k": 1, "m": 1_000, "g": 1_000_000}[unit]


def _tool(name):
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
