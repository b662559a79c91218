"""One of the processes of bench.slow_links; it lives as long as the bench.

Each line on its standard input is a command as JSON, and it answers with one line of JSON: "prepare" makes a network
anew and takes a few steps, "measure" times steps, "finish" makes replicas equal and says what they are.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torchvision.models import resnet18

from bench.group import joined
from bench.slow_methods import RealStep, VirtualStep, make_way, read_spec
from manyhands.sync.measure import pass_seconds

CLASSES, SIDE, BATCH = 1000, 32, 8
WARM_STEPS = 2
# Of Ethernet, IPv4, and TCP with timestamps.
HEADER_BYTES = 14 + 20 + 32


class Turn:
    """One way of agreeing on a network of its own."""

    def __init__(self, world, method, steps):
        spec = read_spec(method)
        torch.manual_seed(0)
        network = resnet18(num_classes=CLASSES)
        module = RealStep(network) if steps == "real" else VirtualStep(network, float(steps.removesuffix("ms")) / 1e3)
        self.world, self.way = world, make_way(spec, module, world)
        self.optimizer = torch.optim.SGD(self.way.parameters, lr=1e-3, momentum=0.9, fused=True)
        generator = torch.Generator().manual_seed(world.rank)
        self.pictures = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
        self.labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        # The first exchange begins with the first step that is timed.
        self.made = spec.every - WARM_STEPS if spec.every > WARM_STEPS else 0
        self.first = self.made + WARM_STEPS if spec.every > WARM_STEPS else spec.every * WARM_STEPS
        self.agreeing_s = 0.0

    def step(self):
        started = time.perf_counter()
        self.way.before_update(self.made)
        computing = time.perf_counter()
        self.way.call(self.pictures, self.labels).backward()
        agreeing = time.perf_counter()
        self.way.agree()
        averaged = time.perf_counter()
        self.optimizer.step()
        self.made += 1
        updated = time.perf_counter()
        self.way.after_update(self.made)
        self.optimizer.zero_grad()
        self.agreeing_s += (computing - started) + (averaged - agreeing) + (time.perf_counter() - updated)

    def warm_up(self):
        while self.made < self.first:
            self.step()
        count = sum(one.numel() for one in self.way.parameters)
        return {"parameters": count, "pass_s": pass_seconds(count, "cpu")}

    def measure(self, updates):
        """Times whole steps; those of local steps begin with an exchange and end before the next."""
        dist.barrier()
        self.agreeing_s, payload, before = 0.0, self.way.payload_bytes(), wire()
        started, computed = time.perf_counter(), time.process_time()
        for _ in range(updates):
            self.step()
        seconds, cpu_s, after = time.perf_counter() - started, time.process_time() - computed, wire()
        sent = self.way.payload_bytes()
        return {
            "updates": updates,
            "seconds": seconds,
            "cpu_s": cpu_s,
            "agreeing_s": self.agreeing_s,
            **{name: count - before[name] for name, count in after.items()},
            "payload_bytes": None if sent is None else sent - payload,
        }

    def finish(self):
        started = time.perf_counter()
        self.way.finish()
        return {"finish_s": time.perf_counter() - started, "checksum": checksum(self.way.parameters)}


def checksum(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def wire():
    """What this host has received and sent, with and without frames' headers."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    words = [int(word) for word in line.partition(":")[2].split()]
    return {
        "received_bytes": words[0],
        "sent_bytes": words[8],
        "received_data_bytes": words[0] - words[1] * HEADER_BYTES,
        "sent_data_bytes": words[8] - words[9] * HEADER_BYTES,
    }


def serve(world):
    turn = None
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "prepare":
            turn = Turn(world, told["method"], told["steps"])
            answer = turn.warm_up()
        elif told["do"] == "measure":
            answer = turn.measure(told["updates"])
        else:
            answer, turn = turn.finish(), None
        print(json.dumps(answer), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--init", required=True)
    given = parser.parse_args()
    with joined(given) as world:
        serve(world)


if __name__ == "__main__":
    main()
