"""What bench.slow_links measured, as a Markdown table for people."""

import statistics

from bench.slow_prediction import choice, predict
from manyhands.sync.choose import words_of

HEAD = [
    "link", "method", "rounds", "images/s", "s/step", "predicted", "CPU s/step", "of DDP on none", "of itself on none",
    "received kB/step", "sent kB/step", "without headers", "predicted", "payload", "agreeing s/step",
    "finish s", "equal", "load",
]  # fmt: skip
PICTURES = 8


def show(records):
    """One table for each kind of step."""
    turns = [record for record in records if "method" in record]
    for steps in dict.fromkeys(record["steps"] for record in turns):
        ours = [record for record in turns if record["steps"] == steps]
        kind = "real steps" if steps == "real" else f"VIRTUAL steps: a sleep of {steps} for forward and backward"
        size = ours[0]["processes"]
        print(f"\n{kind}; {size} processes, {PICTURES} pictures each; medians over rounds, (lowest to highest)\n")
        print("| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD))
        for rate, method in sorted({(one["rate"], one["method"]) for one in ours}, key=lambda at: order(ours, at)):
            print("| " + " | ".join(row(ours, rate, method)) + " |")
        for rate in dict.fromkeys(record["rate"] for record in ours):
            if auto := choice(ours, rate):
                print(f"\nauto on {rate}: {words_of(auto)}, delay {auto.delay}, {auto.step_s:.3f} s/step predicted")
    for record in records:
        if "first_step_s" in record:
            print(record)


def order(records, place):
    """By rate, then by method, as they came first."""
    rates = list(dict.fromkeys(record["rate"] for record in records))
    methods = list(dict.fromkeys(record["method"] for record in records if record["round"] == 0))
    return rates.index(place[0]), methods.index(place[1]) if place[1] in methods else len(methods)


def row(records, rate, method):
    found = chosen(records, rate, method)
    step_s, sent_bytes = predict(records, rate, method) or (None, None)
    if not found:
        return [
            rate,
            method,
            "hopeless, not run",
            "",
            "",
            number(step_s, ".3f"),
            *[""] * 5,
            kilo(sent_bytes),
            *[""] * 5,
        ]
    per_step = lambda name: statistics.median(one[name] / one["updates"] for one in found.values())  # noqa: E731
    first = next(iter(found.values()))
    loads = [load for one in found.values() for load in one["load"]]
    return [
        rate,
        method,
        str(len(found)),
        f"{statistics.median(speed(one) for one in found.values()):.1f}",
        f"{per_step('seconds'):.3f}",
        number(step_s, ".3f"),
        f"{per_step('cpu_s'):.3f}" if "cpu_s" in first else "",
        ratio(found, chosen(records, "none", "allreduce")),
        ratio(found, chosen(records, "none", method)),
        kilo(per_step("received_bytes")),
        kilo(per_step("sent_bytes")),
        kilo(per_step("sent_data_bytes")),
        kilo(sent_bytes),
        "" if first["payload_bytes"] is None else kilo(per_step("payload_bytes")),
        f"{per_step('agreeing_s'):.3f}",
        f"{statistics.median(one['finish_s'] for one in found.values()):.1f}",
        "" if method == "alone" else "yes" if all(one["equal"] for one in found.values()) else "NO",
        f"{min(loads):.1f} to {max(loads):.1f}",
    ]


def chosen(records, rate, method):
    """What was measured of a method on a link, by round."""
    ours = [one for one in records if (one["rate"], one["method"]) == (rate, method) and "seconds" in one]
    return {one["round"]: one for one in ours}


def speed(record):
    """Pictures per second, of all processes."""
    return record["processes"] * PICTURES * record["updates"] / record["seconds"]


def ratio(mine, others):
    """Of speeds, round by round."""
    values = [speed(mine[number]) / speed(others[number]) for number in mine.keys() & others.keys()]
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def kilo(value):
    return number(None if value is None else value / 1e3, ",.1f")


def number(value, form):
    return "" if value is None else format(value, form)
