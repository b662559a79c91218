"""Accelerators that don't respond, are too few, differ, can't be used, or are busy."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from manyhands.cluster.doctor.accelerators import explain_unused
from manyhands.cluster.doctor.findings import DoctorFinding, Severity, Survey, odd_ones, who

# Desktops and monitoring use a little memory without slowing a job down.
BUSY_SHARE, BUSY_PERCENT = 0.1, 20


def run(survey: Survey) -> Iterator[DoctorFinding]:
    """Broken drivers first; a machine with one has no accelerators to be judged."""
    if survey.needs.device == "cpu":
        return
    broken = survey.fact("errors", "accelerators")
    for host, error in broken.items():
        hints = (f"test the driver: {survey.on_host(host, 'nvidia-smi')}",
                 "reload or reinstall the driver, for example after a kernel update")  # fmt: skip
        what, cause = f"the accelerators of {host} do not respond: {error}", f"accelerators:{host}"
        yield DoctorFinding("accelerators", "fail", (host,), what, hints, cause, ("collective",))
    found = survey.fact("accelerators")
    yield from _too_few(survey, found)
    yield from _different(survey, found)
    severity: Severity = "warn" if survey.needs.device == "auto" else "fail"
    for host, facts in survey.facts.items():
        if host not in broken and (explained := explain_unused(facts, host)):
            what, cause = f"{explained[0]}; training on {host} would use the CPU", f"unused:{host}"
            explains = ("accelerators", "unlike")
            yield DoctorFinding("accelerators", severity, (host,), what, explained[1], cause, explains)
    for host, devices in found.items():
        yield from _busy(host, devices)


def _too_few(survey: Survey, found: dict[str, list[Any]]) -> Iterator[DoctorFinding]:
    kind, processes = survey.needs.device, {host: survey.needs.processes.get(host, 1) for host in found}
    counts = {host: sum(device["kind"] == kind for device in devices) for host, devices in found.items()}
    few = [host for host in found if kind in {"cuda", "npu"} and counts[host] < processes[host]]
    if few:
        shown = ", ".join(f"{host} has {counts[host]} for {processes[host]} processes" for host in few)
        hints = ("use at most one process per device", "or train on CPUs: --device cpu")
        what = f"too few {kind} devices: {shown}"
        yield DoctorFinding("accelerators", "fail", tuple(few), what, hints, "accelerators", ("unlike",))


def _different(survey: Survey, found: dict[str, list[Any]]) -> Iterator[DoctorFinding]:
    """Machines with and without accelerators can't train together by default; different ones wait for the slowest."""
    kinds = {host: ",".join(sorted({device["kind"] for device in devices})) or "cpu" for host, devices in found.items()}
    common, odd = odd_ones(kinds)
    if odd and survey.needs.device == "auto":
        what = f"the machines have different device types: {next(iter(odd.values()))} on {who(odd)}, {common} elsewhere"
        hints = ("train on CPUs everywhere: --device cpu", f"or remove {who(odd)} from the run")
        yield DoctorFinding("accelerators", "fail", tuple(odd), what, hints, "unlike", ("collective",))
        return
    counts = {host: Counter(device["name"] for device in devices) for host, devices in found.items()}
    names = {host: ", ".join(f"{n} × {name}" for name, n in sorted(own.items())) for host, own in counts.items()}
    common, odd = odd_ones(names)
    if odd and common and not any("npu" in kind for kind in kinds.values()):
        shown = ", ".join(f"{host} has {name or 'none'}" for host, name in odd.items())
        what = f"accelerators differ: {shown}, other machines have {common}; the slowest device limits the speed"
        yield DoctorFinding("accelerators", "warn", tuple(odd), what, (), "unlike")


def _busy(host: str, devices: list[Any]) -> Iterator[DoctorFinding]:
    busy = [d for d in devices if d["used_mib"] > BUSY_SHARE * d["memory_mib"] or d["busy_percent"] > BUSY_PERCENT]
    if busy:
        users = [f"{p['name']} (process {p['pid']}, {p['used_mib']} MiB)" for d in busy for p in d["processes"]]
        form = "{kind} {index}: {used_mib} of {memory_mib} MiB, {busy_percent} % busy"
        shown = ", ".join(form.format(**device) for device in busy)
        what = f"accelerators of {host} are in use: {shown}{', by ' if users else ''}{', '.join(users[:3])}"
        hints = ("wait, end the other processes, or choose free devices with CUDA_VISIBLE_DEVICES",)
        yield DoctorFinding("accelerators", "warn", (host,), what, hints, f"busy:{host}", (f"jobs:{host}",))
