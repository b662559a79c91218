"""The proof: a real all-reduce of all machines."""

from manyhands.cluster.doctor.compare import who
from manyhands.cluster.doctor.findings import DoctorFinding, Survey


def run(survey: Survey) -> list[DoctorFinding]:
    tried = survey.collective
    if tried is None or tried.result == "skipped":
        return []
    if tried.result == "ok":
        what = f"an all-reduce over {len(survey.hosts)} machines took {tried.seconds:.1f} s"
        return [DoctorFinding("collective", "ok", survey.hosts, what, cause="collective")]
    lost = f"; missing: {who(tried.missing)}" if tried.missing else ""
    what = f"the machines reach each other, but an all-reduce failed: {tried.said}{lost}"
    hints = ("try gloo: --backend gloo", "with NCCL, set NCCL_DEBUG=INFO on the machines for details")
    return [DoctorFinding("collective", "fail", tried.missing or survey.hosts, what, hints, "collective")]
