"""Software that differs between machines."""

from manyhands.cluster.doctor.compare import fact, odd_ones, on_host, who
from manyhands.cluster.doctor.findings import DoctorFinding, Severity, Survey

# What happens where they differ decides how bad it is.
PACKAGES: dict[str, tuple[Severity, str]] = {
    "manyhands": ("fail", "all machines need the same version"),
    "torch": ("fail", "results may differ, and processes may hang"),
    "nccl": ("fail", "NCCL needs the same version on all machines"),
    "torch-npu": ("fail", "all machines need the same version"),
    "torchvision": ("warn", "images may be decoded or resized differently"),
    "numpy": ("warn", "random numbers may differ"),
}


def run(survey: Survey) -> list[DoctorFinding]:
    """One finding for each program that differs; NCCL comes with torch, so torch explains it."""
    found = [
        *_unfit(survey),
        *_no_compiler(survey),
        *_packages(survey),
        *_python(survey),
        *_drivers(survey),
        *_same_number(survey),
    ]
    versions = fact(survey, "versions")
    if not found and len(versions) > 1:
        shown = next(iter(versions.values()))
        names = [f"{name} {shown[name]}" for name in ("torch", "nccl", "manyhands") if name in shown]
        what = f"all machines have {', '.join(names)}"
        found.append(DoctorFinding("versions", "ok", tuple(versions), what, cause="versions"))
    return found


def _unfit(survey: Survey) -> list[DoctorFinding]:
    """Machines whose torchvision was made for another torch."""
    found: list[DoctorFinding] = []
    for host, misfit in fact(survey, "torchvision").items():
        if misfit:
            torch = survey.facts[host]["versions"].get("torch", "").partition("+")[0]
            hints = (
                _install(survey, host, f"torch=={torch} torchvision"),
                "for another build, add --force-reinstall and the --index-url that torch was installed from",
            )
            found.append(DoctorFinding("versions", "fail", (host,), f"{host}: {misfit}", hints, f"misfit:{host}"))
    return found


def _no_compiler(survey: Survey) -> list[DoctorFinding]:
    """Machines without the compiler that `train.compile` needs."""
    without = tuple(host for host, there in fact(survey, "compiler").items() if not there)
    if not without:
        return []
    what = f"train.compile = true needs a C++ compiler, which is missing on {who(without)}"
    hints = (f"install a compiler: {on_host(survey, without[0], 'sudo apt-get install g++')}",)
    return [DoctorFinding("versions", "warn", without, what, hints, "compiler")]


def _packages(survey: Survey) -> list[DoctorFinding]:
    found: list[DoctorFinding] = []
    versions = fact(survey, "versions")
    for name, (severity, why) in PACKAGES.items():
        values = {host: own.get(name, "") for host, own in versions.items()}
        common, odd = odd_ones(values)
        if not odd:
            continue
        if not common and name == "nccl":
            continue  # machines without accelerators have none, which is found elsewhere
        found.append(_differs(survey, name, severity, why, common or "", odd))
    return found


def _differs(
    survey: Survey, name: str, severity: Severity, why: str, common: str, odd: dict[str, str]
) -> DoctorFinding:
    others = [host for host in fact(survey, "versions") if host not in odd]
    shown = ", ".join(f"{host} has {name} {version}" if version else f"{host} has no {name}"
                      for host, version in odd.items())  # fmt: skip
    what = f"{shown}, but {who(others)} {common or 'none'}; {why}"
    package = "torch" if name == "nccl" else name
    wanted = fact(survey, "versions", package).get(others[0], "") if others else ""
    wanted = wanted.partition("+")[0]  # the part behind + names a build, which pip's usual index doesn't know
    hints = [_install(survey, host, f"{package}=={wanted}") for host in odd if wanted]
    explains = ("version:nccl", "version:torchvision", "package") if name in {"torch", "manyhands"} else ()
    return DoctorFinding("versions", severity, tuple(odd), what, tuple(hints), f"version:{name}", explains)


def _install(survey: Survey, host: str, requirement: str) -> str:
    python = survey.facts[host].get("python", {}).get("path", "python3")
    return on_host(survey, host, f"{python} -m pip install {requirement}")


def _python(survey: Survey) -> list[DoctorFinding]:
    versions = fact(survey, "python", "version")
    common, odd = odd_ones({host: ".".join(version.split(".")[:2]) for host, version in versions.items()})
    if not odd:
        return []
    shown = ", ".join(f"{host} runs Python {versions[host]}" for host in odd)
    others = [host for host in versions if host not in odd]
    what = f"{shown}, {who(others)} {versions[others[0]]}; code and data may behave differently"
    hints = (f"install Python {common} on {who(odd)}", "or set the Python to use: --cluster.python /path/to/python")
    return [DoctorFinding("versions", "warn", tuple(odd), what, hints, "version:python")]


def _drivers(survey: Survey) -> list[DoctorFinding]:
    found: list[DoctorFinding] = []
    for name in ("nvidia", "ascend", "cann"):
        versions = fact(survey, "drivers", name)
        common, odd = odd_ones(versions)
        if odd:
            shown = ", ".join(f"{host} has {version}" for host, version in odd.items())
            what = f"the {name} driver differs: {shown}, other machines have {common}"
            hints = (f"install version {common} on {who(odd)}",)
            found.append(DoctorFinding("versions", "warn", tuple(odd), what, hints, f"driver:{name}"))
    return found


def _same_number(survey: Survey) -> list[DoctorFinding]:
    """Two checkouts of manyhands with one version number."""
    common, odd = odd_ones(fact(survey, "package"))
    if not odd:
        return []
    what = f"the source files of manyhands on {who(odd)} differ from the other machines, under the same version"
    hints = (f"install the same checkout on every machine (hash {', '.join(odd.values())}, expected {common})",)
    return [DoctorFinding("versions", "fail", tuple(odd), what, hints, "package")]
