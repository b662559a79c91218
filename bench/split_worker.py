"""One of the processes of bench.split: they measure their link, rank 0 searches, and all time the finalists in turns.

It finds plans exactly as the mode `auto` does; rank 0 prints what was found as one line of JSON.
"""

import argparse
import itertools
import json
import random

from bench.group import joined
from bench.split_cases import ENTRIES
from manyhands.core.errors import UserError
from manyhands.core.link_speeds import fitted_link, links_of
from manyhands.parallel.norm import group_batch_norms
from manyhands.parallel.plain import broadcast_plain
from manyhands.parallel.plan import plan_from_plain
from manyhands.parallel.tracing import describe_network
from manyhands.planner.choose import DATA_PARALLEL, pick_measured
from manyhands.planner.find import SearchRequest, find
from manyhands.planner.measure import measure_collectives
from manyhands.planner.op_times import OpTimes
from manyhands.planner.trial import measure

TIMES_BUDGET_S, LINK_BUDGET_S = 30.0, 5.0


def main():
    given = arguments()
    with joined(given) as world:
        result = try_out(given, world)
        if given.rank == 0:
            print(json.dumps(result), flush=True)


def try_out(given, world):
    case = ENTRIES[given.case].case()
    points = measure_collectives({(0,): None}, "cpu", ("all_reduce",), budget_s=LINK_BUDGET_S)["all_reduce", (0,)]
    link = fitted_link("all_reduce", world.size, points)
    own = search(given, case, link) if world.is_main else None
    found = broadcast_plain(own, world)
    plans = {name: plan_from_plain(row["plan"], name) if row["plan"] else None for name, row in found["rows"].items()}
    seconds = measure(case, plans, world, given.rounds)
    pick = pick_measured(seconds)
    return {
        **found,
        "link": {"mbit_per_s": link.bytes_per_s * 8e-6, "latency_ms": link.latency_s * 1e3},
        "seconds": seconds,
        "gains": pick.gains,
        "picked": pick.name,
        "reason": pick.reason,
    }


def search(given, case, link):
    """Finalists, or all strategies of the tail, as plain data."""
    model = case.make()
    group_batch_norms(model)
    graph = describe_network(model, case.picture)
    times = OpTimes("cpu", TIMES_BUDGET_S)
    links = lambda mesh: links_of(mesh, within=link)  # noqa: E731 - as `worker/plan_choice.py` gives
    found = find(graph, SearchRequest(given.size, case.batch), times, links)
    finalists = found.finalists()
    options = {option.name: (found, option) for option in finalists}
    if given.tail:
        options |= tail(given, graph, case, times, links, finalists)
    times.save()
    rows = {
        name: {
            "plan": None if name == DATA_PARALLEL else source.plan_of(option).as_plain(),
            "predicted": option.prediction.as_plain(),
        }
        for name, (source, option) in options.items()
    }
    return {"rows": rows, "finalists": [option.name for option in finalists], "predicted_reason": found.pick.reason}


def tail(given, graph, case, times, links, finalists):
    """For some strategies of the fully connected layers and the loss, the best plan that keeps them; each plan once."""
    seen = [(option.mesh, option.letters) for option in finalists]
    layers = [*ENTRIES[given.case].tail, "loss"]
    able = [[letter for letter in sorted(graph.ops[name].letters) if letter in "noir"] for name in layers]
    combinations = list(itertools.product(*able))
    random.Random(given.seed).shuffle(combinations)
    options = {}
    for letters in combinations:
        if len(options) == given.tail:
            break
        pins = {name: f"{letter}@dp" for name, letter in zip(layers, letters, strict=True)}
        try:
            found = find(graph, SearchRequest(given.size, case.batch, pins=pins), times, links)
        except UserError:
            continue
        able_ones = [option for option in found.options if option.name.startswith("search")]
        if able_ones and (able_ones[0].mesh, able_ones[0].letters) not in seen:
            seen.append((able_ones[0].mesh, able_ones[0].letters))
            options["".join(letters)] = (found, able_ones[0])
    return options


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--init", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tail", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
