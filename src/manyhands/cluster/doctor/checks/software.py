"""Checks that software, code and data exist and are the same on all machines."""

from collections.abc import Iterator

from manyhands.cluster.doctor.findings import DoctorFinding, Severity, Survey, find_outliers, join_hosts

PACKAGES: dict[str, tuple[Severity, str]] = {  # severity and consequence of different versions
    "manyhands": ("fail", "all machines need the same version"),
    "torch": ("fail", "results may differ, and processes may hang"),
    "nccl": ("fail", "NCCL needs the same version on all machines"),
    "torch-npu": ("fail", "all machines need the same version"),
    "torchvision": ("warn", "images may be decoded or resized differently"),
    "numpy": ("warn", "random numbers may differ"),
}
SHOWN = 4
HINTS = ("copy the code with the job: --sync-code", "or update the folders: git pull, rsync")


def run(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields findings on data, code and versions. Omits NCCL if torch differs, because torch installs NCCL."""
    yield from _check_data(survey)
    yield from _check_code(survey)
    found = [*_check_builds(survey), *_check_packages(survey), *_check_python_and_drivers(survey)]
    yield from found
    versions = survey.fact("versions")
    if not found and len(versions) > 1:
        shown = next(iter(versions.values()))
        names = [f"{name} {shown[name]}" for name in ("torch", "nccl", "manyhands") if name in shown]
        what = f"all machines have {', '.join(names)}"
        yield DoctorFinding("versions", "ok", tuple(versions), what, cause="versions")


def _check_builds(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields findings on machines whose torchvision is built for another torch, or without a needed compiler."""
    for host, misfit in survey.fact("torchvision").items():
        if misfit:
            torch = survey.facts[host].get("versions", {}).get("torch", "").partition("+")[0]
            other = "for another build, add --force-reinstall and the --index-url that torch was installed from"
            hints = (_install_command(survey, host, f"torch{torch and f'=={torch}'} torchvision"), other)
            yield DoctorFinding("versions", "fail", (host,), f"{host}: {misfit}", hints, f"misfit:{host}")
    without = tuple(host for host, there in survey.fact("compiler").items() if not there)
    if without:
        what = f"train.compile = true needs a C++ compiler, which is missing on {join_hosts(without)}"
        hints = (f"install a compiler: {survey.on_host(without[0], 'sudo apt-get install g++')}",)
        yield DoctorFinding("versions", "warn", without, what, hints, "compiler")


def _check_packages(survey: Survey) -> Iterator[DoctorFinding]:
    versions = survey.fact("versions")
    for name, (severity, why) in PACKAGES.items():
        common, odd = find_outliers({host: own.get(name, "") for host, own in versions.items()})
        if not odd or (not common and name == "nccl"):
            continue  # most machines have no NCCL; another check finds the difference
        others = [host for host in versions if host not in odd]
        shown = (f"{host} has {name} {own}" if own else f"{host} has no {name}" for host, own in odd.items())
        has = f"{join_hosts(others)} {'have' if len(others) > 1 else 'has'}"
        package = "torch" if name == "nccl" else name
        # The suffix after + names a build, which is not on PyPI.
        wanted = versions[others[0]].get(package, "").partition("+")[0]
        hints = tuple(_install_command(survey, host, f"{package}=={wanted}") for host in odd if wanted)
        explains = ("version:nccl", "version:torchvision", "package") if name in {"torch", "manyhands"} else ()
        what, cause = f"{', '.join(shown)}, but {has} {common or 'none'}; {why}", f"version:{name}"
        yield DoctorFinding("versions", severity, tuple(odd), what, hints, cause, explains)
    common, odd = find_outliers(survey.fact("package"))
    if odd:
        what = f"the source files of manyhands on {join_hosts(odd)} differ from the same version on the other machines"
        hints = (f"install the same checkout on every machine (hash {', '.join(odd.values())}, expected {common})",)
        yield DoctorFinding("versions", "fail", tuple(odd), what, hints, "package")


def _install_command(survey: Survey, host: str, requirement: str) -> str:
    python = survey.facts[host].get("python", {}).get("path", "python3")
    return survey.on_host(host, f"{python} -m pip install {requirement}")


def _check_python_and_drivers(survey: Survey) -> Iterator[DoctorFinding]:
    versions = survey.fact("python", "version")
    common, odd = find_outliers({host: ".".join(version.split(".")[:2]) for host, version in versions.items()})
    if odd:
        shown = ", ".join(f"{versions[host]} on {host}" for host in odd)
        others = [host for host in versions if host not in odd]
        where, most = join_hosts(odd), f"{versions[others[0]]} on {join_hosts(others)}"
        what = f"Python versions differ: {shown}, {most}; code may behave differently"
        hints = (f"install Python {common} on {where}", "or set the Python to use: --cluster.python /path/to/python")
        yield DoctorFinding("versions", "warn", tuple(odd), what, hints, "version:python")
    for name in ("nvidia", "ascend", "cann"):
        common, odd = find_outliers(survey.fact("drivers", name))
        if odd:
            shown = ", ".join(f"{host} has {version}" for host, version in odd.items())
            what = f"the {name} driver differs: {shown}, other machines have {common}"
            hints = (f"install version {common} on {join_hosts(odd)}",)
            yield DoctorFinding("versions", "warn", tuple(odd), what, hints, f"driver:{name}")


def _check_code(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields findings on different files in the work folders. They are failures only if the job uses these files."""
    needed = bool(survey.needs.files)
    folders = {host: code for host, code in survey.fact("code").items() if "exists" in code}
    missing = [host for host, code in folders.items() if not code["exists"]]
    if missing and needed:
        what = f"the folder of the job's code, {folders[missing[0]]['path']}, is missing on {join_hosts(missing)}"
        hints = (HINTS[0], "or set the folder on these machines: --cluster.workdir")
        yield DoctorFinding("code", "fail", tuple(missing), what, hints, "code")
        return
    complete = {host: code for host, code in folders.items() if code["exists"] and code["whole"]}
    for name in survey.needs.files:
        inside = not name.startswith(("/", "~", ".."))
        hosts = [host for host, code in complete.items() if inside and name not in code["files"]]
        if hosts:
            what = f"{name} is missing in {folders[hosts[0]]['path']} on {join_hosts(hosts)}"
            yield DoctorFinding("code", "fail", tuple(hosts), what, HINTS, "code")
            return
    _, odd = find_outliers({host: code["hash"] for host, code in complete.items()})
    # Folders without a common file name are no copies of one another.
    if odd and (needed or set.intersection(*(set(code["files"]) for code in complete.values()))):
        usual = next(host for host in complete if host not in odd)
        theirs, ours = complete[next(iter(odd))], complete[usual]
        names = sorted(dict(theirs["files"].items() ^ ours["files"].items()))
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        there, here = str(theirs["revision"]), str(ours["revision"])
        at = f" (revision {there}, {usual} {here})" if there and here and there != here else ""
        what = f"the code on {join_hosts(odd)} differs from {usual}{at}: {shown}"
        yield DoctorFinding("code", "fail" if needed else "warn", tuple(odd), what, HINTS, "code")
    elif needed and len(complete) > 1:
        count = len(next(iter(complete.values()))["files"])
        yield DoctorFinding("code", "ok", tuple(complete), f"code is identical ({count} files)", cause="code")


def _check_data(survey: Survey) -> Iterator[DoctorFinding]:
    """Yields a finding on machines without the data or, if all machines have the data, on different data."""
    found = {host: data for host, data in survey.fact("data").items() if data["kind"] != "none"}
    missing = [host for host, data in found.items() if not data["exists"]]
    if missing:
        path = found[missing[0]]["path"]
        what = f"the data {path} is missing on {join_hosts(missing)}"
        if found[missing[0]]["kind"] == "named" and survey.needs.download:
            hints = ("let the job download the data at its start, or copy the data first",)
            yield DoctorFinding("data", "warn", tuple(missing), what, hints, "data")
            return
        source = next((host for host in found if host not in missing), "")
        copy = f"copy the data, on {source}: rsync -a {found[source]['path']}/ {missing[0]}:{path}/" if source else ""
        hints = (copy or "check the path of the data", "or choose a folder that exists on every machine")
        yield DoctorFinding("data", "fail", tuple(missing), what, hints, "data", ("collective:data",))
        return
    complete = {host: data for host, data in found.items() if data["whole"]}
    amounts = {host: f"{data['files']:,} files of {data['bytes']:,} bytes" for host, data in complete.items()}
    _, odd = find_outliers({host: data["hash"] for host, data in complete.items()})
    if odd:
        usual, first = next(host for host in complete if host not in odd), next(iter(odd))
        shown = ", ".join(f"{host} has {amounts[host]}" for host in odd)
        what = f"data differs: {shown}, but {usual} has {amounts[usual]}"
        if all(complete[host]["files"] == complete[usual]["files"] for host in odd):
            what += ", with different names or sizes"
        copy = f"rsync -a --delete --dry-run {complete[usual]['path']}/ {first}:{complete[first]['path']}/"
        hints = (f"list the differences, on {usual}: {copy}", "copy the data: the same command without --dry-run")
        yield DoctorFinding("data", "fail", tuple(odd), what, hints, "data")
    elif len(complete) > 1:
        what = f"data is identical ({next(iter(complete.values()))['files']:,} files)"
        yield DoctorFinding("data", "ok", tuple(complete), what, cause="data")
