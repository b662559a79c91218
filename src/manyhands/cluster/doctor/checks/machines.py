"""Checks for machines that don't answer or are listed twice, host names, clocks, low resources and accelerators."""

import ipaddress
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import compress
from typing import Any

from manyhands.cluster.doctor.accelerators import explain_unused_accelerators
from manyhands.cluster.doctor.findings import DoctorFinding, Severity, Survey, find_outliers, join_hosts
from manyhands.cluster.doctor.survey import local_candidates

MIB = 1 << 20
APART_S, BUSY_SHARE = 1.0, 0.5
SHM_LOW, SHM_NONE = 256 * MIB, 32 * MIB  # free bytes in /dev/shm, without which data workers are killed
FREE_FOR_ONE = 1024 * MIB  # torch alone needs about half
DISK_LOW, DISK_NONE = 2048 * MIB, 200 * MIB
_NAMED = 3  # machines that get a command of their own
MEMORY_SHARE, BUSY_PERCENT = 0.1, 20  # desktops and monitoring use less without slowing a job down
_USE = "{kind} {index}: {used_mib} of {memory_mib} MiB, {busy_percent} % busy"


def run(survey: Survey) -> Iterator[DoctorFinding]:
    for host, error in survey.errors.items():
        cause = f"contact:{host}"
        yield DoctorFinding("contact", "fail", (host,), error.message, error.hints, cause, ("collective",))
    for each in (_check_repeats, _check_names, _check_clocks, _check_cpus, _check_memory, _check_disk, _check_devices):
        yield from each(survey)
    for host, jobs in survey.fact("jobs").items():
        if jobs:
            shown = ", ".join(f"process {job['pid']} of {job['user']} ({job['command'][:60]})" for job in jobs[:2])
            more = f" and {len(jobs) - 2} more" if len(jobs) > 2 else ""
            what = f"another training job is running on {host}: {shown}{more}"
            listing = survey.on_host(host, f"ps -fp {jobs[0]['pid']}")
            hints = ("wait for the job, or stop your own: manyhands ps, manyhands stop", f"show the process: {listing}")
            yield DoctorFinding("jobs", "warn", (host,), what, hints, f"jobs:{host}", (f"load:{host}",))
    missing: dict[str, dict[str, str]] = {}  # by fact, since the reason is usually the same on all machines
    for host, errors in survey.fact("errors").items():
        for name, error in errors.items():
            if name != "accelerators":  # another check reports failing drivers
                missing.setdefault(name, {})[host] = error
    for name, errors in missing.items():
        what = f"can't determine the {name.replace('_', ' ')} of {', '.join(errors)}: {next(iter(errors.values()))}"
        yield DoctorFinding("facts", "warn", tuple(errors), what, cause=f"facts:{name}")


def _check_repeats(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields a finding for each machine that is listed under several names, because each would start processes."""
    names: dict[str, list[str]] = {}
    for host, machine in survey.fact("machine").items():
        names.setdefault(machine, []).append(host)
    for hosts in names.values():
        if len(hosts) > 1:
            hints = (f'list the machine once, with {len(hosts)} processes: "{hosts[0]} slots={len(hosts)}"',)
            what, cause = f"{' and '.join(hosts)} are the same machine", f"twice:{hosts[0]}"
            yield DoctorFinding("twice", "fail", tuple(hosts), what, hints, cause, ("collective",))


def _check_names(survey: Survey) -> Iterator[DoctorFinding]:

    loopback, hint = dict[str, str](), 'for other tools, add to /etc/hosts on {}: "{} {}"'
    hints: dict[str, tuple[str, ...]] = {}
    for host, name in survey.fact("name").items() if len(survey.hosts) > 1 else ():
        hints[host] = (hint.format(host, survey.chosen.get(host, ("", "ADDRESS"))[1], name["host"]),)
        addresses, own = [text.partition("%")[0] for text in name["addresses"]], {*local_candidates(survey.facts[host])}
        if addresses and ipaddress.ip_address(addresses[0]).is_loopback:
            loopback[host] = addresses[0]
        elif addresses and survey.facts[host].get("interfaces") and not own & {*addresses}:
            what = f"the host name of {host} resolves to {addresses[0]}, which is not an address of {host}"
            yield DoctorFinding("names", "warn", (host,), what, hints[host], f"name:{host}")
    if loopback:
        first = next(iter(loopback))
        shown = f"the host name of {join_hosts(loopback)} resolves to {loopback[first]}"
        what = f"{shown}; manyhands uses addresses instead, but other tools may fail"
        yield DoctorFinding("names", "warn", tuple(loopback), what, hints[first], "loopback-name")


def _check_clocks(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields a finding on clocks that differ from the median by more than APART_S plus the measurement error."""
    if len(survey.clock_s) < 2:
        return
    middle = statistics.median_low([offset for offset, _ in survey.clock_s.values()])
    apart = {host: offset - middle for host, (offset, _) in survey.clock_s.items()}
    far = {host: by for host, by in apart.items() if abs(by) - survey.clock_s[host][1] > APART_S}
    if not far:
        what = f"clocks are within {math.ceil(max(map(abs, apart.values())) * 1000)} ms"
        yield DoctorFinding("clock", "ok", tuple(apart), what, cause="clock")
        return
    shown = ", ".join(f"{host} is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}" for host, by in far.items())
    others = join_hosts(host for host in apart if host not in far)
    what = f"clocks differ: {shown} of {others}; times in logs will not match, and certificates may be refused"
    hints = tuple(f"synchronize the clock: {survey.on_host(host, 'sudo timedatectl set-ntp true')}" for host in far)
    yield DoctorFinding("clock", "warn", tuple(far), what, hints, "clock")


def _check_cpus(survey: Survey) -> Iterator[DoctorFinding]:
    cores, over = survey.fact("cores"), dict[str, str]()
    for host, count in cores.items():
        variable = str(survey.facts[host].get("environment", {}).get("OMP_NUM_THREADS", ""))
        threads = survey.needs.threads or (int(variable) if variable.isdecimal() else 0)
        processes = survey.needs.processes.get(host, 1)
        if processes * max(threads, 1) > count:
            over[host] = f"{processes} × {threads or 1} on the {count:g} cores of {host}"
    if over:
        what = f"there are more threads than cores (processes × threads): {', '.join(over.values())}"
        hints = ("use fewer processes, or fewer threads: --cluster.threads 1",
                "unset OMP_NUM_THREADS on machines with a high value")  # fmt: skip
        yield DoctorFinding("cpu", "warn", tuple(over), what, hints, "threads")
    loads = survey.fact("load")
    busy = [host for host in loads if host in cores and loads[host] > max(1.0, BUSY_SHARE * cores[host])]
    if busy:
        shown = ", ".join(f"load {loads[host]:.1f} on the {cores[host]:g} cores of {host}" for host in busy)
        what = f"cores are busy with other programs: {shown}; the slowest machine limits the speed"
        listing = survey.on_host(max(busy, key=lambda host: loads[host]), "top -b -n 1")
        hints = ("wait for other programs, or end them", f"list the programs: {listing}")
        yield DoctorFinding("cpu", "warn", tuple(busy), what, hints, "load")


def _check_memory(survey: Survey) -> Iterator[DoctorFinding]:
    small = {host: place for host, place in survey.fact("places", "shm").items() if place["free"] < SHM_LOW}
    if small:
        shown = ", ".join(f"{host} {p['free'] // MIB} MiB free of {p['size'] // MIB}" for host, p in small.items())
        what = f"/dev/shm is small: {shown}; data workers pass batches through /dev/shm"
        hints = ("in a container: docker run --shm-size=8g (or --ipc=host)",
                "otherwise: sudo mount -o remount,size=50% /dev/shm",
                "or decode without data workers: --data.workers 0")  # fmt: skip
        severity = "fail" if any(place["free"] < SHM_NONE for place in small.values()) else "warn"
        yield DoctorFinding("memory", severity, tuple(small), what, hints, "shm")
    free, processes = survey.fact("memory", "free"), survey.needs.processes
    short = [host for host in free if free[host] < FREE_FOR_ONE * processes.get(host, 1)]
    if short:
        shown = ", ".join(f"{free[h] // MIB} MiB on {h} for {processes.get(h, 1)} process(es)" for h in short)
        hints = (f"end other programs on {join_hosts(short)}, or use fewer processes",)
        yield DoctorFinding("memory", "warn", tuple(short), f"free memory is low: {shown}", hints, "memory")


def _check_disk(survey: Survey) -> Iterator[DoctorFinding]:
    places = survey.fact("places", "run folder")
    locked = [host for host, place in places.items() if not place["writable"]]
    if locked:
        user = survey.facts[locked[0]].get("user", "this user")
        what = f"{user} has no write permission for {places[locked[0]]['path']} on {join_hosts(locked)}"
        looks = (survey.on_host(host, f"ls -ld {places[host]['path']}") for host in locked[:_NAMED])
        hints = ("choose another folder: --out or --cluster.workdir", *map("check the permissions: {}".format, looks))
        yield DoctorFinding("disk", "fail", tuple(locked), what, hints, "disk:locked")
    full = {host: place for host, place in places.items() if place["free"] < DISK_LOW and host not in locked}
    if full:
        shown = ", ".join(f"{host} {place['free'] // MIB} MiB at {place['path']}" for host, place in full.items())
        severity = "fail" if any(place["free"] < DISK_NONE for place in full.values()) else "warn"
        fullest = sorted(full, key=lambda host: full[host]["free"])[:_NAMED]
        looks = (survey.on_host(host, f"df -h {full[host]['path']}") for host in fullest)
        hints = (*map("check the disk: {}".format, looks), "delete old runs: manyhands clean RUN --yes")
        yield DoctorFinding("disk", severity, tuple(full), f"free disk space is low: {shown}", hints, "disk:full")


def _check_devices(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields findings on accelerators. A machine whose driver is broken gets no other finding."""
    if survey.needs.device == "cpu":
        return
    broken = survey.fact("errors", "accelerators")
    for host, error in broken.items():
        hints = (f"test the driver: {survey.on_host(host, 'nvidia-smi')}",
                 "reload or reinstall the driver, for example after a kernel update")  # fmt: skip
        what, cause = f"the accelerators of {host} do not respond: {error}", f"accelerators:{host}"
        yield DoctorFinding("accelerators", "fail", (host,), what, hints, cause, ("collective",))
    found = survey.fact("accelerators")
    yield from _check_device_counts(survey, found)
    yield from _check_device_types(survey, found)
    severity: Severity = "warn" if survey.needs.device == "auto" else "fail"
    for host, facts in survey.facts.items():
        if host not in broken and (explained := explain_unused_accelerators(facts, host)):
            what, cause = f"{explained[0]}; training on {host} would use the CPU", f"unused:{host}"
            explains = ("accelerators", "unlike")
            yield DoctorFinding("accelerators", severity, (host,), what, explained[1], cause, explains)
    for host, devices in found.items():
        full = [d["used_mib"] > MEMORY_SHARE * d["memory_mib"] or d["busy_percent"] > BUSY_PERCENT for d in devices]
        if busy := [*compress(devices, full)]:
            users = [f"{p['name']} (process {p['pid']}, {p['used_mib']} MiB)" for d in busy for p in d["processes"]]
            shown = ", ".join(_USE.format(**device) for device in busy)
            what = f"accelerators of {host} are in use: {shown}{', by ' if users else ''}{', '.join(users[:3])}"
            hints = ("wait, end the other processes, or choose free devices with CUDA_VISIBLE_DEVICES",)
            yield DoctorFinding("accelerators", "warn", (host,), what, hints, f"busy:{host}", (f"jobs:{host}",))


def _check_device_counts(survey: Survey, found: dict[str, list[Any]]) -> Iterator[DoctorFinding]:
    kind, processes = survey.needs.device, {host: survey.needs.processes.get(host, 1) for host in found}
    counts = {host: sum(device["kind"] == kind for device in devices) for host, devices in found.items()}
    few = [host for host in found if kind in {"cuda", "npu"} and counts[host] < processes[host]]
    if few:
        shown = ", ".join(f"{host} has {counts[host]} for {processes[host]} processes" for host in few)
        hints = ("use at most one process per device", "or train on CPUs: --device cpu")
        what = f"too few {kind} devices: {shown}"
        yield DoctorFinding("accelerators", "fail", tuple(few), what, hints, "accelerators", ("unlike",))


def _check_device_types(survey: Survey, found: dict[str, list[Any]]) -> Iterator[DoctorFinding]:
    """Yields a finding on machines whose device type, or else device model, differs from most machines."""
    kinds = {host: ",".join(sorted({device["kind"] for device in devices})) or "cpu" for host, devices in found.items()}
    common, odd = find_outliers(kinds)
    if odd and survey.needs.device == "auto":
        hosts = join_hosts(odd)
        what = f"the machines have different device types: {next(iter(odd.values()))} on {hosts}, {common} elsewhere"
        hints = ("train on CPUs everywhere: --device cpu", f"or remove {hosts} from the run")
        yield DoctorFinding("accelerators", "fail", tuple(odd), what, hints, "unlike", ("collective",))
        return
    counts = {host: Counter(device["name"] for device in devices) for host, devices in found.items()}
    names = {host: ", ".join(f"{n} × {name}" for name, n in sorted(own.items())) for host, own in counts.items()}
    common, odd = find_outliers(names)
    if odd and common and not any("npu" in kind for kind in kinds.values()):
        shown = ", ".join(f"{host} has {name or 'none'}" for host, name in odd.items())
        what = f"accelerators differ: {shown}, other machines have {common}; the slowest device limits the speed"
        yield DoctorFinding("accelerators", "warn", tuple(odd), what, (), "unlike")
