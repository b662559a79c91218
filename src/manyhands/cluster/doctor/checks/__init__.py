"""Checks of the doctor, one module each; no module imports another.

Each module defines a pure function `run(survey) -> list[DoctorFinding]`. The function skips machines without the facts
of the check, because another check reports missing facts. Without problems, it may return one finding "ok".
"""
