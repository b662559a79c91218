"""Our own cost as the work grows: pictures of a folder, machines of a head, records of a run, devices of a plan.

    python -m bench.growth [folder] [hosts] [records] [planner] --sample IMAGENET-SAMPLE

Each work at four sizes; slopes are those of a straight line through the logarithms: 1 is linear. Hosts are network
namespaces with real sshd (root); pictures are hard links below --scratch. What one size gave is kept in --out, so works
may be measured one after another; with --draw and no work the picture and the table are made anew.
"""

import argparse
import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy

WORKS = {"folder": "pictures", "hosts": "machines", "records": "records", "planner": "devices"}


def measure_all(given):
    scratch = Path(tempfile.mkdtemp(prefix="manyhands-growth-", dir=given.scratch))
    try:
        for work in given.works:
            module = importlib.import_module(f"bench.growth_{work}")
            more = (given.sample,) if work == "folder" else ()
            for size in module.SIZES:
                found = module.measure(size, scratch, *more)
                keep(given.out, work, size, {**found, "load": os.getloadavg()[0]})
                print(work, f"{size:,}", json.dumps(figures(work, found)), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def keep(path, work, size, found):
    told = json.loads(path.read_text()) if path.exists() else {}
    told.setdefault(work, {})[str(size)] = found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n")


def figures(work, found):
    """What is drawn of one measurement, by its name; CPU seconds, since others use this machine too."""
    if work == "folder":
        parts = by_kind(found["processes"])
        return {
            "to the first update, s": found["seconds"],
            "processor, all, s": sum(process["cpu_s"] for process in found["processes"]),
            "peak of a training process, MiB": max(process["peak_mib"] for process in parts["training"]),
            "peak of a loader process, MiB": max(process["peak_mib"] for process in parts["loader"]),
            "of all together (PSS), MiB": sum(process["pss_mib"] for process in found["processes"]),
        }
    if work == "hosts":
        head, *others = found["processes"]
        told = {
            "to all having reached each other, s": found["reached_s"],
            "ways tried": found["ways"],
            "head's processor, s": head["cpu_s"],
            "head, MiB": head["rss_mib"],
            "head's descriptors": head["descriptors"],
            "head's threads": head["threads"],
            "all ssh beside it, MiB (PSS)": sum(process["pss_mib"] for process in others),
        }
        return {**told, "to the start, s": found["started_s"]} if "started_s" in found else told
    if work == "records":
        return {
            "metrics.jsonl, MiB": found["metrics_mib"],
            "report, s": found["report"]["cpu_s"],
            "report, MiB": found["report"]["peak_mib"],
            "logs, s": found["logs"]["cpu_s"],
            "logs, MiB": found["logs"]["peak_mib"],
            "report.html, MiB": found["page_mib"],
        }
    return {"search, s": found["cpu_s"], "search, MiB": found["peak_mib"]}


def by_kind(processes):
    """The processes of a run by what they do: the head, its agent, those that train, and those that decode."""
    head, agent = processes[0]["pid"], processes[1]["pid"]
    kinds = {head: "head", agent: "agent"}
    for process in processes[2:]:
        kinds[process["pid"]] = "training" if process["parent"] == agent else "loader"
    return {kind: [each for each in processes if kinds[each["pid"]] == kind] for kind in kinds.values()}


def slope(sizes, values):
    """Of a straight line through the logarithms, between the two largest sizes: what is fixed hides the rest before."""
    (before, last), (low, high) = sizes[-2:], values[-2:]
    return numpy.log(max(high, 1e-3) / max(low, 1e-3)) / numpy.log(last / before)


def table(told):
    for work, unit in WORKS.items():
        rows = {int(size): figures(work, found) for size, found in told.get(work, {}).items()}
        if not rows:
            continue
        sizes = sorted(rows)
        print(f"\n| {unit} | " + " | ".join(f"{size:,}" for size in sizes) + " | slope |")
        print("| --- " * (len(sizes) + 2) + "|")
        for name in rows[sizes[0]]:
            values = [rows[size].get(name) for size in sizes]
            there = [size for size in sizes if name in rows[size]]
            found = slope(there, [rows[size][name] for size in there])
            shown = (("" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}") for value in values)
            print(f"| {name} | " + " | ".join(shown) + f" | {found:.2f} |")


def draw(told, path):
    from manyhands.report.drawing import house_style, new_figure

    with house_style():
        figure = new_figure(10, 7)
        for axes, (work, unit) in zip(figure.subplots(2, 2).flat, WORKS.items(), strict=True):
            rows = {int(size): figures(work, found) for size, found in told.get(work, {}).items()}
            sizes = sorted(rows)
            for name in rows[sizes[0]] if rows else ():
                there = [size for size in sizes if name in rows[size]]
                axes.plot(there, [max(rows[size][name], 1e-2) for size in there], "o-", markersize=4, label=name)
            axes.set(xscale="log", yscale="log", xlabel=unit, xticks=sizes, xticklabels=[f"{size:,}" for size in sizes])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
            axes.grid(axis="y")
            axes.legend(fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", choices=[*WORKS, []], metavar="WORK")
    parser.add_argument("--sample", default="imagenet-sample", help="class folders with some pictures to link to")
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="on one disk with room for 1.3 million links")
    parser.add_argument("--out", type=Path, default=Path("build/growth.json"))
    parser.add_argument("--draw", type=Path, help="where the picture goes (SVG)")
    given = parser.parse_args()
    measure_all(given)
    told = json.loads(given.out.read_text())
    table(told)
    if given.draw:
        draw(told, given.draw)


if __name__ == "__main__":
    main()
