"""The table and the picture hold what they are given."""

import io
import itertools

from PIL import Image
from rich.console import Console

from manyhands.cli.plan import wide_console
from manyhands.core.mesh import make_mesh, parse_mesh
from manyhands.planner.cost import Prediction
from manyhands.planner.explain import candidates_table, draw_plan
from manyhands.planner.find import PlanCandidate


def candidate(name, mesh, compute_s, sent_s, gradients_s, memory_bytes, sent_bytes, **more):
    prediction = Prediction(compute_s, sent_s, gradients_s, memory_bytes, (), sent_bytes)
    return PlanCandidate(name, parse_mesh(mesh), {}, prediction, **more)


def test_the_table_has_each_plan_its_numbers_and_the_reason():
    candidates = [
        candidate("data parallel", "dp=4", 0.1, 0, 0.0305, 3 << 30, 94e6, measured_seconds=0.14),
        candidate("search [1]", "dp=2,tp=2", 0.09, 0.02, 0, 1 << 30, 5e6, fits=False),
    ]
    console = Console(file=io.StringIO(), width=140)
    console.print(candidates_table(candidates, "data parallel", "data parallel is kept: [1] is within noise"))
    kept, found = [line for line in console.file.getvalue().splitlines() if "=" in line]
    assert kept.split() == ["→", "data", "parallel", "dp=4", "130.5", "100.0", "30.5", "3.00", "94.0", "140.0"]
    assert found.split()[:6] == ["search", "[1]", "dp=2,tp=2", "110.0", "90.0", "20.0"]
    assert "too large" in found
    assert "[1] is within noise" in console.file.getvalue()


def test_the_table_fits_100_columns():
    note = "refused, since the momentum of 32 machines would not fit, and that is said in many more words than these"
    names = ("data parallel, local lowrank every 256", "one process", "data parallel, local int8 every 16")
    rows = [
        candidate(name, "dp=16,tp=2,tp2=2", 184041.7, 0, 9.7, 1 << 37, 1e9, fits=False, note=note) for name in names
    ]
    console = wide_console(io.StringIO(), 100)
    console.print(candidates_table(rows, "one process", "below"))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert all(word in text for word in ("184051400", "128.00 too large", "words"))
    assert "…" not in text


def test_the_picture_of_any_number_of_layers_has_each_ones_colors(tmp_path):
    many = {f"a$_{number}": ["noicrz"[(number + axis) % 6] for axis in range(3)] for number in range(120)}
    draw_plan(many, make_mesh({"dp": 4, "tp": 2, "tp2": 2}), tmp_path / "plan.png")
    draw_plan({}, make_mesh({"dp": 2}), tmp_path / "plan.png")
    draw_plan({"fc": ["o", "n"]}, make_mesh({"dp": 2, "tp": 16}), tmp_path / "plan.png")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.png"]
    with Image.open(tmp_path / "plan.png") as picture:
        found = [color for _, color in picture.getcolors(1 << 16)]
        row = [picture.getpixel((x, 46)) for x in range(picture.width)]
    orange, blue = (245, 133, 24), (76, 120, 168)
    assert {orange, blue} <= set(found)
    # A stripe of either color for each of 32 devices.
    changes = [color for color, after in itertools.pairwise(row) if color != after]
    assert changes.count(orange) == changes.count(blue) == 32
