"""Checks of `manyhands doctor` by topic; no module imports another.

Each module defines a pure generator `run(survey) -> Iterator[DoctorFinding]`. Checks skip machines that lack a fact,
because another check reports missing facts. A check without a problem may yield findings of severity "ok".
"""
