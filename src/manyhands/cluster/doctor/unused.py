"""An accelerator that is there and can't be used: what is missing, and what to do about it."""

import os
from collections.abc import Mapping
from typing import Any

from manyhands.cluster.doctor.accelerators import ask_torch
from manyhands.cluster.doctor.facts.devices import HIDING, accelerators, cards

DRIVERS = {
    "NVIDIA": "install the NVIDIA driver, then check that nvidia-smi lists the card",
    "AMD": "install the AMD driver (ROCm), then check that rocm-smi lists the card",
    "Huawei": "install the Ascend driver and firmware, then check that npu-smi info lists the card",
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
        what = f"{host} has {len(installed)} accelerator card(s) ({where}) without a working driver"
        return what, tuple(DRIVERS[vendor] for vendor in vendors)
    return None


def _blind(what: str, seen: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    if not seen.get("built_for"):
        hints = "install a torch build for these accelerators: https://pytorch.org/get-started/locally"
        return f"{what}: torch {seen.get('version', '')} is a CPU build", (hints,)
    said = f" ({seen['said']})" if seen.get("said") else ""
    built = seen["built_for"]
    hints = (
        f"update the driver until nvidia-smi shows {built} or later, or install a torch build for an older version",
        "in a container, pass the devices to the container (--gpus all)",
    )
    return what + said, hints


def unused_here() -> tuple[str, tuple[str, ...]] | None:
    """`explain_unused` of this machine; torch is only asked where there is an accelerator."""
    try:
        working: list[dict[str, Any]] = accelerators()
    except (OSError, RuntimeError) as error:
        hints = ("test the driver: nvidia-smi", "reload the driver")
        return f"the accelerators of this machine do not respond: {error}", hints
    facts = {"accelerators": working, "cards": cards(), "environment": dict(os.environ)}
    if not working and not facts["cards"]:
        return None
    return explain_unused({**facts, "torch_devices": ask_torch()}, "this machine")
