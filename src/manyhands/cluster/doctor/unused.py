"""An accelerator that is there and can't be used: what is missing, and what to do about it."""

import os
from collections.abc import Mapping
from typing import Any

from manyhands.cluster.doctor.accelerators import ask_torch
from manyhands.cluster.doctor.facts.devices import HIDING, accelerators, cards

DRIVERS = {
    "NVIDIA": "install NVIDIA's driver; nvidia-smi then lists the card",
    "AMD": "install AMD's driver (ROCm); rocm-smi then lists the card",
    "Huawei": "install Ascend's driver and firmware; npu-smi info then lists the card",
}
HIDDEN = {"", "-1", "NoDevFiles"}


def explain_unused(facts: Mapping[str, Any], host: str) -> tuple[str, tuple[str, ...]] | None:
    """Why torch sees no accelerator on a machine that has one, in one sentence, and what to do.

    None where there is nothing to say, or where the user hid the devices. Of the facts "cards", "accelerators",
    "torch_devices" and "environment" count; what is missing is unknown.
    """
    environment = facts.get("environment", {})
    seen = facts.get("torch_devices")
    hidden = any(environment.get(name, "unset").strip() in HIDDEN for name in HIDING)
    if hidden or seen is None or seen.get("count"):
        return None
    working, installed = facts.get("accelerators", ()), facts.get("cards", ())
    if working:
        names = ", ".join(sorted({device["name"] for device in working}))
        return _blind(f"{host} has {len(working)} accelerator(s) ({names}) that torch can't use", seen)
    if installed:
        vendors = sorted({card["vendor"] for card in installed})
        where = ", ".join(f"{card['vendor']} at PCI {card['address']}" for card in installed)
        what = f"{host} has {len(installed)} accelerator card(s) ({where}) and no working driver for them"
        return what, tuple(DRIVERS[vendor] for vendor in vendors)
    return None


def _blind(what: str, seen: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    if not seen.get("built_for"):
        mend = "install the torch that is built for them; its own site says how"
        return f"{what}: torch {seen.get('version', '')} is built for CPUs alone", (mend,)
    said = f" ({seen['said']})" if seen.get("said") else ""
    built = seen["built_for"]
    mends = (
        f"update the driver until nvidia-smi shows {built} or later, or install a torch that is built for an older one",
        "in a container: was it started with its devices (--gpus all)?",
    )
    return what + said, mends


def unused_here() -> tuple[str, tuple[str, ...]] | None:
    """`explain_unused` of this machine; torch is only asked where there is an accelerator."""
    try:
        working: list[dict[str, Any]] = accelerators()
    except (OSError, RuntimeError) as error:
        return f"the accelerators of this machine don't answer: {error}", ("nvidia-smi", "reload the driver")
    facts = {"accelerators": working, "cards": cards(), "environment": dict(os.environ)}
    if not working and not facts["cards"]:
        return None
    return explain_unused({**facts, "torch_devices": ask_torch()}, "this machine")
