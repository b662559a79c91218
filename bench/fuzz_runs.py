"""The files of a run folder, as the report, `ps`, `logs` and `predict` read them."""

import json
import random
from pathlib import Path
from typing import Any

from manyhands.config.load import load_job
from manyhands.core import records
from manyhands.core.records import EvaluationDetail, EvaluationMetrics, Event, Failure, StepMetrics
from manyhands.core.registry import Running
from manyhands.core.trained import find_record
from manyhands.report.follow import Follower
from manyhands.report.line import ScreenProgress, live_line
from manyhands.report.now import as_object, look
from manyhands.report.page import render
from manyhands.report.pictures import draw_all
from manyhands.report.read import read_run
from manyhands.report.summary import result_lines, result_object
from manyhands.report.terminal import Screen
from manyhands.run.logs import read_places, show_logs

JOB = '[data]\nname = "digits"\n[model]\nname = "mlp"\n[train]\nepochs = 2\n'


def write_run(folder: Path, _rng: random.Random) -> None:
    """A finished run of four steps, in two epochs, with a failure and its checkpoint's record."""
    for name in ("ranks/failures", "evaluations", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "job.toml").write_text(JOB)
    for step in range(1, 5):
        epoch, within = (step // 2, step % 2)
        records.append(
            folder / "metrics.jsonl",
            StepMetrics(
                time=step,
                epoch=epoch,
                step=step,
                step_in_epoch=within,
                steps_per_epoch=2,
                total_steps=4,
                loss=1.0 / step,
                top1=0.5,
                learning_rate=0.1,
                images_per_s=10.0,
                samples=8,
                data_share=0.1,
                epoch_loss=0.5 if step == 2 else None,
            ),
        )
    records.append(
        folder / "metrics.jsonl",
        EvaluationMetrics(time=5, epoch=2, step=4, count=8, loss=0.3, top1=0.5, top5=1.0, best=True),
    )
    for kind, at in (("started", 0), ("saved", 2), ("resumed", 2), ("warning", 3), ("finished", 5)):
        records.append(folder / "events.jsonl", Event(time=at, kind=kind, step=at, message="words", data={"a": [1]}))
    detail = EvaluationDetail(
        time=5,
        epoch=2,
        step=4,
        count=8,
        top1=0.5,
        top5=1.0,
        loss=0.3,
        classes=["cat", "dog", "owl"],
        confusion=[(0, 0, 3), (0, 1, 2), (1, 1, 1), (2, 0, 2)],
    )
    for name in ("best", "last"):
        records.write_json(folder / "evaluations" / f"{name}.json", detail)
    failure = Failure(time=5, rank=1, host="n2", pid=7, error="E", what="w", mend=["m"], traceback="t\nu")
    records.write_json(folder / "ranks" / "failures" / "1.json", failure)
    records.write_json(folder / "env.json", {"processes": 2, "hosts": ["n1"], "versions": {"torch": "2"}})
    records.write_json(folder / "plan.json", {"mode": "data", "exceptions": ["x"], "mesh": {"dp": 2}})
    records.write_json(folder / "machines.json", [{"host": "n1", "ranks": [0, 2], "folder": "/x", "local": True}])
    pictures = {"size": 4, "resize": 4, "channels": 1, "mean": [0.5], "std": [0.5]}
    records.write_json(
        folder / "network.json", {"v": 1, "name": "mlp", "num_classes": 2, "pictures": pictures, "classes": ["a", "b"]}
    )
    (folder / "ranks" / "0.log").write_text("one\ntwo\n")


def read_report(folder: Path) -> None:
    """Everything that the page and the last lines say; one in thirty with its pictures, which take a second."""
    run = read_run(folder)
    pictures = draw_all(run, folder / "pictures") if len(str(run.steps)) % 30 == 0 else {}
    render(run, pictures)
    json.dumps(result_object(run), allow_nan=False)
    result_lines(run)


def read_small_files(folder: Path) -> None:
    """What `ps`, `logs`, the screen, `predict` and `resume` read of a run folder."""
    running = Running(time=0, pid=1, created=0, host="h", run=str(folder), hosts=["h"], command=["x"])
    json.dumps(as_object(running, look(running)))
    progress = ScreenProgress()
    for record in Follower(folder).poll():
        progress.take(record)
        for width in (40, 100):
            live_line(progress, 10.0, width)
    with (folder / "screen").open("w", encoding="utf-8") as stream:
        screen = Screen(folder, stream=stream)
        (folder / "metrics.jsonl").exists()
        screen.close()
    find_record(folder / "checkpoints" / "step-00000004", {})
    if (folder / "job.toml").is_file():
        load_job({}, file=folder / "job.toml", environment={})
    if all(place.local for place in read_places(_run_folder(folder))):
        show_logs(_run_folder(folder), None, last=0, follow=False, show=_nothing, say=_nothing)


def _run_folder(folder: Path) -> Any:
    from manyhands.core.folder import RunFolder

    return RunFolder(folder)


def _nothing(_text: str) -> None:
    """Shown to nobody."""
