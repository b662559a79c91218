"""Software that is missing, or differs between machines."""

from collections.abc import Iterator

from manyhands.cluster.doctor.findings import DoctorFinding, Severity, Survey, odd_ones, who

# What happens where they differ decides how bad it is.
PACKAGES: dict[str, tuple[Severity, str]] = {
    "manyhands": ("fail", "all machines need the same version"),
    "torch": ("fail", "results may differ, and processes may hang"),
    "nccl": ("fail", "NCCL needs the same version on all machines"),
    "torch-npu": ("fail", "all machines need the same version"),
    "torchvision": ("warn", "images may be decoded or resized differently"),
    "numpy": ("warn", "random numbers may differ"),
}


def run(survey: Survey) -> Iterator[DoctorFinding]:
    """One finding for each program that differs; NCCL comes with torch, so torch explains it."""
    found = [*_on_each_machine(survey), *_packages(survey), *_python_and_drivers(survey)]
    yield from found
    versions = survey.fact("versions")
    if not found and len(versions) > 1:
        shown = next(iter(versions.values()))
        names = [f"{name} {shown[name]}" for name in ("torch", "nccl", "manyhands") if name in shown]
        what = f"all machines have {', '.join(names)}"
        yield DoctorFinding("versions", "ok", tuple(versions), what, cause="versions")


def _on_each_machine(survey: Survey) -> Iterator[DoctorFinding]:
    """A torchvision for another torch, and a missing compiler."""
    for host, misfit in survey.fact("torchvision").items():
        if misfit:
            torch = survey.facts[host]["versions"].get("torch", "").partition("+")[0]
            hints = (
                _install(survey, host, f"torch=={torch} torchvision"),
                "for another build, add --force-reinstall and the --index-url that torch was installed from",
            )
            yield DoctorFinding("versions", "fail", (host,), f"{host}: {misfit}", hints, f"misfit:{host}")
    without = tuple(host for host, there in survey.fact("compiler").items() if not there)
    if without:
        what = f"train.compile = true needs a C++ compiler, which is missing on {who(without)}"
        hints = (f"install a compiler: {survey.on_host(without[0], 'sudo apt-get install g++')}",)
        yield DoctorFinding("versions", "warn", without, what, hints, "compiler")


def _packages(survey: Survey) -> Iterator[DoctorFinding]:
    versions = survey.fact("versions")
    for name, (severity, why) in PACKAGES.items():
        common, odd = odd_ones({host: own.get(name, "") for host, own in versions.items()})
        if not odd or (not common and name == "nccl"):
            continue  # machines without accelerators have no NCCL, which is found elsewhere
        others = [host for host in versions if host not in odd]
        shown = ", ".join(f"{host} has {name} {version}" if version else f"{host} has no {name}"
                          for host, version in odd.items())  # fmt: skip
        what = f"{shown}, but {who(others)} {'have' if len(others) > 1 else 'has'} {common or 'none'}; {why}"
        package = "torch" if name == "nccl" else name
        # The part behind + names a build, which pip's usual index doesn't know.
        wanted = versions[others[0]].get(package, "").partition("+")[0]
        hints = tuple(_install(survey, host, f"{package}=={wanted}") for host in odd if wanted)
        explains = ("version:nccl", "version:torchvision", "package") if name in {"torch", "manyhands"} else ()
        yield DoctorFinding("versions", severity, tuple(odd), what, hints, f"version:{name}", explains)
    common, odd = odd_ones(survey.fact("package"))
    if odd:
        what = f"the source files of manyhands on {who(odd)} differ from the same version on the other machines"
        hints = (f"install the same checkout on every machine (hash {', '.join(odd.values())}, expected {common})",)
        yield DoctorFinding("versions", "fail", tuple(odd), what, hints, "package")


def _install(survey: Survey, host: str, requirement: str) -> str:
    python = survey.facts[host].get("python", {}).get("path", "python3")
    return survey.on_host(host, f"{python} -m pip install {requirement}")


def _python_and_drivers(survey: Survey) -> Iterator[DoctorFinding]:
    versions = survey.fact("python", "version")
    common, odd = odd_ones({host: ".".join(version.split(".")[:2]) for host, version in versions.items()})
    if odd:
        shown = ", ".join(f"{versions[host]} on {host}" for host in odd)
        others = [host for host in versions if host not in odd]
        what = f"Python versions differ: {shown}, {versions[others[0]]} on {who(others)}; code may behave differently"
        hints = (f"install Python {common} on {who(odd)}", "or set the Python to use: --cluster.python /path/to/python")
        yield DoctorFinding("versions", "warn", tuple(odd), what, hints, "version:python")
    for name in ("nvidia", "ascend", "cann"):
        common, odd = odd_ones(survey.fact("drivers", name))
        if odd:
            shown = ", ".join(f"{host} has {version}" for host, version in odd.items())
            what = f"the {name} driver differs: {shown}, other machines have {common}"
            hints = (f"install version {common} on {who(odd)}",)
            yield DoctorFinding("versions", "warn", tuple(odd), what, hints, f"driver:{name}")
