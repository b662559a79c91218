"""Runs the cases of `cases.py`, the most telling first, each in a process of its own with a limit of time.

    python -m tests.gpu [--device npu:0] [--wheels FOLDER] [--seconds 900] [--out FILE.json] [NAME …]

Needs torch and torchvision; what else is missing is taken from the folder of wheels that `make wheels-gpu` filled. On
a machine without an accelerator `--device cpu` runs what can be run there, to prove the cases themselves.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tests.gpu.result import ASK_TORCH, ResultFile, nameless

ROOT = Path(__file__).parents[2]
# So much is left for the rest of the run when a case begins; else it isn't begun.
LEAST_S = 15.0
ENDED = {0: "proven", 3: "skipped", 4: "unproven"}

# What is run, in its order, the most telling first, and how many seconds each part may take.
LIMITS = {
    "trains_and_evaluates": 90,
    "two_processes_make_the_updates_of_one": 60,
    "the_card_computes_what_the_processor_does": 45,
    "groups_in_one_pass_are_what_each_is_alone": 45,
    "fp16_skips_alike_and_goes_on": 45,
    "a_bad_gradient_spoils_no_weight": 45,
    "half_precisions_learn": 45,
    "out_of_memory_says_what_fits": 45,
    "goes_on_to_the_same_bits": 60,
    "nccl_with_one_process": 45,
    "a_peers_death_is_heard": 60,
    "a_killed_process_is_replaced": 60,
    "other_modes_make_the_same_updates": 100,
    "sync_methods_agree": 60,
    "pictures_from_a_folder_and_packed": 60,
    "a_loop_of_ones_own": 45,
    "auto_precision_is_settled": 60,
    "compiled": 90,
    "stops_when_asked_and_goes_on": 60,
    "two_cards_make_the_updates_of_one": 60,
    "two_cards_share_parameters": 60,
    "two_cards_compress_gradients": 60,
    "two_cards_hear_a_peers_death": 60,
}
BENCH = {
    "kernels_of_an_update": 60,
    "resnet18_at_32": 110,
    "cifar10_by_the_fast_recipe": 60,
    "resnet50_at_224_from_packed": 150,
    "cifar10_to_94_by_resnet18": 200,
}


def environment(wheels: Path | None, scratch: Path) -> dict[str, str]:
    """That of the cases: the source, then what the wheels bring, then this Python's own packages.

    Wheels are unpacked, not installed: that needs no pip, no environment beside torch's, and leaves torch's alone.
    """
    paths = [str(ROOT / "src"), str(ROOT)]
    found = sorted(wheels.glob("*.whl")) if wheels else []
    if found:
        for wheel in found:
            zipfile.ZipFile(wheel).extractall(scratch / "packages")
        paths.append(str(scratch / "packages"))
    kept = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "MANYHANDS_CACHE": str(scratch / "cache"),
        "XDG_STATE_HOME": str(scratch / "state"),
        "GLOO_SOCKET_IFNAME": "lo",
        # Threads of several processes on the same cores wait for each other; what is tried here is the card.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def begin(given: argparse.Namespace, scratch: Path, kind: str) -> tuple[dict[str, str], ResultFile]:
    """The environment of all that is run, and the file that tells of it; ends here where a package is missing."""
    wheels = given.wheels if given.wheels.is_dir() else None
    variables = environment(wheels, scratch)
    try:
        asked = subprocess.run(
            [sys.executable, "-c", "import cyclopts, pydantic, highspy, platformdirs, tomli_w\n" + ASK_TORCH],
            env=variables, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"this Python can't run the cases: {error.stderr.strip().splitlines()[-1]}\n"
            f"  do: fill {given.wheels} where there is a network: make wheels-gpu PYTHON_VERSION={version}\n"
            "      torch and torchvision must be there: PYTHON=/path/to/python names the Python that has them"
        )
    machine = json.loads(asked.stdout.splitlines()[-1])
    device = given.device if given.device != "auto" else f"{machine['accelerator']}:0" if machine["cards"] else "cpu"
    # What is off on untested devices is what is tested here.
    variables["MANYHANDS_TESTED_DEVICES"] = device.partition(":")[0]
    return variables, ResultFile(given.out, kind, device, machine)


def run_part(module: str, name: str, device: str, variables: dict[str, str], limit_s: float) -> tuple[str, float, dict]:
    """One part in a process of its own: how it ended, its seconds, and what it measured or said."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer, output = Path(folder) / "answer.json", Path(folder) / "output"
        with output.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", module, name, device, str(answer), str(limit_s)],
                env={**variables, "TMPDIR": folder}, cwd=folder, stdout=stream, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                status = ENDED.get(process.wait(limit_s), "failed")
            except subprocess.TimeoutExpired:
                status = "timed out"
        with contextlib.suppress(ProcessLookupError):  # what it started, and didn't end
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found = json.loads(answer.read_text()) if answer.exists() else {}
        if status in {"failed", "timed out"}:
            found["output"] = output.read_text(errors="replace")
    return status, time.monotonic() - began, found


def run_all(module: str, cases: dict, given: argparse.Namespace, kind: str) -> None:
    """Runs a module's parts in their order, as far as the time goes; exits with 1 where one failed."""
    began, bad = time.monotonic(), 0
    if unknown := [name for name in given.names if name not in cases]:
        sys.stderr.write(f"no part is named {', '.join(unknown)}\n  do: one of {', '.join(cases)}\n")
        sys.exit(2)
    # Some parts alone don't take the place of what all have given.
    given.out = given.out or Path(f"{kind}-some.json" if given.names else f"{kind}.json")
    with tempfile.TemporaryDirectory() as scratch:
        variables, result = begin(given, Path(scratch), kind)
        device = result.result["device"]
        for name, limit_s in cases.items():
            if given.names and name not in given.names:
                continue
            left_s = given.seconds - (time.monotonic() - began)
            if left_s < LEAST_S:
                result.add(name, "not run", 0.0, said="no time was left")
                continue
            status, seconds, found = run_part(module, name, device, variables, min(given.patience * limit_s, left_s))
            bad += status in {"failed", "timed out"}
            result.add(name, status, seconds, **found)
            said = nameless(found.get("said") or (found.get("output") or "").strip().rpartition("\n")[2])
            said = said or json.dumps(found.get("figures") or "").strip('"')
            print(f"{name:36} {status:10} {seconds:6.1f} s  {said}", flush=True)
        result.write(complete=True)
    print(f"\n{given.out} tells all of it, and names no machine, person or path: send it back")
    sys.exit(min(1, bad))


if __name__ == "__main__":
    if importlib.util.find_spec("tests.gpu") is None:
        sys.exit("run this in the folder of the source: python -m tests.gpu")
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", help="these alone")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "wheels-gpu")
    parser.add_argument("--seconds", type=float, default=900.0, help="nothing begins that could end after so long")
    parser.add_argument("--patience", type=float, default=2.0, help="factor of each part's limit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bench", action="store_true", help="measure, beside a bare loop, instead of proving")
    given = parser.parse_args()
    if given.bench:
        run_all("bench.gpu_parts", BENCH, given, "gpu-bench")
    run_all("tests.gpu.case", LIMITS, given, "gpu-test")
