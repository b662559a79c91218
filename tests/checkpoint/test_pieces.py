import itertools
import json
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from manyhands.checkpoint import files
from manyhands.checkpoint.describe import NetworkLayout, shape_of, shards_to_write
from manyhands.checkpoint.files import TornCheckpointError, verify_checkpoint
from manyhands.checkpoint.folders import find_checkpoint, newest_checkpoint, prune_checkpoints, read_state
from manyhands.checkpoint.read import load_checkpoint, open_checkpoint
from manyhands.checkpoint.reshard import merge, read_network_layout, reshard
from manyhands.checkpoint.snapshot import Snapshot, read_tensors
from manyhands.checkpoint.write import local_contents, save_unsharded, write_stream
from manyhands.core.errors import RunError, UserError
from manyhands.core.mesh import Mesh, TensorLayout, layout_from_plain, make_mesh, parse_mesh, shard_boundaries
from tests.checkpoint.cuts import (
    MESHES,
    assert_same,
    bits,
    cuts,
    layouts,
    local,
    networks,
    save_one_by_one,
    with_optimizer,
    write_tensors,
)

TP2 = Mesh((("tp", 2),))


@st.composite
def journeys(draw):
    network = draw(networks())
    shapes = {name: tuple(tensor.shape) for name, tensor in network.items()}
    return network, draw(cuts(shapes)), draw(cuts(shapes))


@settings(max_examples=60)
@given(journey=journeys())
def test_whole_to_pieces_to_other_pieces_to_whole(journey, tmp_path_factory):
    network, one, other = journey
    folder = tmp_path_factory.mktemp("journey")
    whole = with_optimizer(network)
    first = save_one_by_one(folder / "first", whole, one)
    verify_checkpoint(first)
    assert_same(load_checkpoint(first), whole)
    source = open_checkpoint(first)
    for rank in range(other.mesh.size):
        assert_same(source.snapshot(other, rank), local(whole, other, rank))
    reshard(source, folder / "second", other)
    assert_same(load_checkpoint(folder / "second"), whole)
    merge(open_checkpoint(folder / "second"), folder / "third")
    assert_same(load_checkpoint(folder / "third"), whole)
    saved = save_unsharded(folder, 5, whole)
    assert_same(load_checkpoint(saved), whole)
    for name in (files.MODEL, files.OPTIMIZER):
        ours, theirs = read_tensors(folder / "third" / name), read_tensors(saved / name)
        assert list(ours) == list(theirs)
    reshard(open_checkpoint(folder / "third"), folder / "fourth", one)
    manifests = [json.loads((path / "manifest.json").read_text())["files"] for path in (first, folder / "fourth")]
    assert manifests[0] == manifests[1]
    shutil.rmtree(folder)


@settings(max_examples=100)
@given(journey=journeys(), data=st.data())
def test_any_region_of_any_view_is_read_from_any_file(journey, data, tmp_path_factory):
    network, cut, other = journey
    folder = tmp_path_factory.mktemp("region")
    paths = [save_one_by_one(folder, Snapshot(network, None, {"step": 1}), cut), folder / "w.safetensors"]
    paths.append(folder / "w.pth")
    write_tensors(paths[1], network)
    torch.save(network, paths[2])
    for path in paths:
        model = open_checkpoint(path).model
        assert model.names() == list(network)
        for name, tensor in network.items():
            assert (model.shape(name), model.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            view = other.layouts[name].view if name in other.layouts else tuple(tensor.shape)
            region = tuple(tuple(sorted(data.draw(st.integers(0, length)) for _ in "ab")) for length in view)
            read = model.read(name, view, region)
            assert read.shape == shape_of(region)
            assert bits(read) == bits(tensor.reshape(view)[tuple(slice(a, b) for a, b in region)])
    shutil.rmtree(folder)


@settings(max_examples=200)
@given(journey=journeys())
def test_what_ranks_write_is_everything_once(journey):
    network, cut, _ = journey
    contents = [local_contents(0, local(Snapshot(network), cut, rank), cut, rank) for rank in range(cut.mesh.size)]
    assert all(each.tensors == contents[0].tensors for each in contents)
    tensors = contents[0].tensors["model"]
    counts = {name: torch.zeros(described.layout.view) for name, described in tensors.items()}
    for rank in range(cut.mesh.size):
        for name, region in shards_to_write(tensors, cut.mesh, rank).items():
            counts[name][tuple(slice(start, stop) for start, stop in region)] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


@settings(max_examples=200)
@given(data=st.data(), mesh=st.sampled_from(MESHES), shape=st.lists(st.integers(0, 7), max_size=3))
def test_pieces_cover_a_tensor_once_and_a_machine_is_sent_nothing_that_it_holds(data, mesh, shape):
    """Whoever writes, on whatever machine: its pieces come from ranks that hold them, its own machine's if one does."""
    lies = data.draw(layouts(shape, mesh))
    assert layout_from_plain(lies.as_plain(), mesh, "here") == lies
    assert sum(math.prod(b - a for a, b in region) for _, region in lies.distinct_shards(mesh)) == math.prod(lies.shape)
    for rank in range(mesh.size):
        region, local_shape = lies.region(mesh, rank), lies.local_shape(mesh, rank)
        assert (len(local_shape), math.prod(local_shape)) == (len(shape), math.prod(shape_of(region)))
        same = [other for other in range(mesh.size) if lies.region(mesh, other) == region]
        assert lies.first_holder(mesh, rank) in (same[:1] if math.prod(local_shape) else same)
    first, last = sorted((data.draw(st.integers(0, mesh.size)), data.draw(st.integers(0, mesh.size))))
    near, counts = range(first, last), torch.zeros(lies.view)
    held = {lies.region(mesh, rank) for rank in near}
    for rank, region in lies.nearest_holders(mesh, near).items():
        assert region == lies.region(mesh, rank)
        assert rank in near or region not in held or not math.prod(shape_of(region))
        counts[tuple(slice(start, stop) for start, stop in region)] += 1
    assert bool((counts == 1).all())


@pytest.mark.parametrize("sizes", [{"dp": 10**9}, {"dp": 2**16, "tp": 2}, {"": 2}, {"dp": "2"}, {"d p": 2}])
def test_a_mesh_has_a_number_of_processes_that_there_can_be(sizes):
    with pytest.raises(UserError):
        make_mesh(sizes)
    with pytest.raises(UserError):
        parse_mesh("dp=" + "9" * 5_000)


@given(length=st.integers(0, 1000), parts=st.integers(1, 40))
def test_bounds_are_even_and_complete(length, parts):
    edges = shard_boundaries(length, parts)
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    assert (edges[0], edges[-1], len(sizes)) == (0, length, parts)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"view": [2, 10]},
        {"cuts": [[0, [0]], [0, [1]]]},
        {"cuts": [[0, [0]], [1, [0]]]},
        {"cuts": [[0, [1, 0]]]},
        {"cuts": [[0, [2]]]},
        *[{"shape": [length, 5], "view": [length, 5]} for length in (-4, 1e30, float("inf"), "3", True)],
        {"gradient_axes": [2]},
    ],
)
def test_what_is_no_layout_on_the_mesh_is_refused(change):
    mesh = Mesh((("dp", 2), ("tp", 2)))
    plain = TensorLayout((4, 5), (4, 5), ((0, (0,)), (1, (1,)))).as_plain()
    assert layout_from_plain(plain, mesh, "here").cuts
    with pytest.raises(UserError) as caught:
        layout_from_plain({**plain, **change}, mesh, "plan.json: w")
    assert caught.value.where == "plan.json: w"


@settings(max_examples=60)
@given(network=networks())
def test_a_streamed_file_is_what_the_library_writes(network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in network.items()}
    write_stream(folder / "ours.safetensors", specs, network.__getitem__)
    write_tensors(folder / "theirs.safetensors", network)
    read, wanted = load_file(folder / "ours.safetensors"), load_file(folder / "theirs.safetensors")
    assert {name: (t.dtype, bits(t)) for name, t in read.items()} == {n: (t.dtype, bits(t)) for n, t in wanted.items()}
    assert list(read_tensors(folder / "ours.safetensors")) == list(network)
    if len({tensor.dtype for tensor in network.values()}) == 1:
        assert (folder / "ours.safetensors").read_bytes() == (folder / "theirs.safetensors").read_bytes()
    shutil.rmtree(folder)


@pytest.fixture
def in_pieces(tmp_path):
    whole = with_optimizer({"fc.weight": torch.randn(5, 3), "fc.bias": torch.randn(5), "count": torch.tensor(4)})
    network_layout = NetworkLayout(TP2, {"fc.weight": TensorLayout((5, 3), (5, 3), ((0, (0,)),))})
    return whole, network_layout, save_one_by_one(tmp_path / "run", whole, network_layout)


def test_the_folder_is_as_earlier_versions_wrote_it(in_pieces):
    whole, _, path = in_pieces
    names = [f"model-0000{number}-of-00002.safetensors" for number in range(2)]
    described = json.loads((path / "pieces.json").read_text())
    assert json.loads((path / "manifest.json").read_text())["format"] == 2
    assert described["mesh"] == {"tp": 2}
    assert described["model"]["fc.weight"]["pieces"] == [
        {"file": names[0], "region": [[0, 2], [0, 3]]},
        {"file": names[1], "region": [[2, 5], [0, 3]]},
    ]
    assert torch.equal(load_file(path / names[1])["fc.weight"], whole.model["fc.weight"][2:])


def reseal(path):
    """Makes a manifest that fits whatever is in the folder."""
    content = json.loads((path / "manifest.json").read_text())
    names = [entry.name for entry in path.iterdir() if entry.name != "manifest.json"]
    content["files"] = {
        name: {"size": (path / name).stat().st_size, "sha256": files.file_digest(path / name)} for name in names
    }
    (path / "manifest.json").write_bytes(files.manifest_text(content))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content["model"]["fc.weight"]["pieces"].pop(),
        lambda content: content["model"]["fc.weight"]["pieces"][0].update(region=[[0, 3], [0, 3]]),
        lambda content: content["model"]["fc.weight"]["pieces"][0].update(file="../secret.safetensors"),
        lambda content: content["model"]["fc.weight"].update(dtype="load"),
        lambda content: content["mesh"].update(tp=0),
        lambda content: content.pop("model"),
    ],
)
def test_a_description_that_is_not_the_layouts_own_is_refused(in_pieces, spoil):
    _, _, path = in_pieces
    content = json.loads((path / "pieces.json").read_text())
    spoil(content)
    (path / "pieces.json").write_text(json.dumps(content))
    reseal(path)
    with pytest.raises(UserError, match=r"pieces|layout|mesh") as caught:
        open_checkpoint(path)
    assert "pieces.json" in str(caught.value)


def test_files_that_hold_something_else_than_described_are_refused(in_pieces):
    _, _, path = in_pieces
    file = path / "model-00001-of-00002.safetensors"
    write_tensors(file, {"fc.weight": torch.zeros(3, 3, dtype=torch.float64)})
    reseal(path)
    with pytest.raises(TornCheckpointError, match=r"model-00001-of-00002\.safetensors holds fc\.weight as"):
        load_checkpoint(path)
    write_tensors(file, {"other": torch.zeros(3, 3)})
    reseal(path)
    with pytest.raises(TornCheckpointError, match=r"model-00001-of-00002\.safetensors can't be read"):
        load_checkpoint(path)


def test_sharded_checkpoints_are_found_kept_and_removed_as_unsharded_ones(in_pieces, tmp_path):
    whole, cut, path = in_pieces
    later = save_one_by_one(tmp_path / "run", Snapshot(whole.model, whole.optimizer, {"step": 8}), cut)
    assert newest_checkpoint(path.parent) == (later, [])
    assert find_checkpoint(tmp_path / "run", "last") == later
    (later / "optimizer-00001-of-00002.safetensors").unlink()
    found, sentences = newest_checkpoint(path.parent)
    assert found == path
    assert "optimizer-00001-of-00002.safetensors is missing" in sentences[0]
    assert read_state(path)["step"] == 5
    save_unsharded(path.parent, 9, whole)
    assert prune_checkpoints(path.parent, 1, None) == [later, path]
    assert [entry.name for entry in path.parent.iterdir()] == ["step-00000009"]


def test_a_piece_or_a_state_that_is_cut_in_no_known_way_is_refused():
    lies, tied = TensorLayout((4, 3), (4, 3), ((0, (0,)),)), torch.zeros(2, 3)
    state = {"state": {"w": {"row_var": torch.zeros(4, 1)}}, "param_groups": []}
    for names, snapshot, sentence in (
        ("w", Snapshot({"w": tied}, state), r"row_var, but the layout expects \[2, 3\]"),
        ("w", Snapshot({"w": torch.zeros(4, 3)}), r"holds \[4, 3\] of w"),
        ("h", Snapshot({"h": tied, "w": tied}), "w is tied to the sharded h"),
    ):
        with pytest.raises(RunError, match=sentence):
            local_contents(1, snapshot, NetworkLayout(TP2, dict.fromkeys(names, lies)), 0)
    both = local_contents(1, Snapshot({"h": tied, "w": tied}), NetworkLayout(TP2, dict.fromkeys("hw", lies)), 0)
    assert both.tensors["model"]["w"].layout == lies


def test_a_file_whose_values_are_not_aligned_is_read(tmp_path):
    weight = torch.randn(3, 2, dtype=torch.float64)
    header = json.dumps({"w": {"dtype": "F64", "shape": [3, 2], "data_offsets": [0, 48]}}).encode()
    header += b" " * (3 - len(header) % 8)
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bits(weight))
    assert len(header) % 8
    assert torch.equal(open_checkpoint(file).model.read("w", (6,), ((1, 5),)), weight.view(-1)[1:5])


def test_a_cut_of_another_network_is_refused(in_pieces, tmp_path):
    _, _, path = in_pieces
    source = open_checkpoint(path)
    for name, shape in (("fc.weight", (3, 5)), ("head.weight", (5, 3))):
        with pytest.raises(UserError, match=name):
            reshard(source, tmp_path / "out", NetworkLayout(TP2, {name: TensorLayout(shape, shape)}))
    assert not (tmp_path / "out").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_nothing_is_overwritten(in_pieces, tmp_path):
    _, cut, path = in_pieces
    source = open_checkpoint(path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "w.pth").write_bytes(b"mine")
    for name in ("folder", "link", "w.pth"):
        with pytest.raises(UserError, match="already exists"):
            merge(source, tmp_path / name)
        with pytest.raises(UserError, match="already exists"):
            reshard(source, tmp_path / name, cut)
    assert (tmp_path / "w.pth").read_bytes() == b"mine"
    with pytest.raises(UserError, match="no folder"):
        merge(source, tmp_path / "no" / "where")
    with pytest.raises(UserError, match="unsupported file type"):
        merge(source, tmp_path / "model.pth.tar")


def test_single_files_lose_main_pys_prefix_where_a_plan_says_so_and_a_shard_is_none(in_pieces, tmp_path):
    _, _, path = in_pieces
    with pytest.raises(UserError, match="one process's shards"):
        open_checkpoint(path / "model-00000-of-00002.safetensors")
    weight = torch.randn(4, 2)
    optimizer = {"state": {}, "param_groups": []}
    torch.save(
        {"epoch": 3, "arch": "x", "state_dict": {"module.w": weight}, "optimizer": optimizer}, tmp_path / "c.pth.tar"
    )
    assert open_checkpoint(tmp_path / "c.pth.tar").model.names() == ["module.w"]
    source = open_checkpoint(tmp_path / "c.pth.tar", wanted={"w"})
    assert torch.equal(source.model.read("w"), weight)
    assert "optimizer" in source.notes[0]
    write_tensors(tmp_path / "c.safetensors", {"module.w": weight})
    model = open_checkpoint(tmp_path / "c.safetensors", wanted={"w"}).model
    assert torch.equal(model.read("w", (8,), ((3, 6),)), weight.view(-1)[3:6])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("{}", 'no "mesh"'),
        ('{"mesh": {"tp": 2}}', 'no "layouts"'),
        ('{"mesh": {"tp": 0}, "layouts": {}}', "tp has size 0"),
        ('{"mesh": {"tp": 2}, "layouts": {"w": {"shape": [4]}}}', "invalid tensor layout"),
    ],
)
def test_a_plan_that_is_none_is_refused(tmp_path, text, said):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        read_network_layout(tmp_path / "plan.json")
    assert "plan.json" in str(caught.value)
    with pytest.raises(UserError, match="can't be read"):
        read_network_layout(tmp_path / "gone.json")
