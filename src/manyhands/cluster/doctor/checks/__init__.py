"""Checks of the doctor by topic; no module imports another.

Each module defines a pure generator `run(survey) -> Iterator[DoctorFinding]`. It skips machines that lack a fact,
because another check reports missing facts. If there is no problem, it may yield findings of severity "ok".
"""
