"""A full disk costs the checkpoint, not the run."""

import pytest

from tests.e2e.command import QUICK, assert_one_screen, events, finish, run, running, wait_until

pytestmark = pytest.mark.timeout(300)
# Of many samples, so that what is recorded of each epoch doesn't fill the disk by itself.
ENDLESS = [
    "synthetic:60000x1x8x8x10",
    "mlp",
    "--epochs",
    "100000",
    "--set",
    "checkpoint.every=20steps",
    "--set",
    "train.evaluate_every=0",
    *QUICK,
]


@pytest.mark.slow
def test_a_run_goes_on_over_a_full_disk_and_its_records_are_whole_afterwards(small_disk, fill):
    folder = small_disk / "run"
    with running("train", *ENDLESS, "-n", "1", "--out", folder) as process:
        wait_until(lambda: events(folder, "saved"), process)
        filler = fill(small_disk)
        for line in process.stderr:
            if "is full: training continues" in line:
                break
        filler.unlink()
        wait_until(lambda: "was not saved at step" in str(events(folder, "warning")), process)
        step = events(folder, "warning")[0]["step"]
        wait_until(lambda: events(folder, "saved")[-1]["step"] > step, process)
        process.terminate()
        ended = finish(process)
    assert ended.code == 75, ended.err
    assert events(folder, "stopped")[-1]["step"] == events(folder, "saved")[-1]["step"]


def test_a_start_on_a_full_disk_is_one_screen(small_disk, fill):
    fill(small_disk)
    ended = run("train", *ENDLESS, "--out", small_disk / "run")
    assert ended.code == 2
    assert_one_screen(ended.err)
    assert "No space left" in ended.err
