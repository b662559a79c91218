"""Settings for all tests."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# What tests start hears Ctrl-C and a closed terminal, also where the tests run in the background or under nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# A deadline would be an assertion about time.
# A loaded machine, which makes Unicode's tables for the first time, is no test's fault; fixtures that are the same for
# all examples are meant.
MEANT = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile("manyhands", deadline=None, suppress_health_check=MEANT)
# Of a property that says no number itself; each run tries others.
hypothesis.settings.register_profile("fast", hypothesis.settings.get_profile("manyhands"), max_examples=40)


def pytest_configure(config):
    """Fewer examples in the fast suite."""
    hypothesis.settings.load_profile("fast" if config.option.markexpr == "not slow" else "manyhands")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """No test reads or fills the user's cache, settings or data."""
    own = tmp_path_factory.mktemp("own")
    for variable, name in {"MANYHANDS_CACHE": "cache", "XDG_CACHE_HOME": "measured", "XDG_STATE_HOME": "state"}.items():
        (own / name).mkdir()
        monkeypatch.setenv(variable, str(own / name))
    for variable in ("MANYHANDS_DATA", "MANYHANDS_MIRROR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def real_data():
    """A function that gives a path in the real data, or skips."""
    base = Path(os.environ.get("MANYHANDS_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")

    def find(name: str) -> Path:
        if not (base / name).exists():
            pytest.skip(f"would have read {base / name} (MANYHANDS_TEST_DATA names another folder)")
        return base / name

    return find


@pytest.fixture
def small_disk(tmp_path):
    """A folder that is a disk of 4 MiB by itself."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"NOT SHOWN what a full disk does: none can be mounted here ({mounted.stderr.strip()})")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def fill():
    """Fills a disk to the last byte; what is returned is the file that does so."""

    def filled(folder):
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as stream:
            # Others may write and remove their own files there meanwhile.
            while free := shutil.disk_usage(folder).free:
                with contextlib.suppress(OSError):
                    stream.write(bytes(free))
        return filler

    return filled
