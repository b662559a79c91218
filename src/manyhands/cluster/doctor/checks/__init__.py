"""Checks of the doctor by topic; no module imports another.

Each module defines a pure generator `run(survey) -> Iterator[DoctorFinding]`. It skips machines without the facts of a
check, because another check reports missing facts. Without problems, it may yield findings "ok".
"""
