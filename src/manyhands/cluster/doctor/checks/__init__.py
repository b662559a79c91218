"""One file for each thing that the doctor looks at; none imports another.

Each has `run(survey) -> list[DoctorFinding]`, a pure function. It says nothing of machines whose facts it lacks:
why they lack is another check's finding. Where all is well it may say so with one finding "ok".
"""
