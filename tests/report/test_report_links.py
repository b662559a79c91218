"""The picture of links is whole whatever was measured."""

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from manyhands.report.links import draw_links

hosts = st.integers(1, 5).map(lambda count: [f"host-{number}" for number in range(count)])
speeds = st.dictionaries(st.integers(0, 24), st.tuples(st.floats(0.01, 1e5), st.floats(0.01, 900)))


@settings(max_examples=6, deadline=None)
@given(hosts, speeds)
def test_any_measurements_make_a_sound_picture(tmp_path_factory, names, measured):
    pairs = [(one, two) for one in names for two in names if one != two]
    known = {pairs[number]: both for number, both in measured.items() if number < len(pairs)}
    file = tmp_path_factory.mktemp("picture") / "deep" / "links.png"
    draw_links(names, {p: v[0] for p, v in known.items()}, {p: v[1] for p, v in known.items()}, file)
    with Image.open(file) as picture:
        picture.load()
    assert [path.name for path in file.parent.iterdir()] == ["links.png"]
