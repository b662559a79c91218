"""Accelerators that are missing, busy, unlike, or can't be used."""

from collections import Counter
from typing import Any

from manyhands.cluster.doctor.compare import fact, odd_ones, on_host, who
from manyhands.cluster.doctor.findings import DoctorFinding, Severity, Survey
from manyhands.cluster.doctor.unused import explain_unused

# Desktops and monitoring hold a little memory without being in the way.
BUSY_SHARE, BUSY_PERCENT = 0.1, 20


def run(survey: Survey) -> list[DoctorFinding]:
    """Broken drivers first; a machine with one has no accelerators to be judged."""
    if survey.needs.device == "cpu":
        return []
    found = fact(survey, "accelerators")
    checks = (_broken(survey), _too_few(survey, found), _unlike(survey, found), _unused(survey), _busy(found))
    return [finding for findings in checks for finding in findings]


def _broken(survey: Survey) -> list[DoctorFinding]:
    return [
        DoctorFinding("accelerators", "fail", (host,), f"the accelerators of {host} do not respond: {error}",
                (f"test the driver: {on_host(survey, host, 'nvidia-smi')}",
                 "reload or reinstall the driver, for example after a kernel update"),
                f"accelerators:{host}", ("collective",))
        for host, error in fact(survey, "errors", "accelerators").items()
    ]  # fmt: skip


def _too_few(survey: Survey, found: dict[str, list[Any]]) -> list[DoctorFinding]:
    kind = survey.needs.device
    few: dict[str, int] = {}
    for host, devices in found.items():
        count = sum(device["kind"] == kind for device in devices)
        if kind in {"cuda", "npu"} and count < survey.needs.processes.get(host, 1):
            few[host] = count
    if not few:
        return []
    shown = ", ".join(
        f"{host} has {count} for {survey.needs.processes.get(host, 1)} processes" for host, count in few.items()
    )
    what = f"too few {kind} devices: {shown}"
    hints = ("use at most one process per device", "or train on CPUs: --device cpu")
    return [DoctorFinding("accelerators", "fail", tuple(few), what, hints, "accelerators", ("unlike",))]


def _unlike(survey: Survey, found: dict[str, list[Any]]) -> list[DoctorFinding]:
    """Machines with and without accelerators can't train together by themselves; unequal ones wait for the slowest."""
    names = {host: _listed(devices) for host, devices in found.items()}
    kinds = {host: ",".join(sorted({device["kind"] for device in devices})) or "cpu" for host, devices in found.items()}
    common, odd = odd_ones(kinds)
    if odd and survey.needs.device == "auto":
        what = f"the machines have different device types: {next(iter(odd.values()))} on {who(odd)}, {common} elsewhere"
        hints = ("train on CPUs everywhere: --device cpu", f"or remove {who(odd)} from the run")
        return [DoctorFinding("accelerators", "fail", tuple(odd), what, hints, "unlike", ("collective",))]
    common, odd = odd_ones(names)
    if odd and common and not any(device["kind"] == "npu" for devices in found.values() for device in devices):
        shown = ", ".join(f"{host} has {name or 'none'}" for host, name in odd.items())
        what = f"the machines have different accelerators: {shown}, other machines {common}; the slowest sets the pace"
        return [DoctorFinding("accelerators", "warn", tuple(odd), what, (), "unlike")]
    return []


def _listed(devices: list[Any]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(Counter(d["name"] for d in devices).items()))


def _unused(survey: Survey) -> list[DoctorFinding]:
    """What is there and can't be used; a driver that doesn't answer is told already."""
    severity: Severity = "warn" if survey.needs.device == "auto" else "fail"
    found: list[DoctorFinding] = []
    for host, facts in survey.facts.items():
        explained = None if "accelerators" in facts.get("errors", {}) else explain_unused(facts, host)
        if explained:
            what, cause, explains = (
                f"{explained[0]}; training on {host} would use the CPU",
                f"unused:{host}",
                ("accelerators", "unlike"),
            )
            found.append(DoctorFinding("accelerators", severity, (host,), what, explained[1], cause, explains))
    return found


def _busy(found: dict[str, list[Any]]) -> list[DoctorFinding]:
    findings: list[DoctorFinding] = []
    for host, devices in found.items():
        busy = [d for d in devices if _in_use(d)]
        if busy:
            users = [f"{p['name']} (process {p['pid']}, {p['used_mib']} MiB)" for d in busy for p in d["processes"]]
            shown = ", ".join(
                f"{d['kind']} {d['index']}: {d['used_mib']} of {d['memory_mib']} MiB, {d['busy_percent']} % busy"
                for d in busy
            )
            by = f", by {', '.join(users[:3])}" if users else ""
            what = f"accelerators of {host} are in use: {shown}{by}"
            hints = ("wait, end the other processes, or choose free devices with CUDA_VISIBLE_DEVICES",)
            cause, explains = f"busy:{host}", (f"jobs:{host}",)
            findings.append(DoctorFinding("accelerators", "warn", (host,), what, hints, cause, explains))
    return findings


def _in_use(device: dict[str, Any]) -> bool:
    return device["used_mib"] > BUSY_SHARE * device["memory_mib"] or device["busy_percent"] > BUSY_PERCENT
